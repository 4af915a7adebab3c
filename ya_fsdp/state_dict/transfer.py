"""Moving values between files' tensors and shards, one tensor at a time."""

from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist

from ya_fsdp.ragged import RaggedShardDTensor, local_range, slice_full

__all__ = ["check_local", "fill", "local_header"]


def fill(target: torch.Tensor, source: torch.Tensor | None, *, from_rank0: bool) -> None:
    """Copies a full tensor into a shard or a plain tensor. A collective if it comes from rank 0.

    Args:
        target: A ``RaggedShardDTensor`` or a plain tensor.
        source: The full tensor; may be None on other ranks than 0 if it comes from there.
        from_rank0: Take the values from rank 0.
    """
    plain = target.detach()
    local = plain.local_data if isinstance(plain, RaggedShardDTensor) else plain
    full = source.detach() if source is not None else None
    if from_rank0 and dist.is_initialized() and dist.get_world_size() > 1:
        device = plain._spec.mesh.device_type if isinstance(plain, RaggedShardDTensor) else local.device
        if dist.get_rank() == 0:
            assert full is not None
            full = full.to(device, local.dtype).contiguous()
        else:
            full = torch.empty(target.shape, dtype=local.dtype, device=device)
        dist.broadcast(full, src=0)
    assert full is not None
    local.copy_(slice_full(full, plain._spec) if isinstance(plain, RaggedShardDTensor) else full)


def local_header(entries: Mapping[str, torch.Tensor]) -> dict[str, Any]:
    """What a file of slices must agree on with the model that loads it."""
    is_distributed = dist.is_initialized()
    slices = {}
    for name, value in entries.items():
        if isinstance(value, RaggedShardDTensor):
            mine = local_range(value._spec)
            slices[name] = (tuple(value.shape), mine.param_offset, mine.numel)
        else:
            slices[name] = (tuple(value.shape), 0, value.numel())
    return {
        "world_size": dist.get_world_size() if is_distributed else 1,
        "rank": dist.get_rank() if is_distributed else 0,
        "slices": slices,
    }


def check_local(saved: Mapping[str, Any], own: Mapping[str, Any]) -> None:
    """Refuses slices of another run's layout.

    Raises:
        RuntimeError: Naming what was saved and what is here.
    """
    where = f"rank {own['rank']}"
    if saved["world_size"] != own["world_size"]:
        raise RuntimeError(
            f"{where}: local state was saved by {saved['world_size']} ranks and cannot be loaded by "
            f"{own['world_size']}; only the same number can. Save sharded or full state to change it."
        )
    if saved["rank"] != own["rank"]:
        raise RuntimeError(f"{where}: got the local state of rank {saved['rank']}")
    if saved["slices"] != own["slices"]:
        names = sorted(
            name for name in {*saved["slices"], *own["slices"]} if saved["slices"].get(name) != own["slices"].get(name)
        )
        first = names[0]
        raise RuntimeError(
            f"{where}: local state was saved with another layout in {len(names)} entries; first {first}: saved (shape, "
            f"offset, length) {saved['slices'].get(first)}, here {own['slices'].get(first)}"
        )
