"""Full state dicts of a sharded model, in both directions."""

from collections.abc import Mapping

import torch
import torch.distributed as dist
from torch import nn

from ya_fsdp.ragged import RaggedShardDTensor, gather_full, slice_full

__all__ = ["get_full_state_dict", "load_full_state_dict"]


def get_full_state_dict(
    model: nn.Module, *, rank0_only: bool = True, cpu_offload: bool = True
) -> dict[str, torch.Tensor]:
    """Full tensors under the names of the plain model. A collective.

    Tensors are gathered one at a time: beside what rank 0 collects, no rank ever holds more than one full tensor. Tied
    parameters appear under all their names and share memory, as in a plain model's state dict.

    Args:
        model: The model.
        rank0_only: Other ranks than 0 take part but get an empty dict.
        cpu_offload: Put the tensors into host memory.
    """
    keeps = not rank0_only or not dist.is_initialized() or dist.get_rank() == 0
    result: dict[str, torch.Tensor] = {}
    gathered: dict[int, torch.Tensor] = {}
    for name, value in model.state_dict(keep_vars=True).items():
        if not isinstance(value, torch.Tensor):
            result[name] = value
            continue
        if id(value) not in gathered:
            full = value.detach()
            if isinstance(full, RaggedShardDTensor):
                full = gather_full(full._local_tensor, full._spec)
            if keeps:
                gathered[id(value)] = full.cpu() if cpu_offload else full
        if keeps:
            result[name] = gathered[id(value)]
    return result if keeps else {}


def load_full_state_dict(
    model: nn.Module,
    state_dict: Mapping[str, torch.Tensor],
    *,
    broadcast_from_rank0: bool = False,
    strict: bool = True,
) -> tuple[list[str], list[str]]:
    """Loads full tensors into a sharded model. A collective if tensors are broadcast.

    Args:
        model: The model.
        state_dict: Full tensors by name: on every rank, or on rank 0 only if they are broadcast.
        broadcast_from_rank0: Take all values from rank 0, one tensor at a time.
        strict: Refuse missing and unexpected names and different shapes before anything is changed.

    Returns:
        Names that the model has and the state dict has not, and the reverse.

    Raises:
        RuntimeError: If ``strict`` and names differ, or if a shape differs.
    """
    own = model.state_dict(keep_vars=True)
    shapes = {name: tuple(value.shape) for name, value in state_dict.items()}
    if broadcast_from_rank0:
        box = [shapes]
        dist.broadcast_object_list(box, src=0)
        shapes = box[0]
    missing, unexpected = [n for n in own if n not in shapes], [n for n in shapes if n not in own]
    wrong = [
        f"{n}: {shapes[n]} for {tuple(own[n].shape)}" for n in own if n in shapes and shapes[n] != tuple(own[n].shape)
    ]
    if wrong or (strict and (missing or unexpected)):
        raise RuntimeError(
            f"the state dict does not fit {type(model).__name__}: missing {missing}, unexpected {unexpected}, "
            f"different shapes {wrong}; nothing was loaded"
        )
    with torch.no_grad():
        for name, target in own.items():
            if name in shapes:
                source = state_dict.get(name)
                _load_one(target, source, from_rank0=broadcast_from_rank0)
    return missing, unexpected


def _load_one(target: torch.Tensor, source: torch.Tensor | None, *, from_rank0: bool) -> None:
    ragged = target if isinstance(target, RaggedShardDTensor) else None
    local = ragged._local_tensor if ragged is not None else target.detach()
    if from_rank0:
        if dist.get_rank() == 0:
            assert source is not None
            full = source.detach().to(local.device, local.dtype).contiguous()
        else:
            full = torch.empty(target.shape, dtype=local.dtype, device=local.device)
        dist.broadcast(full, src=0)
    else:
        assert source is not None
        full = source.detach()
    local.copy_(full if ragged is None else slice_full(full, ragged._spec))
