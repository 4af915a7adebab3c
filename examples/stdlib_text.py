"""Training text, tokenizer and token blocks for the demo, made from files that every Python installation has.

Nothing is downloaded: the text is the source code of Python's own standard library.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import tokenizers
from datasets import Dataset
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

END_OF_FILE = "<|endoftext|>"
STANDARD_LIBRARY = Path(os.__file__).parent
# Tests, what is installed beside the library, and folders whose files are long tables rather than code.
SKIPPED_FOLDERS = {"test", "tests", "idle_test", "site-packages", "dist-packages", "encodings", "pydoc_data"}


def standard_library_files() -> list[Path]:
    """Return the `.py` files of this Python's standard library, tests left out, in an order that never varies."""
    root = STANDARD_LIBRARY
    found: list[Path] = []
    for folder, subfolders, names in os.walk(root):
        subfolders[:] = sorted(name for name in subfolders if name not in SKIPPED_FOLDERS)
        found.extend(Path(folder) / name for name in sorted(names) if name.endswith(".py"))
    return found


def read_texts(files: list[Path], max_bytes: int) -> list[str]:
    """Read files in an order that mixes all parts of the library, until `max_bytes` of text are there.

    Files are ordered by the hash of their path: neither alphabetical, so that a limit does not cut off half of the
    alphabet, nor random, so that every rank and every run gets the same text.
    """
    texts: list[str] = []
    total = 0
    for file in sorted(files, key=_shuffled_place):
        text = file.read_text(encoding="utf-8", errors="replace")
        if not text.strip():
            continue
        total += len(text.encode("utf-8"))
        if texts and total > max_bytes:
            break
        texts.append(text)
    return texts


def _shuffled_place(file: Path) -> bytes:
    return hashlib.sha256(file.relative_to(STANDARD_LIBRARY).as_posix().encode()).digest()


def load_or_train_tokenizer(folder: Path, texts: list[str], vocab_size: int) -> PreTrainedTokenizerFast:
    """Return the byte-level BPE tokenizer cached in `folder`, trained first if it isn't there yet.

    Call it on one process of each machine before the others (`TrainingArguments.main_process_first`): the first call
    writes the cache, in one atomic rename, and all later ones read it. The file's name holds a digest of everything
    that the tokenizer depends on, so that a cache made from other text is never taken for this one.
    """
    digest = hashlib.sha256(f"{vocab_size} {tokenizers.__version__}".encode())
    for text in texts:
        digest.update(text.encode("utf-8"))
    cached = folder / f"tokenizer-{digest.hexdigest()[:16]}.json"
    if not cached.exists():
        folder.mkdir(parents=True, exist_ok=True)
        unfinished = cached.with_suffix(f".{os.getpid()}.tmp")
        train_tokenizer(texts, vocab_size).save(str(unfinished))
        os.replace(unfinished, cached)
    return PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer.from_file(str(cached)), bos_token=END_OF_FILE, eos_token=END_OF_FILE
    )


def train_tokenizer(texts: list[str], vocab_size: int) -> Tokenizer:
    """Train a byte-level BPE tokenizer: no text is out of its vocabulary, and decoding gives the text back."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[END_OF_FILE],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer=trainer)
    return tokenizer


def packed_blocks(tokenizer: PreTrainedTokenizerFast, texts: list[str], block_size: int) -> Dataset:
    """Join all files, each followed by the end-of-file token, and cut the stream into blocks without padding.

    Args:
        tokenizer: Tokenizer to encode with.
        texts: One string a file.
        block_size: Tokens per block; what is left over at the end is dropped.

    Returns:
        A dataset with the columns `input_ids` and `labels`, equal to each other (the model shifts the labels itself).

    Raises:
        ValueError: If the text is shorter than one block.
    """
    stream = np.fromiter(_token_stream(tokenizer, texts), dtype=np.int32)
    num_blocks = len(stream) // block_size
    if num_blocks == 0:
        raise ValueError(f"the text has {len(stream)} tokens, which is less than one block of {block_size}")
    blocks = list(stream[: num_blocks * block_size].reshape(num_blocks, block_size))
    return Dataset.from_dict({"input_ids": blocks, "labels": blocks})


def _token_stream(tokenizer: PreTrainedTokenizerFast, texts: list[str]) -> Iterator[int]:
    end_of_file: int = tokenizer.convert_tokens_to_ids(END_OF_FILE)
    for encoding in tokenizer.backend_tokenizer.encode_batch(texts):
        yield from encoding.ids
        yield end_of_file
