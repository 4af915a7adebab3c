"""Messages that the page on troubles quotes are messages of this package, or of the libraries it names."""

import ast
import functools
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
PAGE = ROOT / "docs" / "troubleshooting.md"
#: Quotes of accelerate's launcher, argparse, gloo and the Makefile.
OTHERS = ("unrecognized arguments:", "There are currently no available devices", "Connection closed by peer")


@functools.cache
def _texts() -> list[str]:
    sources = [path for folder in ("ya_fsdp", "accelerate_plugin") for path in sorted((ROOT / folder).rglob("*.py"))]
    return [*_strings(sources), (ROOT / "Makefile").read_text(encoding="utf-8")]


def _strings(sources: list[Path]) -> Iterator[str]:
    """Every string of some files, with ``...`` in place of what is filled in."""
    for path in sources:
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                yield node.value
            elif isinstance(node, ast.JoinedStr):
                yield "".join(part.value if isinstance(part, ast.Constant) else "..." for part in node.values)


def _quoted() -> list[str]:
    cells = [row.split("|")[1] for row in PAGE.read_text(encoding="utf-8").splitlines() if row.startswith("| ")]
    quotes = [quote for cell in cells for quote in re.findall(r"`([^`]+)`", cell)]
    return [quote for quote in quotes if " " in quote and not quote.startswith(OTHERS)]


def test_enough_messages_are_quoted() -> None:
    assert len(_quoted()) > 40


@pytest.mark.parametrize("quote", _quoted())
def test_a_quoted_message_is_one_of_ours(quote: str) -> None:
    pieces = [piece for piece in quote.split("...") if len(piece.strip()) > 3]
    assert pieces, quote
    for piece in pieces:
        assert any(piece.strip() in text for text in _texts()), f"no message has {piece.strip()!r}"
