"""The layering of the packages, read from their source: a file imports from layers below it and never upward."""

import ast
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parents[2]
#: Parts of ``ya_fsdp`` from low to high. A part may import the parts before it, and a package its own modules.
LAYERS = [
    "_common",
    "_torch_compat",
    "policy",
    "layout",
    "ragged",
    "comm",
    "runtime",
    "module",
    "fully_shard",
    "state_dict",
    "report",
    "wrapper",
    "estimate",
    "__init__",
]
MAX_FILE_LINES = 420
MAX_FUNCTION_LINES = 60


@dataclass(frozen=True)
class Import:
    """One name that a file imports: ``from module import name``, or ``import module`` with an empty name."""

    path: Path
    line: int
    module: str
    name: str

    def __str__(self) -> str:
        where = f"{self.path.relative_to(REPOSITORY)}:{self.line}"
        return f"{where}: from {self.module} import {self.name}" if self.name else f"{where}: import {self.module}"


def sources(package: str) -> list[Path]:
    return sorted((REPOSITORY / package).rglob("*.py"))


def module_name(path: Path) -> str:
    parts = path.relative_to(REPOSITORY).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def imports_of(path: Path) -> Iterator[Import]:
    """Yield every import of a file, also inside functions and under ``if TYPE_CHECKING``."""
    parent = path.relative_to(REPOSITORY).parent.parts
    for node in ast.walk(ast.parse(path.read_text(), str(path))):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield Import(path, node.lineno, alias.name, "")
        elif isinstance(node, ast.ImportFrom):
            base = list(parent[: len(parent) - node.level + 1]) if node.level else []
            module = ".".join(base + ([node.module] if node.module else []))
            for alias in node.names:
                yield Import(path, node.lineno, module, alias.name)


def modules_of(package: str) -> set[str]:
    return {module_name(path) for path in sources(package)}


def imported_module(found: Import, known: set[str]) -> str:
    """Return the module that an import reads: ``from package import module`` reads the module."""
    inner = f"{found.module}.{found.name}"
    return inner if inner in known else found.module


def layer_of(module: str) -> int:
    """Return the position of an engine module in :data:`LAYERS`."""
    parts = module.split(".")
    part = parts[1] if len(parts) > 1 else "__init__"
    assert part in LAYERS, f"{module} has no place in the layers of the engine; add {part!r} to LAYERS in {__file__}"
    return LAYERS.index(part)


def test_engine_files_import_only_from_layers_below():
    known = modules_of("ya_fsdp")
    assert "ya_fsdp" in known
    upward = []
    for path in sources("ya_fsdp"):
        importer = module_name(path)
        for found in imports_of(path):
            if found.module.split(".")[0] != "ya_fsdp":
                continue
            imported = imported_module(found, known)
            assert imported in known, f"{found}: no such module"
            same_part = importer.split(".")[1:2] == imported.split(".")[1:2] != []
            if not same_part and layer_of(imported) >= layer_of(importer):
                upward.append(str(found))
    assert not upward, "imports that go upward:\n" + "\n".join(upward)


@pytest.mark.parametrize("package", ["ya_fsdp", "accelerate_plugin"])
def test_files_do_not_import_each_other_in_a_circle(package):
    known = modules_of(package)
    graph = {
        module_name(path): {imported_module(found, known) for found in imports_of(path)} & known
        for path in sources(package)
    }
    finished: set[str] = set()

    def visit(module: str, above: tuple[str, ...]) -> None:
        assert module not in above, "circle of imports: " + " -> ".join([*above[above.index(module) :], module])
        if module not in finished:
            for imported in sorted(graph[module]):
                visit(imported, (*above, module))
            finished.add(module)

    for module in sorted(graph):
        visit(module, ())


def test_engine_imports_torch_and_the_standard_library_only():
    allowed = {"torch", "ya_fsdp", *sys.stdlib_module_names}
    foreign = [
        str(found)
        for path in sources("ya_fsdp")
        for found in imports_of(path)
        if found.module.split(".")[0] not in allowed
    ]
    assert not foreign, "the engine depends on torch alone:\n" + "\n".join(foreign)


def test_plugin_uses_exported_names_of_the_engine_only():
    tree = ast.parse((REPOSITORY / "ya_fsdp" / "__init__.py").read_text())
    exported = set()
    for node in tree.body:
        if isinstance(node, ast.Assign) and any(isinstance(t, ast.Name) and t.id == "__all__" for t in node.targets):
            exported = set(ast.literal_eval(node.value))
    assert exported, "ya_fsdp/__init__.py has no __all__"
    inside = [
        str(found)
        for path in sources("accelerate_plugin")
        for found in imports_of(path)
        if found.module.split(".")[0] == "ya_fsdp"
        and (found.module != "ya_fsdp" or (found.name and found.name not in exported))
    ]
    assert not inside, "names that ya_fsdp does not export:\n" + "\n".join(inside)


@pytest.mark.parametrize("package", ["ya_fsdp", "accelerate_plugin"])
def test_files_and_functions_stay_short(package):
    long = []
    for path in sources(package):
        text = path.read_text()
        where = path.relative_to(REPOSITORY)
        if (num_lines := len(text.splitlines())) > MAX_FILE_LINES:
            long.append(f"{where}: {num_lines} lines, at most {MAX_FILE_LINES}")
        for node in ast.walk(ast.parse(text, str(path))):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                num_lines = node.end_lineno - node.lineno + 1
                if num_lines > MAX_FUNCTION_LINES:
                    long.append(
                        f"{where}:{node.lineno}: {node.name} has {num_lines} lines, at most {MAX_FUNCTION_LINES}"
                    )
    assert sources(package), f"{package} has no files"
    assert not long, "\n".join(long)


def test_the_checks_see_an_upward_and_a_hidden_import(tmp_path, monkeypatch):
    """The reader of imports finds relative imports, imports in functions, and those for type checkers."""
    package = tmp_path / "ya_fsdp"
    (package / "layout").mkdir(parents=True)
    (package / "__init__.py").write_text("")
    (package / "policy.py").write_text("")
    (package / "layout" / "__init__.py").write_text("")
    (package / "layout" / "flat.py").write_text(
        "from typing import TYPE_CHECKING\n"
        "from ..policy import Policy\n"
        "if TYPE_CHECKING:\n    from ya_fsdp.runtime.param import YaFSDPParam\n"
        "def late():\n    from .. import policy\n"
    )
    monkeypatch.setattr(sys.modules[__name__], "REPOSITORY", tmp_path)
    path = package / "layout" / "flat.py"
    assert module_name(path) == "ya_fsdp.layout.flat"
    found = {(item.module, item.name) for item in imports_of(path)}
    assert found == {
        ("typing", "TYPE_CHECKING"),
        ("ya_fsdp.policy", "Policy"),
        ("ya_fsdp.runtime.param", "YaFSDPParam"),
        ("ya_fsdp", "policy"),
    }
    assert imported_module(Import(path, 1, "ya_fsdp", "policy"), modules_of("ya_fsdp")) == "ya_fsdp.policy"
    assert layer_of("ya_fsdp.runtime.param") > layer_of("ya_fsdp.layout.flat") > layer_of("ya_fsdp.policy")
