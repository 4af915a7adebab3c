"""The examples' training data: functions and what their docstrings say, as pairs or as conversations."""

import json
from pathlib import Path

import docstring_pairs
import pytest

SOURCE = '''
def read(self, size=-1):
    """Read at most size bytes.

    If size is negative, read all.
    """

def undocumented(x):
    return x
'''


def test_a_head_is_paired_with_its_docstring_and_functions_without_one_are_left_out() -> None:
    ((prompt, completion),) = docstring_pairs.docstring_pairs(SOURCE)
    assert prompt == "def read(self, size=-1):\n"
    assert completion.startswith('    """Read at most size bytes.\n')


def test_a_conversation_asks_for_the_function_and_answers_with_the_first_paragraph() -> None:
    ((prompt, completion),) = docstring_pairs.docstring_pairs(SOURCE)
    question, answer = docstring_pairs.conversation(prompt, completion)["messages"]
    assert question["role"] == "user"
    assert question["content"].endswith("\n\ndef read(self, size=-1):")
    assert answer == {"role": "assistant", "content": "Read at most size bytes."}


@pytest.mark.parametrize(("words", "columns"), [([], {"prompt", "completion"}), (["--chat"], {"messages"})])
def test_a_file_has_one_example_a_line(
    words: list[str], columns: set[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.argv", ["docstring_pairs.py", str(tmp_path), *words])
    monkeypatch.setattr(docstring_pairs, "read_texts", lambda files, limit: [SOURCE, SOURCE])
    docstring_pairs.main()
    lines = [json.loads(line) for line in (tmp_path / "train.jsonl").read_text().splitlines()]
    assert [set(line) for line in lines] == [columns] * 2
