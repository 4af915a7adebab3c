"""Text, tokenizer and blocks of the demo: the same on every rank and every run, and nothing lost in them."""

from pathlib import Path

import pytest
import stdlib_text

TEXTS = ["def add(a, b):\n\treturn a + b\n", "class Größe:\n    '''naïve 数 🙂'''\n", "import os\n\nimport sys\n"] * 30


def test_files_are_sources_of_the_library_without_its_tests() -> None:
    files = stdlib_text.standard_library_files()
    names = {file.relative_to(stdlib_text.STANDARD_LIBRARY).as_posix() for file in files}
    assert {"os.py", "json/decoder.py", "asyncio/tasks.py"} <= names
    assert not [name for name in names if {"test", "tests", "site-packages"} & set(name.split("/"))]
    assert files == stdlib_text.standard_library_files()


def test_a_limit_keeps_whole_files_from_all_over_the_alphabet() -> None:
    files = stdlib_text.standard_library_files()
    texts = stdlib_text.read_texts(files, 300_000)
    size = sum(len(text.encode("utf-8")) for text in texts)
    assert 100_000 < size <= 300_000
    initials = {file.name[0] for file in files if file.read_text(encoding="utf-8", errors="replace") in texts}
    assert min(initials) < "e"
    assert max(initials) > "s"
    assert stdlib_text.read_texts(list(reversed(files)), 300_000) == texts


def test_the_tokenizer_gives_every_text_back(tmp_path: Path) -> None:
    tokenizer = stdlib_text.load_or_train_tokenizer(tmp_path, TEXTS, 300)
    assert 257 <= len(tokenizer) <= 300
    for text in [*TEXTS[:3], "never seen: ñ ₿\x00\n"]:
        assert tokenizer.decode(tokenizer(text)["input_ids"]) == text


def test_the_tokenizer_is_trained_once_for_the_same_text_and_anew_for_other_text(tmp_path: Path) -> None:
    first = stdlib_text.load_or_train_tokenizer(tmp_path, TEXTS, 300)
    (cached,) = tmp_path.iterdir()
    written = cached.stat().st_mtime_ns
    again = stdlib_text.load_or_train_tokenizer(tmp_path, TEXTS, 300)
    assert cached.stat().st_mtime_ns == written
    assert again.get_vocab() == first.get_vocab()
    stdlib_text.load_or_train_tokenizer(tmp_path, TEXTS[:-1], 300)
    stdlib_text.load_or_train_tokenizer(tmp_path, TEXTS, 301)
    assert len(list(tmp_path.iterdir())) == 3


def test_blocks_are_the_joined_files_cut_without_padding(tmp_path: Path) -> None:
    tokenizer = stdlib_text.load_or_train_tokenizer(tmp_path, TEXTS, 300)
    blocks = stdlib_text.packed_blocks(tokenizer, TEXTS, 16)
    stream = [token for row in blocks["input_ids"] for token in row]
    joined = stdlib_text.END_OF_FILE.join(TEXTS) + stdlib_text.END_OF_FILE
    expected = tokenizer(joined)["input_ids"]
    assert stream == expected[: len(expected) // 16 * 16]
    assert expected.count(tokenizer.eos_token_id) == len(TEXTS)
    assert blocks["labels"][:] == blocks["input_ids"][:]


def test_text_shorter_than_a_block_is_refused(tmp_path: Path) -> None:
    tokenizer = stdlib_text.load_or_train_tokenizer(tmp_path, TEXTS, 300)
    with pytest.raises(ValueError, match=r"less than one block of 1000000"):
        stdlib_text.packed_blocks(tokenizer, TEXTS, 1_000_000)
