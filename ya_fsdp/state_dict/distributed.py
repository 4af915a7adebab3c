"""Sharded checkpoints through ``torch.distributed.checkpoint``: every rank writes its own slices, nothing is gathered.

Tensors keep their true names and shapes (see ``ragged/checkpoint.py``), so a checkpoint loads on any number of ranks,
and is exchanged with PyTorch FSDP2 in both directions.
"""

import importlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ya_fsdp.ragged import RaggedShardDTensor
from ya_fsdp.ragged.convert import spec_like
from ya_fsdp.state_dict.model import get_sharded_state_dict
from ya_fsdp.state_dict.optimizer import (
    get_sharded_optimizer_state_dict,
    load_sharded_optimizer_state_dict,
    parameters_by_name,
)

__all__ = ["load_sharded_checkpoint", "save_sharded_checkpoint"]

MODEL, OPTIMIZER = "model", "optimizer"


def save_sharded_checkpoint(
    folder: str | Path, model: nn.Module, optimizer: torch.optim.Optimizer | None = None
) -> None:
    """Writes a model's state under ``model``, or an optimizer's under ``optimizer``. A collective; gathers no tensor.

    Args:
        folder: Where to write; one folder for each of the two.
        model: The model.
        optimizer: Write this optimizer's state instead of the model's.
    """
    dcp = _dcp()
    if optimizer is None:
        state: dict[str, Any] = {MODEL: get_sharded_state_dict(model)}
    else:
        state = {OPTIMIZER: get_sharded_optimizer_state_dict(model, optimizer)}
    # Synchronous files: what has been written is on the disk when this returns.
    dcp.save(state, storage_writer=dcp.FileSystemWriter(folder, sync_files=True))


def load_sharded_checkpoint(
    folder: str | Path, model: nn.Module, optimizer: torch.optim.Optimizer | None = None
) -> None:
    """Reads what :func:`save_sharded_checkpoint` or PyTorch FSDP2 wrote, on any number of ranks. A collective.

    Args:
        folder: Where to read.
        model: The model; its state is loaded unless an optimizer is given.
        optimizer: Load this optimizer's state instead; it need not have taken a step.

    Raises:
        RuntimeError: If a tensor is missing or has another shape; nothing is changed then.
    """
    dcp = _dcp()
    reader = dcp.FileSystemReader(folder)
    metadata = reader.read_metadata()
    if optimizer is None:
        entries = get_sharded_state_dict(model)
        _check_shapes(f"{MODEL}.", entries, metadata.state_dict_metadata, folder)
        with torch.no_grad():
            dcp.load({MODEL: {name: value.detach() for name, value in entries.items()}}, storage_reader=reader)
        return
    state = {OPTIMIZER: _template(model, optimizer, metadata)}
    dcp.load(state, storage_reader=reader)
    load_sharded_optimizer_state_dict(model, optimizer, state[OPTIMIZER])


def _dcp() -> Any:
    """The package of torch, imported only when a checkpoint is written or read."""
    return importlib.import_module("torch.distributed.checkpoint")


def _check_shapes(prefix: str, own: Mapping[str, torch.Tensor], saved: Mapping[str, Any], folder: str | Path) -> None:
    missing = [name for name in own if prefix + name not in saved]
    wrong = [
        f"{name}: {tuple(saved[prefix + name].size)} for {tuple(value.shape)}"
        for name, value in own.items()
        if prefix + name in saved and tuple(saved[prefix + name].size) != tuple(value.shape)
    ]
    if missing or wrong:
        raise RuntimeError(
            f"the checkpoint {folder} does not fit the model: missing {missing[:5]}, different shapes (saved for own) "
            f"{wrong[:5]}; nothing was loaded"
        )


def _template(model: nn.Module, optimizer: torch.optim.Optimizer, metadata: Any) -> dict[str, Any]:
    """Empty state with the keys, shapes and dtypes that the checkpoint has, sharded as the parameters are.

    Taken from the checkpoint rather than from the optimizer, whose state does not exist before its first step.
    """
    params = parameters_by_name(model, optimizer)
    saved: dict[str, Any] = metadata.state_dict_metadata
    state: dict[str, dict[str, Any]] = {}
    for name, param in params.items():
        prefix = f"{OPTIMIZER}.state.{name}."
        for full_key, entry in saved.items():
            key = full_key.removeprefix(prefix)
            if full_key.startswith(prefix) and "." not in key:
                state.setdefault(name, {})[key] = _empty(key, entry, param)
    own = get_sharded_optimizer_state_dict(model, optimizer)["param_groups"]
    groups = [
        {key: value for key, value in group.items() if f"{OPTIMIZER}.param_groups.{index}.{key}" in saved}
        | {
            full_key.rpartition(".")[2]: None
            for full_key in saved
            if full_key.startswith(f"{OPTIMIZER}.param_groups.{index}.")
        }
        for index, group in enumerate(own)
    ]
    return {"state": state, "param_groups": groups}


def _empty(key: str, entry: Any, param: torch.Tensor) -> Any:
    size = getattr(entry, "size", None)
    if size is None:
        return None  # a plain object, which is read as it is
    dtype = entry.properties.dtype
    if isinstance(param, RaggedShardDTensor) and size == param.shape and key != "step":
        local = torch.empty_like(param.local_data, dtype=dtype)
        return RaggedShardDTensor.wrap(local, spec_like(param._spec, dtype))
    return torch.empty(size, dtype=dtype, device="cpu" if key == "step" else param.device)
