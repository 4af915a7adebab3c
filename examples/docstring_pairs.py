"""Write a small data set for supervised fine-tuning: heads of the standard library's functions and their docstrings.

    python examples/docstring_pairs.py runs/docstrings

The folder gets one file, `train.jsonl`, with a prompt and a completion a line, which `datasets` and trl read as it is.
"""

from __future__ import annotations

import ast
import json
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path

from stdlib_text import read_texts, standard_library_files

MAX_COMPLETION = 300


def docstring_pairs(source: str) -> Iterator[tuple[str, str]]:
    """Yield the head and the docstring of each documented function of one file, long docstrings cut."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", SyntaxWarning)
        tree = ast.parse(source)
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            docstring = ast.get_docstring(node)
            if docstring:
                yield f"def {node.name}({ast.unparse(node.args)}):\n", f'    """{docstring[:MAX_COMPLETION]}"""\n'


def main() -> None:
    """Write the file and say how many pairs it has."""
    folder = Path(sys.argv[1] if len(sys.argv) > 1 else "runs/docstrings")
    folder.mkdir(parents=True, exist_ok=True)
    count = 0
    with (folder / "train.jsonl").open("w", encoding="utf-8") as out:
        for source in read_texts(standard_library_files(), 4_000_000):
            for prompt, completion in docstring_pairs(source):
                out.write(json.dumps({"prompt": prompt, "completion": completion}) + "\n")
                count += 1
    print(f"{count} pairs in {folder / 'train.jsonl'}")


if __name__ == "__main__":
    main()
