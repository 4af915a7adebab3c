"""Write a small data set for supervised fine-tuning: heads of the standard library's functions and their docstrings.

    python examples/docstring_pairs.py runs/docstrings           # a prompt and a completion a line
    python examples/docstring_pairs.py runs/chats --chat         # a question and an answer a line, as `messages`

The folder gets one file, `train.jsonl`, which `datasets` and trl read as it is.
"""

from __future__ import annotations

import argparse
import ast
import json
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


def conversation(prompt: str, completion: str) -> dict[str, list[dict[str, str]]]:
    """Turn a head and its docstring into a question about the function and the docstring's first paragraph."""
    summary = " ".join(completion.strip().strip('"').split("\n\n")[0].split())
    question = f"What does this Python function do?\n\n{prompt.strip()}"
    return {"messages": [{"role": "user", "content": question}, {"role": "assistant", "content": summary}]}


def main() -> None:
    """Write the file and say how many pairs it has."""
    parser = argparse.ArgumentParser(description="Write functions and their docstrings as training data.")
    parser.add_argument("folder", type=Path, nargs="?", default=Path("runs/docstrings"), help="where train.jsonl goes")
    parser.add_argument("--chat", action="store_true", help="conversations instead of prompts and completions")
    args = parser.parse_args()
    args.folder.mkdir(parents=True, exist_ok=True)
    count = 0
    with (args.folder / "train.jsonl").open("w", encoding="utf-8") as out:
        for source in read_texts(standard_library_files(), 4_000_000):
            for prompt, completion in docstring_pairs(source):
                pair = {"prompt": prompt, "completion": completion}
                out.write(json.dumps(conversation(**pair) if args.chat else pair) + "\n")
                count += 1
    print(f"{count} pairs in {args.folder / 'train.jsonl'}")


if __name__ == "__main__":
    main()
