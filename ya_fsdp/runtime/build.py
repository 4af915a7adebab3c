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
from ya_fsdp.ragged import RaggedShardDTensor, data_of, with_data
from ya_fsdp.runtime.extensions import ExtensionGroup, check_hooks, has_hooks, plan_rows
from ya_fsdp.runtime.mesh import ShardMesh
from ya_fsdp.runtime.param import ParamSite, YaFSDPParam, local_part
from ya_fsdp.runtime.param_group import YaFSDPParamGroup, allocate_shard
from ya_fsdp.runtime.settings import UnitPhase, UnitSettings

__all__ = ["GroupBuilder", "ParamUse", "find_params"]

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
    if is_traceable_wrapper_subclass(param) and not has_hooks(param):
        raise ValueError(
            f"{name} is a {type(param).__name__}, a tensor subclass that does not say how it is gathered; pass it in "
            f"ignored_params or convert it to a plain tensor first"
        )


class GroupBuilder:
    """Sorts a unit's parameters into buckets by mesh, dtype and ``requires_grad`` and shards them.

    Args:
        kind: Equal for units that are repetitions of one another.
        mesh_of: Mesh to shard a parameter over.
        policy: Dtypes.
        alignment: Elements at whose multiples parameters and pieces start.
        device: Where the unit computes.
        offload: Where shards live.
        settings: The unit's switches.
        phase: The unit's place in its step.
    """

    def __init__(
        self,
        kind: Hashable,
        mesh_of: Callable[[nn.Parameter], ShardMesh],
        policy: MixedPrecisionPolicy,
        alignment: int,
        device: torch.device,
        offload: OffloadPolicy,
        settings: UnitSettings,
        phase: UnitPhase,
    ) -> None:
        self._kind = kind
        self._mesh_of = mesh_of
        self._policy = policy
        self._alignment = alignment
        self._device = device
        self._offload = offload
        self._home = torch.device("cpu") if isinstance(offload, CPUOffloadPolicy) else device
        self._unit = (settings, phase)

    @torch.no_grad()
    def build(self, uses: Sequence[ParamUse]) -> list[YaFSDPParamGroup]:
        """Shards parameters; modules show the shards from then on.

        Args:
            uses: The unit's parameters.

        Raises:
            ValueError: If one of them cannot be sharded.
        """
        buckets: dict[tuple[ShardMesh, ResolvedDtypes, bool, bool], list[ParamUse]] = {}
        extended = []
        for use in uses:
            check_hooks(use.name, local_part(use.param), self._policy)
            if has_hooks(local_part(use.param)):
                extended.append(use)
                continue
            dtypes = ResolvedDtypes.resolve(use.param.dtype, self._policy)
            key = (self._mesh_of(use.param), dtypes, use.param.requires_grad, use.param.is_meta)
            buckets.setdefault(key, []).append(use)
        groups = [self._bucket(*key, members) for key, members in buckets.items()]
        return [*groups, *(self._extension(use) for use in extended)]

    def _bucket(
        self, mesh: ShardMesh, dtypes: ResolvedDtypes, requires_grad: bool, is_meta: bool, members: list[ParamUse]
    ) -> YaFSDPParamGroup:
        itemsizes = (dtypes.master.itemsize, dtypes.compute.itemsize, dtypes.reduce.itemsize)
        specs = [ParamSpec(use.name, tuple(local_part(use.param).shape)) for use in members]
        layout = plan_contiguous(specs, mesh.shard.world_size, aligned_elements(self._alignment, *itemsizes))
        target = torch.device("meta") if is_meta else self._home
        shard = allocate_shard(layout.shard_numel, dtypes.master, target, self._offload)
        slices = layout.local_slices(mesh.shard.rank)
        params = []
        for use, span, mine in zip(members, layout.spans, slices, strict=True):
            local = shard[mine.shard_offset : mine.shard_offset + mine.numel]
            _fill(local, local_part(use.param.detach()), mine)
            params.append(_shard(use, span, shard.numel(), local, mesh))
        kind = (self._kind, mesh, dtypes, requires_grad, is_meta)
        return YaFSDPParamGroup(kind, params, layout, shard, mesh, dtypes, self._device, self._offload, *self._unit)

    def _extension(self, use: ParamUse) -> YaFSDPParamGroup:
        mesh, whole = self._mesh_of(use.param), local_part(use.param.detach())
        layout = plan_rows(use.name, whole.shape, mesh.shard.world_size)
        (mine,), target = layout.local_slices(mesh.shard.rank), torch.device("meta") if whole.is_meta else self._home
        rows = {}
        for name, data in data_of(whole).items():
            rows[name] = allocate_shard(layout.shard_numel, data.dtype, target, self._offload)
            _fill(rows[name][: mine.numel], data, mine)
        local = with_data(whole, {name: data[: mine.numel] for name, data in rows.items()})
        dtypes = ResolvedDtypes.resolve(whole.dtype, self._policy)
        param = _shard(use, layout.spans[0], layout.shard_numel, local, mesh)
        return ExtensionGroup(
            self._kind, param, layout, rows, mesh, dtypes, self._device, self._offload, *self._unit, self._policy
        )


def _fill(local: torch.Tensor, whole: torch.Tensor, mine: LocalSlice) -> None:
    if not local.is_meta:
        local.copy_(whole.reshape(-1)[mine.param_offset : mine.param_offset + mine.numel])


def _shard(use: ParamUse, span: ParamSpan, shard_numel: int, local: torch.Tensor, mesh: ShardMesh) -> YaFSDPParam:
    """Makes the modules show this rank's slice of a parameter and lets go of the parameter."""
    parallel = use.param._spec if isinstance(use.param, DTensor) else None
    try:
        spec = mesh.spec(span.start, shard_numel, use.param.shape, local.dtype, parallel)
    except RuntimeError as error:
        raise ValueError(
            f"{use.name} is a DTensor on {use.param._spec.mesh}, which cannot be joined with {mesh.mesh}, over which "  # type: ignore[attr-defined]
            f"it is to be sharded: make both of them slices of one DeviceMesh with named axes"
        ) from error
    sharded = nn.Parameter(RaggedShardDTensor.wrap(local, spec), requires_grad=use.param.requires_grad)
    param = YaFSDPParam(use.name, use.sites, use.param, span, sharded)
    param.to_sharded()
    setattr(use.param, _MARK, use.name)
    del use.param
    return param
