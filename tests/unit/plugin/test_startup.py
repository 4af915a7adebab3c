"""The interpreter start-up hook is cheap, silent, and does nothing unless it is needed."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
PTH = (ROOT / "build_support" / "ya_fsdp_startup.pth").read_text()
ENTRY = (ROOT / "build_support" / "ya_fsdp_startup.start").read_text()


def run(code: str, *options: str, **variables: str) -> subprocess.CompletedProcess[str]:
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("FSDP_", "YA_FSDP_"))}
    environment |= {"PYTHONPATH": str(ROOT), **variables}
    return subprocess.run(
        [sys.executable, *options, "-c", code], env=environment, capture_output=True, text=True, timeout=60, check=False
    )


def test_the_pth_file_is_one_import_line_and_the_start_file_names_the_same_function() -> None:
    assert PTH.startswith("import ")
    assert PTH.count("\n") == 1
    assert ENTRY == "accelerate_plugin.startup:main\n"
    assert "accelerate_plugin.startup" in PTH


def test_the_guard_costs_less_than_a_millisecond_and_imports_nothing() -> None:
    measure = (
        "import sys, time\n"
        f"line = {PTH!r}\n"
        "code = compile(line, 'pth', 'exec')\n"
        "before = set(sys.modules)\n"
        "best = min((lambda t: (exec(code), time.perf_counter() - t)[1])(time.perf_counter()) for _ in range(20))\n"
        "print(best, sorted(set(sys.modules) - before))\n"
    )
    seconds, modules = run(measure).stdout.split(" ", 1)
    assert float(seconds) < 1e-3
    assert modules.strip() == "[]"


def test_the_start_file_function_costs_less_than_a_millisecond_and_imports_only_itself() -> None:
    # -S: an installed copy would have been imported before the measurement
    measure = (
        f"import os, sys, time\nsys.path.insert(0, {str(ROOT)!r})\n"
        "before, best = set(sys.modules), 1.0\n"
        "for _ in range(30):\n"
        "    for name in set(sys.modules) - before: del sys.modules[name]\n"
        "    start = time.perf_counter()\n"
        "    from accelerate_plugin.startup import main\n"
        "    main()\n"
        "    best = min(best, time.perf_counter() - start)\n"
        "print(best, sorted(set(sys.modules) - before))\n"
    )
    seconds, modules = run(measure, "-S").stdout.split(" ", 1)
    assert float(seconds) < 1e-3
    assert modules.strip() == "['accelerate_plugin', 'accelerate_plugin.startup']"


LOADED = (
    f"import sys\nexec({PTH!r})\nprint('wrapt' in sys.modules, 'torch' in sys.modules, 'accelerate' in sys.modules)\n"
)


@pytest.mark.parametrize(
    ("variables", "hooked"),
    [
        ({}, False),
        ({"FSDP_YA_FSDP_ENABLED": "false"}, False),
        ({"FSDP_YA_FSDP_ENABLED": "0"}, False),
        ({"FSDP_YA_FSDP_ENABLED": "true"}, True),
        ({"FSDP_YA_FSDP_ENABLED": "1"}, True),
        ({"FSDP_YA_FSDP_ENABLED": "true", "YA_FSDP_DISABLE": "1"}, False),
        ({"FSDP_YA_FSDP_ENABLED": "true", "YA_FSDP_DISABLE": "0"}, True),
    ],
)
def test_hooks_are_registered_only_where_asked_for_and_torch_is_never_imported(
    variables: dict[str, str], hooked: bool
) -> None:
    # -S keeps an installed copy of the package from answering instead of the line under test
    import site

    code = f"import sys\nsys.path += {site.getsitepackages()!r}\n{LOADED}"
    result = run(code, "-S", **variables)
    assert result.stderr == ""
    assert result.stdout.split() == [str(hooked), "False", "False"]


@pytest.mark.parametrize("variables", [{}, {"FSDP_YA_FSDP_ENABLED": "true"}])
def test_nothing_is_said_where_the_package_is_missing(variables: dict[str, str]) -> None:
    result = run(f"exec({PTH!r})\nprint('alive')", "-S", "-I", **variables)
    assert (result.returncode, result.stdout, result.stderr) == (0, "alive\n", "")


def test_nothing_is_said_where_accelerate_is_missing() -> None:
    hide = "import sys\nsys.modules['accelerate'] = None\n"
    result = run(
        f"{hide}from accelerate_plugin.startup import main\nmain()\nprint('alive')", FSDP_YA_FSDP_ENABLED="true"
    )
    assert (result.returncode, result.stdout, result.stderr) == (0, "alive\n", "")


def test_hooks_that_cannot_be_installed_are_reported_only_where_the_engine_was_asked_for() -> None:
    code = "import sys\nsys.modules['wrapt'] = None\nfrom accelerate_plugin.startup import main\nmain()\nprint('alive')"
    asked = run(code, "-S", FSDP_YA_FSDP_ENABLED="true")
    assert asked.stdout == "alive\n"
    assert "could not be installed" in asked.stderr
    assert run(code, "-S").stderr == ""


def test_a_process_without_the_variable_runs_with_accelerates_own_functions() -> None:
    code = (
        "from accelerate import Accelerator\n"
        "from accelerate.state import PartialState\n"
        "print(hasattr(Accelerator.prepare, '__ya_fsdp__'), hasattr(PartialState.__init__, '__ya_fsdp__'))"
    )
    assert run(code).stdout.split() == ["False", "False"]
