"""From a unit's parameters to its buckets, one parameter at a time.

No full-size copy is made: every rank copies its slice of each parameter into the bucket's flat shard and the modules
let go of the original before the next one is touched.
"""

from collections.abc import Callable, Hashable, Iterable, Sequence
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from ya_fsdp._torch_compat import DTensor, Replicate, Shard
from ya_fsdp.layout import LocalSlice, ParamSpan, ParamSpec, plan_contiguous
from ya_fsdp.layout.planner import aligned_elements
from ya_fsdp.policy import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy, ResolvedDtypes
from ya_fsdp.ragged import RaggedShardDTensor
from ya_fsdp.runtime.mesh import ShardMesh
from ya_fsdp.runtime.param import ParamSite, YaFSDPParam, local_part
from ya_fsdp.runtime.param_group import YaFSDPParamGroup, allocate_shard
from ya_fsdp.runtime.settings import UnitPhase, UnitSettings

__all__ = ["ParamUse", "build_groups", "find_params"]

_MARK = "_ya_fsdp_sharded_as"


class ParamUse:
    """A parameter of a unit and the places that show it."""

    def __init__(self, name: str, param: nn.Parameter) -> None:
        self.name = name
        self.param = param
        self.sites: list[ParamSite] = []


def find_params(modules: Iterable[tuple[str, nn.Module]], ignored: set[int]) -> list[ParamUse]:
    """Parameters that the given modules own themselves, each once, with every place that shows it.

    Args:
        modules: Names and modules of the unit, without those that belong to units below.
        ignored: ``id`` of the parameters to leave alone.

    Raises:
        ValueError: If a parameter cannot be sharded, or was sharded already under another name.
    """
    uses: dict[int, ParamUse] = {}
    for owner, module in modules:
        for name, param in module._parameters.items():
            if param is None or id(param) in ignored:
                continue
            full_name = f"{owner}.{name}" if owner else name
            if id(param) not in uses:
                _check(full_name, param)
                uses[id(param)] = ParamUse(full_name, param)
            uses[id(param)].sites.append(ParamSite(module, name, owner))
    return list(uses.values())


def _check(name: str, param: Any) -> None:
    tied_to = getattr(param, _MARK, None)
    if tied_to is not None:
        raise ValueError(
            f"{name} is tied to {tied_to}, which is sharded in another unit already, and the tie would be lost. Shard "
            f"the modules that share the parameter in one call: fully_shard([first, second])."
        )
    if isinstance(param, RaggedShardDTensor):
        raise ValueError(f"{name} is sharded already; do not call fully_shard on a module twice")
    if isinstance(param, DTensor) and any(type(p) not in (Shard, Replicate) for p in param.placements):
        raise ValueError(
            f"{name} is a DTensor placed as {param.placements}; only Shard and Replicate can be sharded further. "
            f"Redistribute it, or pass it in ignored_params."
        )
    param = local_part(param)
    if param.layout is not torch.strided:
        raise ValueError(f"{name} has layout {param.layout}; only dense (strided) parameters can be sharded")
    if is_traceable_wrapper_subclass(param):
        raise ValueError(
            f"{name} is a {type(param).__name__}, a tensor subclass that does not say how it is gathered; pass it in "
            f"ignored_params or convert it to a plain tensor first"
        )


def build_groups(
    uses: Sequence[ParamUse],
    *,
    kind: Hashable,
    mesh_of: Callable[[nn.Parameter], ShardMesh],
    policy: MixedPrecisionPolicy,
    alignment: int,
    device: torch.device,
    offload: OffloadPolicy,
    settings: UnitSettings,
    phase: UnitPhase,
) -> list[YaFSDPParamGroup]:
    """Sorts parameters into buckets by mesh, dtype and ``requires_grad`` and shards them.

    Args:
        uses: The unit's parameters.
        kind: Equal for units that are repetitions of one another.
        mesh_of: Mesh to shard a parameter over.
        policy: Dtypes.
        alignment: Elements at whose multiples parameters and pieces start.
        device: Where the unit computes.
        offload: Where shards live.
        settings: The unit's switches.
        phase: The unit's place in its step.
    """
    home = torch.device("cpu") if isinstance(offload, CPUOffloadPolicy) else device
    buckets: dict[tuple[ShardMesh, ResolvedDtypes, bool, bool], list[ParamUse]] = {}
    for use in uses:
        dtypes = ResolvedDtypes.resolve(use.param.dtype, policy)
        key = (mesh_of(use.param), dtypes, use.param.requires_grad, use.param.is_meta)
        buckets.setdefault(key, []).append(use)
    groups = []
    for (mesh, dtypes, requires_grad, is_meta), members in buckets.items():
        itemsizes = (dtypes.master.itemsize, dtypes.compute.itemsize, dtypes.reduce.itemsize)
        specs = [ParamSpec(use.name, tuple(local_part(use.param).shape)) for use in members]
        layout = plan_contiguous(specs, mesh.shard.world_size, aligned_elements(alignment, *itemsizes))
        target = torch.device("meta") if is_meta else home
        shard = allocate_shard(layout.shard_numel, dtypes.master, target, offload)
        slices = layout.local_slices(mesh.shard.rank)
        params = [
            _shard(use, span, shard, mine, mesh) for use, span, mine in zip(members, layout.spans, slices, strict=True)
        ]
        name = (kind, mesh, dtypes, requires_grad, is_meta)
        groups.append(YaFSDPParamGroup(name, params, layout, shard, mesh, dtypes, device, offload, settings, phase))
    return groups


def _shard(use: ParamUse, span: ParamSpan, shard: torch.Tensor, mine: LocalSlice, mesh: ShardMesh) -> YaFSDPParam:
    """Copies this rank's slice of a parameter into the shard and lets go of the parameter."""
    local = shard[mine.shard_offset : mine.shard_offset + mine.numel]
    parallel = use.param._spec if isinstance(use.param, DTensor) else None
    try:
        spec = mesh.spec(span.start, shard.numel(), use.param.shape, shard.dtype, parallel)
    except RuntimeError as error:
        raise ValueError(
            f"{use.name} is a DTensor on {use.param._spec.mesh}, which cannot be joined with {mesh.mesh}, over which "  # type: ignore[attr-defined]
            f"it is to be sharded: make both of them slices of one DeviceMesh with named axes"
        ) from error
    if not shard.is_meta:
        flat = local_part(use.param.detach()).reshape(-1)
        local.copy_(flat[mine.param_offset : mine.param_offset + mine.numel])
    sharded = nn.Parameter(RaggedShardDTensor.wrap(local, spec), requires_grad=use.param.requires_grad)
    param = YaFSDPParam(use.name, use.sites, use.param, span, sharded)
    param.to_sharded()
    setattr(use.param, _MARK, use.name)
    del use.param
    return param
