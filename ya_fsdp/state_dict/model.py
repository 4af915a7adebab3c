"""State dicts of a sharded model: full tensors, sharded tensors, or this rank's slices; in both directions."""

from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from ya_fsdp.ragged import RaggedShardDTensor, gather_full
from ya_fsdp.runtime.compiler import plain_name
from ya_fsdp.state_dict.transfer import check_local, fill, local_header

__all__ = [
    "get_full_state_dict",
    "get_local_state_dict",
    "get_sharded_state_dict",
    "load_full_state_dict",
    "load_local_state_dict",
    "load_sharded_state_dict",
]

Select = Callable[[str, torch.Tensor], bool]


def get_sharded_state_dict(model: nn.Module, *, select: Select | None = None) -> dict[str, torch.Tensor]:
    """Parameters as ``RaggedShardDTensor`` and buffers, under the names of the plain model. No communication.

    Args:
        model: The model.
        select: Which entries to take, by name and tensor; for example ``lambda name, t: t.requires_grad`` for the
            adapters of a model whose base is frozen. ``None``: all.
    """
    return {
        plain_name(name): value
        for name, value in model.state_dict(keep_vars=True).items()
        if isinstance(value, torch.Tensor) and (select is None or select(plain_name(name), value))
    }


def get_full_state_dict(
    model: nn.Module, *, rank0_only: bool = True, cpu_offload: bool = True, select: Select | None = None
) -> dict[str, torch.Tensor]:
    """Full tensors under the names of the plain model. A collective.

    Tensors are gathered one at a time: beside what rank 0 collects, no rank ever holds more than one full tensor. Tied
    parameters appear under all their names and share memory, as in a plain model's state dict.

    Args:
        model: The model.
        rank0_only: Other ranks than 0 take part but get an empty dict.
        cpu_offload: Put the tensors into host memory.
        select: Which entries to take; see :func:`get_sharded_state_dict`. Must choose alike on all ranks.
    """
    keeps = not rank0_only or not dist.is_initialized() or dist.get_rank() == 0
    result: dict[str, torch.Tensor] = {}
    gathered: dict[int, torch.Tensor] = {}
    for name, value in get_sharded_state_dict(model, select=select).items():
        if id(value) not in gathered:  # every rank gathers a tied parameter once, whether or not it keeps it
            full = value.detach()
            if isinstance(full, RaggedShardDTensor):
                full = gather_full(full.local_data, full._spec)
            if keeps and cpu_offload:
                full = full.cpu()
            gathered[id(value)] = full if keeps else full.new_empty(0)
        if keeps:
            result[name] = gathered[id(value)]
    return result


def load_full_state_dict(
    model: nn.Module,
    state_dict: Mapping[str, torch.Tensor],
    *,
    broadcast_from_rank0: bool = False,
    strict: bool = True,
    select: Select | None = None,
) -> tuple[list[str], list[str]]:
    """Loads full tensors into a sharded model. A collective if tensors are broadcast.

    Args:
        model: The model.
        state_dict: Full tensors by name: on every rank, or on rank 0 only if they are broadcast.
        broadcast_from_rank0: Take all values from rank 0, one tensor at a time.
        strict: Refuse missing and unexpected names before anything is changed.
        select: Which of the model's entries to load; the others count neither as missing nor as unexpected.

    Returns:
        Names that the model has and the state dict has not, and the reverse.

    Raises:
        RuntimeError: If ``strict`` and names differ, or if a shape differs.
    """
    targets = get_sharded_state_dict(model, select=select)
    shapes = {name: tuple(value.shape) for name, value in state_dict.items()}
    if broadcast_from_rank0 and dist.is_initialized():
        box = [shapes]
        dist.broadcast_object_list(box, src=0)
        shapes = box[0]
    result = _compare(model, targets, shapes, strict)
    loaded: set[int] = set()
    with torch.no_grad():
        for name, target in targets.items():
            if name in shapes and id(target) not in loaded:
                loaded.add(id(target))
                fill(target, state_dict.get(name), from_rank0=broadcast_from_rank0)
    return result


def load_sharded_state_dict(
    model: nn.Module, state_dict: Mapping[str, torch.Tensor], *, strict: bool = True, select: Select | None = None
) -> tuple[list[str], list[str]]:
    """Loads sharded (or plain full) tensors. A collective where a tensor is sharded in another way than the model's.

    Args:
        model: The model.
        state_dict: ``RaggedShardDTensor``, other DTensors, or full tensors by name, on every rank.
        strict: See :func:`load_full_state_dict`.
        select: See :func:`load_full_state_dict`.
    """
    targets = get_sharded_state_dict(model, select=select)
    shapes = {name: tuple(value.shape) for name, value in state_dict.items()}
    result = _compare(model, targets, shapes, strict)
    with torch.no_grad():
        for name, target in targets.items():
            if name in state_dict:
                target.detach().copy_(state_dict[name].detach())
    return result


def get_local_state_dict(model: nn.Module, *, select: Select | None = None) -> dict[str, Any]:
    """This rank's slices, with what is needed to refuse them elsewhere. No communication."""
    entries = get_sharded_state_dict(model, select=select)
    return {"header": local_header(entries), "tensors": {name: _local(value) for name, value in entries.items()}}


def load_local_state_dict(model: nn.Module, state_dict: Mapping[str, Any], *, select: Select | None = None) -> None:
    """Loads what :func:`get_local_state_dict` gave on the same rank of the same number of ranks. No communication.

    Raises:
        RuntimeError: If the number of ranks, the rank, a name or a slice differs; nothing is changed then.
    """
    entries = get_sharded_state_dict(model, select=select)
    check_local(state_dict["header"], local_header(entries))
    with torch.no_grad():
        for name, target in entries.items():
            _local(target).copy_(state_dict["tensors"][name])


def _local(value: torch.Tensor) -> torch.Tensor:
    plain = value.detach()
    return plain.local_data if isinstance(plain, RaggedShardDTensor) else plain


def _compare(
    model: nn.Module, targets: Mapping[str, torch.Tensor], shapes: Mapping[str, tuple[int, ...]], strict: bool
) -> tuple[list[str], list[str]]:
    known = {plain_name(name) for name in model.state_dict(keep_vars=True)}
    missing = [name for name in targets if name not in shapes]
    unexpected = [name for name in shapes if name not in known]
    own = {name: tuple(value.shape) for name, value in targets.items()}
    wrong = [f"{n}: {shapes[n]} for {own[n]}" for n in own if n in shapes and shapes[n] != own[n]]
    if wrong or (strict and (missing or unexpected)):
        rank = dist.get_rank() if dist.is_initialized() else 0
        raise RuntimeError(
            f"rank {rank}: the state dict does not fit {type(model).__name__}: missing {missing}, unexpected "
            f"{unexpected}, different shapes {wrong}; nothing was loaded"
        )
    return missing, unexpected
