"""Parameters that say themselves how they are gathered, such as weights that travel in 8 bits.

Their class has two hooks. ``fsdp_pre_all_gather`` makes, from this rank's slice, the tensors that are sent and metadata
(a scale); ``fsdp_post_all_gather`` makes the unsharded parameter from what all ranks sent. Both run at every gather.

Such a parameter is a bucket of its own, cut evenly and between rows: every rank passes tensors of one size to the
gather, which lands where the second hook reads it, so nothing is copied in between.
"""

from collections.abc import Callable, Hashable, Sequence
from math import prod
from typing import Any

import torch

from ya_fsdp._common import ShardedState
from ya_fsdp.comm import Pending
from ya_fsdp.layout import FlatLayout, ParamSpan, ParamSpec
from ya_fsdp.layout.planner import round_up
from ya_fsdp.policy import MixedPrecisionPolicy, OffloadPolicy, ResolvedDtypes
from ya_fsdp.ragged import data_of, with_data
from ya_fsdp.runtime.mesh import ShardMesh
from ya_fsdp.runtime.param import GATHER_HOOKS, ParamSwitch, YaFSDPParam
from ya_fsdp.runtime.param_group import YaFSDPParamGroup, allocate_shard
from ya_fsdp.runtime.settings import UnitPhase, UnitSettings

__all__ = ["ExtensionGroup", "check_hooks", "has_hooks", "plan_rows"]

_ALIGNMENT = 16  # bytes at whose multiples what is gathered starts


def has_hooks(param: Any) -> bool:
    """Whether a parameter says how it is gathered."""
    return any(hasattr(param, hook) for hook in GATHER_HOOKS)


def check_hooks(name: str, param: Any, policy: MixedPrecisionPolicy) -> None:
    """Refuses a parameter that has one hook without the other, or that should be gathered by hooks and has none.

    Raises:
        ValueError: Naming the parameter.
    """
    missing = [hook for hook in GATHER_HOOKS if not hasattr(param, hook)]
    kind = type(param).__name__
    if len(missing) == 1:
        raise ValueError(
            f"{name} is a {kind}, which has no {missing[0]} although it has the other of the two hooks that gather a "
            f"parameter; define both of them or neither"
        )
    for dtype, cls in policy.all_gather_dtype_to_param_cls.items():
        if missing and isinstance(param, cls):
            raise ValueError(
                f"{name} is a {kind}, which all_gather_dtype_to_param_cls wants to be gathered as {dtype}, but it has "
                f"no {' and no '.join(missing)} to make that of it"
            )


def plan_rows(name: str, shape: Sequence[int], world_size: int) -> FlatLayout:
    """Lays one parameter out so that every rank has the same number of whole rows, the last ones filled up."""
    rows = -(-shape[0] // world_size) if shape else 1
    spec = ParamSpec(name, tuple(shape))
    return FlatLayout((spec,), (ParamSpan(0, spec.numel),), world_size, rows * prod(shape[1:]), 1)


class _All:
    """Several collectives as one."""

    def __init__(self, works: list[Pending]) -> None:
        self._works = works

    def wait(self) -> None:
        for work in self._works:
            work.wait()


class ExtensionGroup(YaFSDPParamGroup):
    """The bucket of one parameter with hooks.

    Args:
        kind: See :class:`YaFSDPParamGroup`.
        param: The parameter.
        layout: Made by :func:`plan_rows`.
        data: This rank's whole rows of the parameter's data, filled up to the same number on all ranks; by name.
        mesh: Mesh to shard over.
        dtypes: Dtypes of the parameter.
        device: Where it is gathered.
        offload: Where ``data`` lives.
        settings: The unit's switches.
        phase: The unit's place in its step.
        policy: What the first hook is told.
    """

    def __init__(
        self,
        kind: Hashable,
        param: YaFSDPParam,
        layout: FlatLayout,
        data: dict[str, torch.Tensor],
        mesh: ShardMesh,
        dtypes: ResolvedDtypes,
        device: torch.device,
        offload: OffloadPolicy,
        settings: UnitSettings,
        phase: UnitPhase,
        policy: MixedPrecisionPolicy,
    ) -> None:
        shard = next(iter(data.values()))
        super().__init__((kind, param.name), [param], layout, shard, mesh, dtypes, device, offload, settings, phase)
        self._data = data
        self._like = param.sharded_param._local_tensor  # type: ignore[attr-defined]
        self._policy = policy
        self._nbytes = 0
        self._outputs: list[torch.Tensor] = []
        self._sizes: list[torch.Size] = []
        self._places: list[tuple[torch.dtype, int, int]] = []

    @property
    def gathered_nbytes(self) -> int:
        """Bytes of what is gathered; known from the first gather on."""
        return self._nbytes

    @property
    def _param(self) -> YaFSDPParam:
        return self.params[0]

    def _start_gather(self) -> Pending:
        runtime, ranks = self._comm.runtime, self.mesh.shard
        with runtime.on(runtime.gather_stream), torch.no_grad():
            pieces = self._param.set_all_gather_input(self._rows(), self.mesh.shard_axis, self._policy)
        self._fit_buffer(pieces)
        _, free = self._occupy()

        def start() -> Pending:
            works = [
                ranks.all_gather(output.view(torch.uint8), as_bytes(piece), async_op=runtime.is_async_host)
                for output, piece in zip(self._outputs, pieces, strict=True)
            ]
            return _All([work for work in works if work is not None])

        return runtime.issue(runtime.gather_stream, free, start, *pieces)

    def _end_gather(self) -> None:
        mine, num_rows = self._row_shape(), self._param.shape[:1].numel()
        outputs = [output.data.view(-1, *size[1:]) for output, size in zip(self._outputs, self._sizes, strict=True)]
        # Rows that fill up the last ranks' part go, where what was sent has rows at all.
        whole = [o[:num_rows] if tuple(size) == mine else o for o, size in zip(outputs, self._sizes, strict=True)]
        self._param.init_unsharded_param(tuple(whole), self.dtypes.compute)
        if self._switch is None:
            self._switch = ParamSwitch(self.params)

    def reshard(self) -> None:
        """See :meth:`YaFSDPParamGroup.reshard`."""
        was_unsharded = self.sharded_state is ShardedState.UNSHARDED
        super().reshard()
        if was_unsharded:
            self._param.free_unsharded_param([output.untyped_storage() for output in self._outputs])

    def reshard_to_neighbours(self) -> None:
        """Reshards to all ranks: what a smaller group would keep are the hooks' tensors, whose parts mean nothing."""
        self.reshard()

    def adopt_parameters(self, resolve: Callable[[torch.dtype], ResolvedDtypes]) -> None:
        """See :meth:`YaFSDPParamGroup.adopt_parameters`."""
        self.reshard()
        param = self._param
        param.adopt()
        local = param.sharded_param._local_tensor  # type: ignore[attr-defined]
        found = data_of(local)
        if len(found) == len(self._data) == 1:  # a class that does not survive a move is put around its data again
            found = dict(zip(self._data, found.values(), strict=True))
        if found.keys() != self._data.keys():
            raise RuntimeError(
                f"{param.name}: expected a slice with {sorted(self._data)}, as when it was sharded, got {sorted(found)}"
            )
        if all(_is_start_of(data, self._data[name]) for name, data in found.items()):
            return
        for name, data in found.items():
            self._data[name] = allocate_shard(self.layout.shard_numel, data.dtype, data.device, self.offload)
            self._data[name][: data.numel()].copy_(data)
        numel = next(iter(found.values())).numel()
        slices = {name: data[:numel] for name, data in self._data.items()}
        param.sharded_param._local_tensor = with_data(self._like, slices)  # type: ignore[attr-defined]
        self.shard = next(iter(self._data.values()))
        self.dtypes = resolve(self.shard.dtype)
        if not self.is_offloaded:
            self.device = self.shard.device
        self._buffer, self._switch, param.unsharded_param, self._nbytes = None, None, None, 0

    def _row_shape(self) -> tuple[int, ...]:
        rest = self._param.shape[1:]
        return (self.layout.shard_numel // max(1, rest.numel()), *rest)

    def _rows(self) -> Any:
        """This rank's rows as the parameter's class, with what is attached to it now."""
        local = self._param.sharded_param._local_tensor  # type: ignore[attr-defined]
        rows = with_data(local, {name: data.view(self._row_shape()) for name, data in self._data.items()})
        return rows.to(self.device, non_blocking=True) if self.is_offloaded else rows

    def _fit_buffer(self, pieces: Sequence[torch.Tensor]) -> None:
        sizes = [piece.size() for piece in pieces]
        if not self._nbytes:
            world_size = self.mesh.shard.world_size
            lengths = [round_up(world_size * as_bytes(piece).numel(), _ALIGNMENT) for piece in pieces]
            self._sizes, self._nbytes = sizes, max(sum(lengths), 1)
            self.home = self._comm.pool.own(self._nbytes)
            self._places = [(p.dtype, n, p.numel() * world_size) for p, n in zip(pieces, lengths, strict=True)]
        if sizes != self._sizes:
            raise RuntimeError(
                f"{self._param.name}: fsdp_pre_all_gather returned tensors of sizes {[tuple(s) for s in sizes]} and "
                f"before that {[tuple(s) for s in self._sizes]}; a parameter is gathered into one place at every step"
            )

    def _bind(self, flat: torch.Tensor) -> None:
        self._wire = flat
        self._outputs, start = [], 0
        for dtype, length, numel in self._places:
            part = flat[start : start + numel * dtype.itemsize]
            self._outputs.append(part.view(dtype).data)
            start += length


def _is_start_of(data: torch.Tensor, rows: torch.Tensor) -> bool:
    same_kind = data.dtype == rows.dtype and data.device == rows.device
    return same_kind and (not data.numel() or data.data_ptr() == rows.data_ptr())


def as_bytes(piece: torch.Tensor) -> torch.Tensor:
    """A tensor's elements as bytes, flat."""
    return piece.contiguous().view(-1).view(torch.uint8)
