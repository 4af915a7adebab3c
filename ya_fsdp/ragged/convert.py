"""From a rank's slice to the full tensor and back, on plain tensors."""

import torch
import torch.distributed as dist

from ya_fsdp._torch_compat import DTensorSpec, Replicate, TensorMeta, all_gather, reduce_scatter
from ya_fsdp.layout import LocalSlice
from ya_fsdp.ragged.placement import ragged_axis

__all__ = ["gather_full", "local_range", "scatter_mean", "slice_full", "spec_like"]


def local_range(spec: DTensorSpec) -> LocalSlice:
    """This rank's slice of the tensor that ``spec`` describes."""
    axis, placement = ragged_axis(spec)
    return placement.slice_of(spec.shape.numel(), spec.mesh.get_local_rank(axis))


def slice_full(full: torch.Tensor, spec: DTensorSpec) -> torch.Tensor:
    """This rank's slice of a full tensor, flattened; a view where the full tensor is contiguous.

    Shapes:
        full: the tensor's shape. Result: ``[local numel]``.
    """
    mine = local_range(spec)
    return full.reshape(-1)[mine.param_offset : mine.param_offset + mine.numel]


def spec_like(spec: DTensorSpec, dtype: torch.dtype) -> DTensorSpec:
    """The same layout for another dtype."""
    if spec.tensor_meta is not None and spec.tensor_meta.dtype == dtype:
        return spec
    stride = _contiguous_stride(spec.shape)
    return DTensorSpec(spec.mesh, spec.placements, tensor_meta=TensorMeta(spec.shape, stride, dtype))


def gather_full(local: torch.Tensor, spec: DTensorSpec) -> torch.Tensor:
    """Gathers the full tensor on every rank of the sharding axis. A collective.

    A tensor that lies on one rank is broadcast; otherwise slices are padded to the longest, since not every backend
    gathers uneven pieces.

    Shapes:
        local: ``[local numel]``. Result: the full shape, contiguous.
    """
    axis, placement = ragged_axis(spec)
    shape, numel = spec.shape, spec.shape.numel()
    group, world_size = spec.mesh.get_group(axis), spec.mesh.size(axis)
    owners = placement.owners(numel)
    if world_size == 1:
        return local.detach().clone().view(shape)
    if len(owners) <= 1:
        full = local.detach().clone() if local.numel() == numel else local.new_empty(numel)
        if numel:
            dist.broadcast(full, src=dist.get_global_rank(group, owners[0]), group=group)
        return full.view(shape)
    pieces = [placement.slice_of(numel, rank) for rank in range(world_size)]
    longest = max(piece.numel for piece in pieces)
    padded = local.new_zeros(longest)
    padded[: local.numel()].copy_(local)
    gathered = local.new_empty(world_size * longest)
    all_gather(gathered, padded, group=group)
    full = torch.cat([gathered[rank * longest : rank * longest + pieces[rank].numel] for rank in owners])
    return full.view(shape)


def scatter_mean(full: torch.Tensor, spec: DTensorSpec) -> torch.Tensor:
    """Averages full tensors over all ranks of the mesh and returns this rank's slice. A collective.

    Shapes:
        full: the tensor's shape, one per rank. Result: ``[local numel]``.
    """
    axis, placement = ragged_axis(spec)
    mine = local_range(spec)
    numel, world_size = spec.shape.numel(), spec.mesh.size(axis)
    flat = full.reshape(-1)
    pieces = [placement.slice_of(numel, rank) for rank in range(world_size)]
    longest = max(piece.numel for piece in pieces)
    staging = flat.new_zeros(world_size, longest)
    for row, piece in zip(staging, pieces, strict=True):
        row[: piece.numel].copy_(flat[piece.param_offset : piece.param_offset + piece.numel])
    reduced = flat.new_empty(longest)
    if world_size == 1:
        reduced.copy_(staging[0])
    else:
        reduce_scatter(reduced, staging.view(-1), group=spec.mesh.get_group(axis))
    for other, kind in enumerate(spec.placements):
        if other != axis and isinstance(kind, Replicate):
            dist.all_reduce(reduced, group=spec.mesh.get_group(other))
    return reduced[: mine.numel].div_(spec.mesh.size())


def _contiguous_stride(shape: torch.Size) -> tuple[int, ...]:
    stride, strides = 1, []
    for size in reversed(shape):
        strides.append(stride)
        stride *= max(size, 1)
    return tuple(reversed(strides))
