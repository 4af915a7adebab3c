"""``python -m accelerate_plugin merge CHECKPOINT OUT``: a sharded checkpoint becomes an ordinary model.

The files are those of ``save_pretrained``: ``model.safetensors``, or several with an index where the model is larger
than the limit, or ``adapter_model.safetensors``. Tensors are read and written one at a time, so that a model of any
size needs the memory of its largest tensor.
"""

import argparse
import io
import json
import math
import os
import re
import shutil
import struct
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO

import torch
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import MetadataIndex, TensorStorageMetadata

from accelerate_plugin.saving.folder import check_complete
from accelerate_plugin.saving.forms import MODEL_FACTS

__all__ = ["ShardedTensors", "main", "merge"]

_DTYPES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
}
# As safetensors sorts them: the widest first, so that every tensor starts at a multiple of its element's size.
_WIDTH_ORDER = ["F64", "I64", "F32", "I32", "BF16", "F16", "I16", "F8_E4M3", "F8_E5M2", "I8", "U8", "BOOL"]
_UNITS = {"": 1, "K": 10**3, "M": 10**6, "G": 10**9, "T": 10**12, "KI": 2**10, "MI": 2**20, "GI": 2**30, "TI": 2**40}
# What belongs to a model's folder beside its weights.
_COMPANIONS = (
    "config.json",
    "generation_config.json",
    "adapter_config.json",
    "tokenizer*",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab*",
    "merges.txt",
    "*.model",
    "chat_template*",
    "*processor_config.json",
)


class ShardedTensors:
    """The tensors of a folder of torch.distributed.checkpoint, read one by one.

    Args:
        folder: the folder, with its ``.metadata``.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._metadata = FileSystemReader(folder).read_metadata()
        found: Mapping[str, Any] = self._metadata.state_dict_metadata
        # The part's name, "model", in front of every tensor's; other writers leave it out.
        self._prefix = "model." if all(key.startswith("model.") for key in found) else ""
        self._entries: dict[str, TensorStorageMetadata] = {
            key.removeprefix(self._prefix): entry
            for key, entry in found.items()
            if isinstance(entry, TensorStorageMetadata)
        }

    def names(self) -> list[str]:
        """Names of the tensors, without the name of the part that they belong to."""
        return list(self._entries)

    def shape(self, name: str) -> tuple[int, ...]:
        """Shape of the whole tensor."""
        return tuple(self._entries[name].size)

    def dtype(self, name: str) -> torch.dtype:
        """Its dtype."""
        dtype = self._entries[name].properties.dtype
        assert isinstance(dtype, torch.dtype)
        return dtype

    def num_bytes(self, name: str) -> int:
        """Its size."""
        return math.prod(self.shape(name)) * self.dtype(name).itemsize

    def read(self, name: str) -> torch.Tensor:
        """The whole tensor, put together from the boxes that the ranks wrote.

        Raises:
            ValueError: where the boxes do not cover the tensor.
        """
        whole = torch.empty(self.shape(name), dtype=self.dtype(name))
        covered = 0
        for chunk in self._entries[name].chunks:
            box = whole
            for dimension, (start, length) in enumerate(zip(chunk.offsets, chunk.sizes, strict=True)):
                box = box.narrow(dimension, start, length)
            covered += box.numel()
            if box.numel():
                box.copy_(self._read_chunk(name, chunk.offsets))
        if covered != whole.numel():
            raise ValueError(f"{self.folder}: {name} has {covered} of {whole.numel()} elements")
        return whole

    def _read_chunk(self, name: str, offsets: torch.Size) -> torch.Tensor:
        storage: Mapping[Any, Any] = self._metadata.storage_data
        place = storage[MetadataIndex(self._prefix + name, offsets)]
        if getattr(place, "transform_descriptors", None):
            raise ValueError(
                f"{self.folder}: {name} is compressed, which is not supported; use accelerate merge-weights"
            )
        with (self.folder / place.relative_path).open("rb") as file:
            file.seek(place.offset)
            chunk: torch.Tensor = torch.load(io.BytesIO(file.read(place.length)), map_location="cpu", weights_only=True)
        return chunk


def merge(checkpoint: str | Path, out: str | Path, *, max_shard_size: int = 50 * 10**9) -> list[Path]:
    """Writes a sharded checkpoint as an ordinary model.

    Args:
        checkpoint: a checkpoint's folder, or the ``pytorch_model_fsdp_0`` in it.
        out: the folder to write to.
        max_shard_size: bytes of weights per file; a larger tensor gets a file of its own.

    Returns:
        The weight files.

    Raises:
        ValueError: where there is no sharded checkpoint.
        IncompleteCheckpointError: where it is incomplete.
    """
    folder = _sharded_folder(Path(checkpoint))
    out = Path(out)
    out.mkdir(parents=True, exist_ok=True)
    tensors = ShardedTensors(folder)
    names = _names_to_write(tensors, folder)
    is_adapter = any((place / "adapter_config.json").exists() for place in (folder, folder.parent))
    stem = "adapter_model" if is_adapter else "model"
    groups = _split(tensors, names, max_shard_size)
    written, weight_map = [], {}
    for number, group in enumerate(groups, 1):
        suffix = f"-{number:05d}-of-{len(groups):05d}" if len(groups) > 1 else ""
        path = out / f"{stem}{suffix}.safetensors"
        unfinished = path.with_name(path.name + ".unfinished")
        with unfinished.open("wb") as file:
            _write_safetensors(file, tensors, group)
            file.flush()
            os.fsync(file.fileno())
        os.replace(unfinished, path)
        written.append(path)
        weight_map.update(dict.fromkeys(group, path.name))
    if len(groups) > 1:
        total = {
            "total_parameters": sum(math.prod(tensors.shape(name)) for name in names),
            "total_size": sum(tensors.num_bytes(name) for name in names),
        }
        text = json.dumps({"metadata": total, "weight_map": weight_map}, indent=2, sort_keys=True) + "\n"
        (out / f"{stem}.safetensors.index.json").write_text(text, encoding="utf-8")
    _copy_companions(folder, out)
    return written


def _sharded_folder(checkpoint: Path) -> Path:
    if not checkpoint.is_dir():
        raise ValueError(f"{checkpoint} is not a folder")
    check_complete(checkpoint)
    for folder in (checkpoint, checkpoint / "pytorch_model_fsdp_0"):
        if (folder / ".metadata").exists():
            return folder
    if list(checkpoint.glob("*.safetensors")):
        raise ValueError(f"{checkpoint} has ordinary weight files already: {sorted(checkpoint.glob('*.safetensors'))}")
    raise ValueError(
        f"{checkpoint} has no sharded weights (pytorch_model_fsdp_0 with .metadata), which SHARDED_STATE_DICT "
        f"writes; it has {sorted(path.name for path in checkpoint.iterdir())}"
    )


def _names_to_write(tensors: ShardedTensors, folder: Path) -> list[str]:
    """The names in the order of the model, without second names of tied tensors."""
    facts = folder / MODEL_FACTS
    if facts.exists():
        known = json.loads(facts.read_text(encoding="utf-8"))
        there = set(tensors.names())
        return [name for name in known["order"] if name in there and name not in known["tied"]]
    # Written by PyTorch FSDP2, which does not say what is tied; the configuration tells whether anything can be.
    names = tensors.names()
    config = next((p / "config.json" for p in (folder, folder.parent) if (p / "config.json").exists()), None)
    if config is None or not json.loads(config.read_text(encoding="utf-8")).get("tie_word_embeddings"):
        return names
    heads = [name for name in names if re.search(r"(lm_head|embed_out|output)\.weight$", name)]
    others = [name for name in names if re.search(r"(embed_tokens|wte|embed_in|word_embeddings)\.weight$", name)]
    tied = {
        head
        for head in heads
        for other in others
        if tensors.shape(head) == tensors.shape(other) and torch.equal(tensors.read(head), tensors.read(other))
    }
    return [name for name in names if name not in tied]


def _split(tensors: ShardedTensors, names: Sequence[str], limit: int) -> list[list[str]]:
    """Files in order; a tensor that is larger than the limit gets one of its own."""
    groups: list[list[str]] = []
    current: list[str] = []
    size = 0
    for name in names:
        num_bytes = tensors.num_bytes(name)
        if num_bytes > limit:
            groups.append([name])
            continue
        if current and size + num_bytes > limit:
            groups.append(current)
            current, size = [], 0
        current.append(name)
        size += num_bytes
    return [*groups, current] if current or not groups else groups


def _write_safetensors(file: BinaryIO, tensors: ShardedTensors, names: Sequence[str]) -> None:
    unknown = {name: tensors.dtype(name) for name in names if tensors.dtype(name) not in _DTYPES}
    if unknown:
        raise ValueError(f"dtypes that safetensors files cannot hold: {unknown}")
    ordered = sorted(names, key=lambda name: (_WIDTH_ORDER.index(_DTYPES[tensors.dtype(name)]), name))
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    start = 0
    for name in ordered:
        stop = start + tensors.num_bytes(name)
        header[name] = {
            "dtype": _DTYPES[tensors.dtype(name)],
            "shape": list(tensors.shape(name)),
            "data_offsets": [start, stop],
        }
        start = stop
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)
    file.write(struct.pack("<Q", len(text)) + text)
    for name in ordered:
        value = tensors.read(name).contiguous().view(-1)
        if value.numel():
            file.write(value.view(torch.uint8).numpy().data)


def _copy_companions(folder: Path, out: Path) -> None:
    for place in (folder.parent, folder):
        for pattern in _COMPANIONS:
            for path in place.glob(pattern):
                if path.is_file() and out.resolve() != place.resolve():
                    shutil.copy2(path, out / path.name)


def _bytes(text: str) -> int:
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([KMGT]?I?)B?", text.strip().upper())
    if match is None or match[2] not in _UNITS:
        raise argparse.ArgumentTypeError(f"{text!r} is no size; write for example 5GB or 500MB")
    return int(float(match[1]) * _UNITS[match[2]])


def main(arguments: Sequence[str] | None = None) -> None:
    """The command line."""
    parser = argparse.ArgumentParser(
        prog="python -m accelerate_plugin merge",
        description="Write a checkpoint saved under SHARDED_STATE_DICT as ordinary safetensors, tensor by tensor.",
    )
    parser.add_argument("checkpoint", help="a checkpoint's folder, or the pytorch_model_fsdp_0 in it")
    parser.add_argument("out", help="the folder to write to")
    parser.add_argument("--max-shard-size", type=_bytes, default=50 * 10**9, help="bytes per file (50GB)")
    options = parser.parse_args(arguments)
    try:
        written = merge(options.checkpoint, options.out, max_shard_size=options.max_shard_size)
    except (RuntimeError, ValueError, OSError) as error:
        parser.exit(1, f"{parser.prog}: {error}\n")
    for path in written:
        print(path)


if __name__ == "__main__":
    main()
