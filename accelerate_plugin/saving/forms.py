"""Model and optimizer as files, in the three forms of ``fsdp_state_dict_type``.

FULL_STATE_DICT: one file of whole tensors, ``pytorch_model_fsdp.bin`` and ``optimizer.bin``, written by rank 0.
SHARDED_STATE_DICT: folders of torch.distributed.checkpoint, ``pytorch_model_fsdp_0`` and ``optimizer_0``, with the
names and shapes of the whole tensors. Both are what accelerate writes under PyTorch FSDP2, and are exchanged with it.
LOCAL_STATE_DICT: one file per rank in ``pytorch_model_fsdp_0_local`` and ``optimizer_0_local``; only the same number of
ranks can read it. No form but the first gathers a tensor.
"""

import contextlib
import importlib
import json
import os
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

import ya_fsdp
from accelerate_plugin.saving.publication import writing
from accelerate_plugin.saving.ranks import CheckpointError, agree, describe, on_rank_zero, root_of

__all__ = [
    "FULL",
    "LOCAL",
    "MODEL_FACTS",
    "SHARDED",
    "adapter_entries",
    "form_of",
    "is_adapter",
    "read_model",
    "read_optimizer",
    "write_model",
    "write_optimizer",
]

FULL, SHARDED, LOCAL = "FULL_STATE_DICT", "SHARDED_STATE_DICT", "LOCAL_STATE_DICT"
MODEL, OPTIMIZER = "pytorch_model_fsdp", "optimizer"
MODEL_FACTS = "ya_fsdp_model.json"
"""Beside the sharded tensors: their order in the model, and which of them are one tensor under two names."""

_LOCAL_FILE = re.compile(r"rank_(\d+)_of_(\d+)\.bin")


def form_of(plugin: Any) -> str:
    """The form that a run writes."""
    return str(plugin.state_dict_type.name)


def is_adapter(model: nn.Module, adapter_only: bool) -> bool:
    """Whether only the adapters of a peft model are meant."""
    if not adapter_only:
        return False
    modeling = importlib.import_module("accelerate.utils.modeling")
    return bool(modeling.is_peft_model(model))


def adapter_entries(model: nn.Module, **options: Any) -> dict[str, torch.Tensor]:
    """The adapters' sharded tensors under the names that peft gives them in files, and all else that is trained."""
    peft = importlib.import_module("peft")
    everything = ya_fsdp.get_sharded_state_dict(model)
    name = model.active_adapter
    entries: dict[str, torch.Tensor] = peft.get_peft_model_state_dict(model, everything, name, **options)
    known = {id(value) for value in entries.values()}
    trained = {key: value for key, value in everything.items() if value.requires_grad and id(value) not in known}
    return {**entries, **trained}


def _trained(name: str, value: torch.Tensor) -> bool:
    del name
    return value.requires_grad


def _paths(folder: str, stem: str, index: int) -> dict[str, Path]:
    place = Path(folder)
    return {
        FULL: place / (f"{stem}.bin" if index == 0 else f"{stem}_{index}.bin"),
        SHARDED: place / f"{stem}_{index}",
        LOCAL: place / f"{stem}_{index}_local",
    }


def _found(folder: str, stem: str, index: int, form: str) -> tuple[str, Path]:
    """The form in which a checkpoint has a part: the run's own if it is there, otherwise whichever is."""
    paths = _paths(folder, stem, index)
    if Path(folder).name == paths[SHARDED].name and (Path(folder) / ".metadata").exists():
        return SHARDED, Path(folder)
    there = [form, *(other for other in paths if other != form)]
    found = next((other for other in there if paths[other].exists()), None)
    if found is None:
        names = ", ".join(path.name for path in paths.values())
        raise CheckpointError(f"rank {_rank()}: {folder} has none of {names}: there is no {stem} to load")
    return found, paths[found]


def _rank() -> int:
    return dist.get_rank() if dist.is_initialized() else 0


def _size() -> int:
    return dist.get_world_size() if dist.is_initialized() else 1


def _save(value: Any, path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("wb") as file:
        torch.save(value, file)
        file.flush()
        os.fsync(file.fileno())


# ---- writing --------------------------------------------------------------------------------------------------------


def write_model(form: str, model: nn.Module, folder: str, index: int, *, adapter_only: bool) -> None:
    """Writes a model's tensors, or the trained ones of a peft model. A collective."""
    path = _paths(folder, MODEL, index)[form]
    select = _trained if is_adapter(model, adapter_only) else None
    with writing(path, is_folder=form != FULL) as (saving, target):
        if form == FULL:
            state = ya_fsdp.get_full_state_dict(model, rank0_only=True, cpu_offload=True, select=select)
            with saving.deferring():
                if _rank() == 0:
                    _save(state, target)
        elif form == LOCAL:
            with saving.deferring():
                _save(_compact(ya_fsdp.get_local_state_dict(model, select=select)), _local_file(target))
        else:
            entries = ya_fsdp.get_sharded_state_dict(model) if select is None else adapter_entries(model, **_NO_BASE)
            with saving.deferring():
                _save_sharded({"model": entries}, target)
            with saving.deferring():
                if _rank() == 0:
                    (target / MODEL_FACTS).write_text(json.dumps(_facts(model, entries), indent=1), encoding="utf-8")


_NO_BASE = {"save_embedding_layers": False}


def write_optimizer(form: str, model: nn.Module, optimizer: torch.optim.Optimizer, folder: str, index: int) -> None:
    """Writes an optimizer's state by parameter name. A collective."""
    path = _paths(folder, OPTIMIZER, index)[form]
    with writing(path, is_folder=form != FULL) as (saving, target):
        if form == FULL:
            state = ya_fsdp.get_full_optimizer_state_dict(model, optimizer)
            with saving.deferring():
                if _rank() == 0:
                    _save(state, target)
        elif form == LOCAL:
            with saving.deferring():
                _save(_compact(ya_fsdp.get_local_optimizer_state_dict(model, optimizer)), _local_file(target))
        else:
            with saving.deferring():
                _save_sharded({"optimizer": ya_fsdp.get_sharded_optimizer_state_dict(model, optimizer)}, target)


def _save_sharded(state: dict[str, Any], folder: Path) -> None:
    """Every rank writes its slices through torch.distributed.checkpoint, whose errors all ranks hear of."""
    dcp = importlib.import_module("torch.distributed.checkpoint")
    writer = dcp.FileSystemWriter(folder, sync_files=True)
    write_data = writer.write_data

    def write(*args: Any, **kwargs: Any) -> Any:
        try:
            return write_data(*args, **kwargs)
        except Exception as error:
            # The serializer's complaint about its file position would hide that the disk is full.
            raise root_of(error) from error

    writer.write_data = write
    with _plain_errors(f"writing {folder}"):
        dcp.save(state, storage_writer=writer)


@contextlib.contextmanager
def _plain_errors(doing: str) -> Iterator[None]:
    """Errors of torch.distributed.checkpoint are no ``Exception``, so that nobody who expects one would see them."""
    failed: type[BaseException] = importlib.import_module("torch.distributed.checkpoint.api").CheckpointException
    try:
        yield
    except failed as error:
        failures = getattr(error, "failures", {})
        told = "; ".join(f"on rank {rank}: {describe(pair[0])}" for rank, pair in list(failures.items())[:4])
        raise CheckpointError(f"{doing} failed {told}") from error


def _local_file(folder: Path) -> Path:
    return folder / f"rank_{_rank()}_of_{_size()}.bin"


def _compact(value: Any) -> Any:
    """Tensors with storage of their own: a view's file would hold everything that lies beside it."""
    if isinstance(value, torch.Tensor):
        is_view = value.untyped_storage().nbytes() != value.numel() * value.element_size()
        return value.detach().cpu().clone() if is_view else value.detach().cpu()
    if isinstance(value, Mapping):
        return {key: _compact(inner) for key, inner in value.items()}
    return value


def _facts(model: nn.Module, entries: Mapping[str, torch.Tensor]) -> dict[str, Any]:
    """Order of the tensors, and the names that ``save_pretrained`` leaves out: second names of tied tensors."""
    declared = getattr(model, "all_tied_weights_keys", None)
    left_out = set(declared) if isinstance(declared, Mapping) else set()
    groups: dict[int, list[str]] = {}
    for name, value in entries.items():
        groups.setdefault(id(value), []).append(name)
    tied = {}
    for names in groups.values():
        kept = next((name for name in names if name not in left_out), names[0])
        tied.update({name: kept for name in names if name != kept})
    return {"order": list(entries), "tied": tied}


# ---- reading --------------------------------------------------------------------------------------------------------


def read_model(
    form: str, model: nn.Module, folder: str, index: int, *, adapter_only: bool
) -> tuple[list[str], list[str]]:
    """Reads a model's tensors, in whatever form the checkpoint has them. A collective.

    Returns:
        Names that the model has and the checkpoint has not, and the reverse.

    Raises:
        CheckpointError: on every rank, where a file is missing or cannot be read.
        RuntimeError: on every rank, where the checkpoint does not fit the model; nothing is changed then.
    """
    adapter = is_adapter(model, adapter_only)
    plain = None if index or adapter else _plain_file(folder)
    if plain is not None and not any(path.exists() for path in _paths(folder, MODEL, index).values()):
        form, path = FULL, plain
    else:
        form, path = _found(folder, MODEL, index, form)
    select = _trained if adapter else None
    if form == FULL:
        state = on_rank_zero(lambda: _load_plain(path), f"reading {path}")
        return ya_fsdp.load_full_state_dict(model, state or {}, broadcast_from_rank0=True, strict=True, select=select)
    if form == LOCAL:
        state = _read_local(path)
        ya_fsdp.load_local_state_dict(model, state, select=select)
    elif adapter:
        _read_entries(path, adapter_entries(model, **_NO_BASE))
    else:
        with _plain_errors(f"reading {path}"):
            ya_fsdp.load_sharded_checkpoint(path, model)
    return [], []


def read_optimizer(form: str, model: nn.Module, optimizer: torch.optim.Optimizer, folder: str, index: int) -> None:
    """Reads an optimizer's state, in whatever form the checkpoint has it; see :func:`read_model`. A collective."""
    form, path = _found(folder, OPTIMIZER, index, form)
    if form == FULL:
        state = on_rank_zero(lambda: _load_plain(path), f"reading {path}")
        ya_fsdp.load_full_optimizer_state_dict(model, optimizer, state or {}, broadcast_from_rank0=True)
    elif form == LOCAL:
        ya_fsdp.load_local_optimizer_state_dict(model, optimizer, _read_local(path))
    else:
        with _plain_errors(f"reading {path}"):
            ya_fsdp.load_sharded_checkpoint(path, model, optimizer)


def _plain_file(folder: str) -> Path | None:
    """The weights that ``save_pretrained`` wrote; all that a checkpoint has with ``save_only_model``."""
    names = ("model.safetensors", "model.safetensors.index.json")
    return next((Path(folder, name) for name in names if Path(folder, name).exists()), None)


def _load_plain(path: Path) -> Any:
    if path.suffix == ".bin":
        return torch.load(path, map_location="cpu", weights_only=True)
    load_file = importlib.import_module("safetensors.torch").load_file
    if path.suffix == ".safetensors":
        return load_file(path)
    weights = json.loads(path.read_text(encoding="utf-8"))["weight_map"]
    state: dict[str, torch.Tensor] = {}
    for name in sorted(set(weights.values())):
        state.update(load_file(path.parent / name))
    return state


def _read_local(folder: Path) -> Any:
    """This rank's file. Ranks that another number of ranks wrote for are told so, with both numbers."""
    sizes = {int(match[2]) for path in folder.iterdir() if (match := _LOCAL_FILE.fullmatch(path.name))}
    if sizes and sizes != {_size()}:
        saved = ", ".join(str(size) for size in sorted(sizes))
        raise CheckpointError(
            f"rank {_rank()}: {folder} was saved by {saved} processes under LOCAL_STATE_DICT and cannot be loaded by "
            f"{_size()}; nothing was loaded. Run it on {saved}, or save with fsdp_state_dict_type: SHARDED_STATE_DICT, "
            "which any number of processes can load"
        )
    path, problem, state = _local_file(folder), None, None
    try:
        state = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:
        problem = error
    agree(problem, f"reading {folder}")
    return state


def _read_entries(folder: Path, entries: Mapping[str, torch.Tensor]) -> None:
    dcp = importlib.import_module("torch.distributed.checkpoint")
    reader = dcp.FileSystemReader(folder)
    saved = reader.read_metadata().state_dict_metadata
    missing = [name for name in entries if f"model.{name}" not in saved]
    wrong = [
        f"{name}: {tuple(saved[f'model.{name}'].size)} for {tuple(value.shape)}"
        for name, value in entries.items()
        if f"model.{name}" in saved and saved[f"model.{name}"].size != value.shape
    ]
    if missing or wrong:
        raise CheckpointError(
            f"rank {_rank()}: the adapters in {folder} do not fit the model: missing {missing[:5]}, different shapes "
            f"(saved for own) {wrong[:5]}; nothing was loaded"
        )
    with torch.no_grad(), _plain_errors(f"reading {folder}"):
        dcp.load({"model": {name: value.detach() for name, value in entries.items()}}, storage_reader=reader)
