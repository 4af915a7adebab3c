"""From a rank's slice to the full tensor and back, on plain tensors.

A parameter that model parallelism (tensor or expert parallel) has cut already has ``Shard`` placements beside the
``RaggedShard``: what lies in the flat buffer, and is cut raggedly, is the rank's *block* of the tensor. Without such a
placement the block is the whole tensor.
"""

import torch
import torch.distributed as dist

from ya_fsdp._torch_compat import (
    DTensor,
    DTensorSpec,
    Replicate,
    Shard,
    TensorMeta,
    all_gather,
    compute_local_shape_and_global_offset,
    reduce_scatter,
)
from ya_fsdp.layout import LocalSlice
from ya_fsdp.ragged.placement import ragged_axis

__all__ = ["block_of", "gather_full", "local_range", "scatter_mean", "sharded_axes", "slice_full", "spec_like"]


def sharded_axes(spec: DTensorSpec) -> tuple[int, ...]:
    """Mesh axes whose ranks hold different elements of the tensor."""
    return tuple(i for i, placement in enumerate(spec.placements) if not isinstance(placement, Replicate))


def block_of(spec: DTensorSpec) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Shape of this rank's block, and where it starts in the full tensor."""
    if len(spec.placements) == 1 or not any(isinstance(placement, Shard) for placement in spec.placements):
        return tuple(spec.shape), (0,) * len(spec.shape)
    shape, offset = compute_local_shape_and_global_offset(spec.shape, spec.mesh, _without_ragged(spec))
    return tuple(shape), tuple(offset)


def local_range(spec: DTensorSpec) -> LocalSlice:
    """This rank's slice of its block of the tensor that ``spec`` describes."""
    axis, placement = ragged_axis(spec)
    return placement.slice_of(torch.Size(block_of(spec)[0]).numel(), spec.mesh.get_local_rank(axis))


def slice_full(full: torch.Tensor, spec: DTensorSpec) -> torch.Tensor:
    """This rank's slice of a full tensor, flattened; a view where the block is contiguous.

    Shapes:
        full: the tensor's shape. Result: ``[local numel]``.
    """
    mine = local_range(spec)
    return _cut_block(full, spec).reshape(-1)[mine.param_offset : mine.param_offset + mine.numel]


def _cut_block(full: torch.Tensor, spec: DTensorSpec) -> torch.Tensor:
    for dim, (size, start) in enumerate(zip(*block_of(spec), strict=True)):
        if size != full.shape[dim]:
            full = full.narrow(dim, start, size)
    return full


def _without_ragged(spec: DTensorSpec) -> tuple[Shard | Replicate, ...]:
    return tuple(p if isinstance(p, Shard) else Replicate() for p in spec.placements)


def spec_like(spec: DTensorSpec, dtype: torch.dtype) -> DTensorSpec:
    """The same layout for another dtype."""
    if spec.tensor_meta is not None and spec.tensor_meta.dtype == dtype:
        return spec
    stride = _contiguous_stride(spec.shape)
    return DTensorSpec(spec.mesh, spec.placements, tensor_meta=TensorMeta(spec.shape, stride, dtype))


def gather_full(local: torch.Tensor, spec: DTensorSpec) -> torch.Tensor:
    """Gathers the full tensor on every rank. A collective.

    Slices in host memory travel through the device of the mesh, and the full tensor is in host memory too.

    A tensor that lies on one rank is broadcast; otherwise slices are padded to the longest, since not every backend
    gathers uneven pieces.

    Shapes:
        local: ``[local numel]``. Result: the full shape, contiguous.
    """
    shape, here = block_of(spec)[0], local.device
    block = _gather_block(local.to(spec.mesh.device_type), spec, torch.Size(shape))
    if shape == tuple(spec.shape):
        return block.to(here)
    stride = _contiguous_stride(spec.shape)
    placements = _without_ragged(spec)
    whole = DTensor.from_local(block, spec.mesh, placements, run_check=False, shape=spec.shape, stride=stride)
    return whole.full_tensor().to(here)


def _gather_block(local: torch.Tensor, spec: DTensorSpec, shape: torch.Size) -> torch.Tensor:
    axis, placement = ragged_axis(spec)
    numel = shape.numel()
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
    """Averages full tensors over the data-parallel ranks and returns this rank's slice. A collective.

    Ranks that hold different blocks of one tensor are expected to pass equal values.

    Shapes:
        full: the tensor's shape, one per rank. Result: ``[local numel]``.
    """
    axis, placement = ragged_axis(spec)
    mine = local_range(spec)
    here = full.device
    flat = _cut_block(full, spec).reshape(-1).to(spec.mesh.device_type)
    numel, world_size = flat.numel(), spec.mesh.size(axis)
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
    num_ranks = world_size
    for other, kind in enumerate(spec.placements):
        if other < axis and isinstance(kind, Replicate):  # axes behind the ragged one are of model parallelism
            dist.all_reduce(reduced, group=spec.mesh.get_group(other))
            num_ranks *= spec.mesh.size(other)
    return reduced[: mine.numel].div_(num_ranks).to(here)


def _contiguous_stride(shape: torch.Size) -> tuple[int, ...]:
    stride, strides = 1, []
    for size in reversed(shape):
        strides.append(stride)
        stride *= max(size, 1)
    return tuple(reversed(strides))
