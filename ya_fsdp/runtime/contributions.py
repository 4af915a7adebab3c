"""Which parameters got a gradient, on any rank.

A parameter without a gradient on this rank adds zeros to the reduction, so the average over ranks is right whether or
not ranks agree. What remains to be told apart is "no gradient anywhere", where ``.grad`` stays None as in a plain
module. One small all-reduce per backward settles it, and only a rank that misses a gradient reads its result: a model
that uses all of its parameters never makes the host wait for the device.
"""

from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from ya_fsdp.comm import Collectives, Reduction
from ya_fsdp.runtime.mesh import ShardMesh
from ya_fsdp.runtime.param_group import YaFSDPParamGroup

__all__ = ["resolve_missing"]

_ANY = Reduction(1.0, dist.ReduceOp.MAX, 1.0)


def resolve_missing(groups: Iterable[YaFSDPParamGroup]) -> None:
    """Gives parameters that got no gradient here the others' average, if there is one. A collective.

    Args:
        groups: All buckets of a root, in the same order on every rank.
    """
    by_mesh: dict[DeviceMesh, list[YaFSDPParamGroup]] = {}
    seen: dict[int, list[YaFSDPParamGroup]] = {}  # the same lists, found without a hash of the mesh for every group
    for group in groups:
        if group.reducer.has_reduced:
            group.reducer.has_reduced = False
            mesh = group.mesh.mesh
            if id(mesh) not in seen:
                seen[id(mesh)] = by_mesh.setdefault(mesh, [])
            seen[id(mesh)].append(group)
    for members in by_mesh.values():
        shard_mesh = members[0].mesh
        if shard_mesh.num_ranks > 1:
            _resolve(members, shard_mesh)
        for group in members:
            group.reducer.missing.clear()


def _resolve(groups: list[YaFSDPParamGroup], mesh: ShardMesh) -> None:
    numbers = [len(group.params) for group in groups]
    flags = torch.ones(sum(numbers), dtype=torch.int32, device=groups[0].device)
    incomplete = [group for group in groups if group.reducer.missing]
    if incomplete:
        host = [1] * sum(numbers)
        for offset, group in zip(_offsets(numbers), groups, strict=True):
            for index, _ in group.reducer.missing:
                host[offset + index] = 0
        flags.copy_(torch.tensor(host, dtype=torch.int32))
    axes: list[Collectives] = [mesh.shard] if mesh.replicate is None else [mesh.shard, mesh.replicate]
    for axis in axes:
        axis.all_reduce(flags, _ANY, async_op=False)
    if not incomplete:
        return
    anywhere = flags.tolist()
    for offset, group in zip(_offsets(numbers), groups, strict=True):
        for index, view in group.reducer.missing:
            if anywhere[offset + index]:
                group.reducer.assign_missing(index, view)


def _offsets(numbers: list[int]) -> list[int]:
    offsets, end = [], 0
    for number in numbers:
        offsets.append(end)
        end += number
    return offsets
