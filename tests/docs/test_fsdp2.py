"""The page on FSDP2's features: every row names a test that exists, and no parity test is left out."""

import ast
import re
from pathlib import Path

import pytest

TESTS = Path(__file__).resolve().parents[1]
PAGE = (TESTS.parent / "docs" / "fsdp2.md").read_text(encoding="utf-8")
NAMED = re.compile(r"`([\w/]+\.py)::(\w+)`")


def rows() -> list[list[str]]:
    lines = [line for line in PAGE.splitlines() if line.startswith("|")]
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    return [row for row in cells if row[0] != "FSDP2" and set(row[0]) != {"-"}]


def functions(path: Path) -> set[str]:
    return {node.name for node in ast.parse(path.read_text(encoding="utf-8")).body if isinstance(node, ast.FunctionDef)}


@pytest.mark.parametrize("row", rows(), ids=lambda row: row[0] or row[1])
def test_a_row_says_what_is_here_and_names_tests_that_exist(row: list[str]) -> None:
    assert len(row) == 3, f"a row has three cells: {row}"
    assert row[1], f"{row[0]}: nothing is said about this engine"
    named = NAMED.findall(row[2])
    assert named, f"{row[0]}: no test is named"
    for path, name in named:
        assert (TESTS / path).is_file(), f"{row[0]}: there is no file tests/{path}"
        assert name.startswith("test_"), f"{row[0]}: {name} is no test"
        assert name in functions(TESTS / path), f"{row[0]}: tests/{path} has no function {name}"


def test_every_parity_file_is_on_the_page() -> None:
    named = {path for path, _ in NAMED.findall(PAGE)}
    files = {f"parity/{path.name}" for path in (TESTS / "parity").glob("test_*.py")}
    missing = files - named - {"parity/test_reduction_in_pieces.py"}  # of this engine alone
    assert not missing, f"not on the page: {sorted(missing)}"
