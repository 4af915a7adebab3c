"""The page on accelerate says what the plug-in's own tables say."""

from pathlib import Path

from accelerate_plugin.documentation import render

PAGE = Path(__file__).resolve().parents[3] / "docs" / "accelerate.md"


def test_the_page_is_what_the_tables_say() -> None:
    assert PAGE.read_text() == render(), "run: python -m accelerate_plugin.documentation > docs/accelerate.md"
