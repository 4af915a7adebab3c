"""The one list of replaced names is true, and versions outside the tested range are named."""

import importlib
import types
from importlib import metadata

import pytest
from packaging.version import Version

from accelerate_plugin import compat


@pytest.mark.parametrize("item", compat.REPLACEMENTS, ids=lambda item: f"{item.module}.{item.name}")
def test_every_listed_name_exists_where_it_is_used_and_has_a_replacement_and_a_reason(item: compat.Replacement) -> None:
    found = importlib.import_module(item.module)
    for part in item.name.split("."):
        found = getattr(found, part)
    assert callable(found)
    place, function = item.factory.split(":")
    assert callable(getattr(importlib.import_module(f"accelerate_plugin.{place}"), function))
    assert item.why


# The launcher decides by its arguments instead; the tests of the launch look at that.
IN_WORKERS = [item for item in compat.REPLACEMENTS if not item.factory.startswith("launch:")]


@pytest.mark.parametrize("item", IN_WORKERS, ids=lambda item: f"{item.module}.{item.name}")
def test_replacements_call_the_original_where_the_engine_was_not_asked_for(
    item: compat.Replacement, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("FSDP_YA_FSDP_ENABLED", raising=False)
    place, function = item.factory.split(":")
    seen = []

    def original(*args: object, **kwargs: object) -> str:
        seen.append(args)
        return "theirs"

    replacement = getattr(importlib.import_module(f"accelerate_plugin.{place}"), function)(original)
    arguments = [object() for _ in range(5)]
    assert replacement(*arguments[: 2 if "state_dict" in function or "pretrained" in function else 5]) == "theirs" or (
        "save_fsdp" in function or "load_fsdp_optimizer" in function
    )
    assert len(seen) == 1


def test_a_name_copied_from_another_module_is_listed_with_every_module_that_copied_it() -> None:
    listed = {(item.module, item.name) for item in compat.REPLACEMENTS}
    for name in ("save_fsdp_model", "load_fsdp_model", "save_fsdp_optimizer", "load_fsdp_optimizer"):
        for module in ("accelerate.accelerator", "accelerate.utils", "transformers.trainer"):
            assert hasattr(importlib.import_module(module), name)
            assert (module, name) in listed


@pytest.mark.parametrize("distribution", compat.TESTED)
def test_installed_versions_are_inside_the_tested_range(distribution: str) -> None:
    first, end = compat.TESTED[distribution]
    version = Version(metadata.version(distribution))
    assert version >= Version(first)
    assert end is None or version < Version(end)
    assert compat._outside_tested_range(distribution) is None


@pytest.mark.parametrize(
    ("found", "wanted"), [("1.14.9", False), ("1.15.0", True), ("1.15.3.dev0", True), ("1.16.0", False)]
)
def test_another_version_is_refused_by_name_and_number(
    found: str, wanted: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    installed = metadata.version
    monkeypatch.setattr(metadata, "version", lambda name: found if name == "accelerate" else installed(name))
    if wanted:
        compat.check_versions()
        return
    with pytest.raises(ImportError, match=rf"tested with accelerate>=1.15,<1.16; found accelerate {found}"):
        compat.check_versions()
    monkeypatch.setenv(compat.ALLOW_UNTESTED, "1")
    compat.check_versions()


def test_a_missing_optional_library_is_no_problem(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(compat.TESTED, "no-such-distribution-anywhere", ("1", None))
    compat.check_versions()


def test_accelerate_cannot_be_imported_in_a_run_that_asks_for_the_engine_with_an_untested_version(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    import accelerate

    installed = metadata.version
    monkeypatch.setattr(metadata, "version", lambda name: "1.99.0" if name == "accelerate" else installed(name))
    monkeypatch.delenv("FSDP_YA_FSDP_ENABLED", raising=False)
    compat.apply(accelerate)
    # Nothing is looked up in a version that nobody asked us to change: an empty module would raise otherwise.
    compat.apply(types.ModuleType("accelerate.state"))
    monkeypatch.setenv("FSDP_YA_FSDP_ENABLED", "true")
    with pytest.raises(ImportError, match=r"found accelerate 1\.99\.0"):
        compat.apply(accelerate)
