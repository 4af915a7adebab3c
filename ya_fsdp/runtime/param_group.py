"""``YaFSDPParamGroup``: one bucket of a unit, that is its parameters of one mesh, one dtype and one trainability.

The bucket owns a flat shard of master weights. :meth:`YaFSDPParamGroup.gather` fills a buffer of which the unsharded
parameters are views; :meth:`YaFSDPParamGroup.post_backward` gives the buffer back and reduces the gradients into a flat
gradient shard of which every parameter's ``.grad`` is a view.
"""

from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import Any

import torch

from ya_fsdp._common import ShardedState, TrainingState
from ya_fsdp.comm import Reduction, plan_reduction
from ya_fsdp.layout import FlatLayout
from ya_fsdp.policy import ResolvedDtypes
from ya_fsdp.ragged import RaggedShardDTensor
from ya_fsdp.runtime.buffers import Buffer
from ya_fsdp.runtime.comm_context import InFlight, YaFSDPCommContext
from ya_fsdp.runtime.gradients import GradientStager
from ya_fsdp.runtime.hooks import watch_inputs
from ya_fsdp.runtime.mesh import ShardMesh
from ya_fsdp.runtime.param import YaFSDPParam

__all__ = ["MAX_STAGING_BYTES", "UnitPhase", "UnitSettings", "YaFSDPParamGroup"]

MAX_STAGING_BYTES = 256 * 2**20
"""A bucket whose reduction input is larger is reduced in column chunks of half this size, two in flight."""


@dataclass
class UnitSettings:
    """What the user may switch on a unit between iterations."""

    reshard_after_forward: bool = True
    reshard_after_backward: bool = True
    unshard_in_backward: bool = True
    requires_gradient_sync: bool = True
    requires_all_reduce: bool = True
    gradient_divide_factor: float | None = None
    force_sum_reduction: bool = False


@dataclass
class UnitPhase:
    """Where a unit is in its step; written by the unit and its own buckets only."""

    training_state: TrainingState = TrainingState.IDLE


class YaFSDPParamGroup:
    """One bucket of a unit.

    Args:
        kind: Equal for buckets that are repetitions of one another; see the buffer plan.
        params: The parameters, in layout order; their sharded forms view ``shard``.
        layout: Where they lie.
        shard: This rank's master weights. Shapes: ``[layout.shard_numel]``.
        mesh: Mesh to shard over.
        dtypes: Dtypes of all parameters of the bucket.
        settings: The unit's switches.
        phase: The unit's place in its step.
    """

    def __init__(
        self,
        kind: Hashable,
        params: list[YaFSDPParam],
        layout: FlatLayout,
        shard: torch.Tensor,
        mesh: ShardMesh,
        dtypes: ResolvedDtypes,
        settings: UnitSettings,
        phase: UnitPhase,
    ) -> None:
        self.kind = kind
        self.params = params
        self.layout = layout
        self.shard = shard
        self.mesh = mesh
        self.dtypes = dtypes
        self.settings = settings
        self.phase = phase
        self.sharded_state = ShardedState.SHARDED
        self.open_forwards = 0
        """Forwards whose backward has not passed the unit's inputs yet."""
        self.contributed = [False] * len(params)
        """Which parameters got a gradient on this rank since the last reduction."""
        self.missing: list[tuple[int, torch.Tensor]] = []
        """Reduced gradients of parameters that got none on this rank: kept only if another rank had one."""
        self.is_reduced = False
        """A reduction was started in the current backward."""
        self._local_partition = layout.local_partition(mesh.shard.rank)
        self._comm: YaFSDPCommContext | None = None
        self._buffer: Buffer | None = None
        self._home: Buffer | None = None
        self._wire: torch.Tensor | None = None
        self._gather: InFlight | None = None
        self._accumulated: torch.Tensor | None = None
        self._partial_shard: torch.Tensor | None = None
        max_numel = MAX_STAGING_BYTES // dtypes.reduce.itemsize
        if layout.padded_numel > max_numel:
            max_numel //= 2
        self._stager = GradientStager(layout, max_numel)

    @property
    def name(self) -> str:
        """Name for messages: the bucket's first parameter."""
        return f"the bucket of {self.params[0].name}"

    @property
    def gathered_nbytes(self) -> int:
        """Bytes of the gathered bucket, padding included."""
        return self.layout.padded_numel * self.dtypes.compute.itemsize

    @property
    def is_trainable(self) -> bool:
        """Whether any parameter wants a gradient."""
        return any(param.sharded_param.requires_grad for param in self.params)

    @property
    def buffers(self) -> list[Buffer]:
        """Gather buffers that the bucket uses."""
        return [buffer for buffer in (self._home, self._buffer) if buffer is not None]

    def attach(self, comm: YaFSDPCommContext, home: Buffer) -> None:
        """Joins a root: what to communicate through and where to gather to."""
        assert self.sharded_state is ShardedState.SHARDED
        self._comm = comm
        self._home = home

    # ---- gather ------------------------------------------------------------------------------------------------------

    def can_gather(self) -> bool:
        """Whether the bucket's buffer is free, so that a prefetch does not get in anybody's way."""
        return self._home is not None and self._home.tenant is None

    def gather(self) -> None:
        """Starts the all-gather into the bucket's buffer; does nothing if that has happened already."""
        if self.sharded_state is not ShardedState.SHARDED:
            return
        wire, free = self._occupy()
        runtime, shard = self._context.runtime, self.mesh.shard
        with runtime.on(runtime.gather_stream):
            runtime.wait(free)
            piece = self.shard
            if wire.dtype != piece.dtype:
                # The cast is written where the gather wants this rank's piece: no copy of the shard outlives it.
                numel = self.layout.shard_numel
                piece = wire[shard.rank * numel : (shard.rank + 1) * numel]
                piece.copy_(self.shard)
            work = shard.all_gather(wire, piece, async_op=runtime.is_async_host)
            self._gather = InFlight(work, runtime.record(), runtime)
        self.sharded_state = ShardedState.GATHERING

    def wait_for_gather(self) -> None:
        """Waits for the gather and shows the unsharded parameters in the modules."""
        if self.sharded_state is not ShardedState.GATHERING:
            return
        assert self._gather is not None
        self._gather.wait()
        self._gather = None
        for param in self.params:
            assert param.unsharded_param is not None
            if param.unsharded_param.requires_grad != param.sharded_param.requires_grad:
                param.unsharded_param.requires_grad_(param.sharded_param.requires_grad)
            param.to_unsharded()
        self.sharded_state = ShardedState.UNSHARDED

    def reshard(self) -> None:
        """Shows the sharded parameters again and gives the buffer back."""
        if self.sharded_state is ShardedState.SHARDED:
            return
        if self._gather is not None:  # gathered ahead of a forward or backward that did not come
            self._gather.wait()
            self._gather = None
        for param in self.params:
            param.to_sharded()
        self.sharded_state = ShardedState.SHARDED
        assert self._buffer is not None
        self._buffer.vacate()

    def _occupy(self) -> tuple[torch.Tensor, Any]:
        """Enters the buffer; moves to one of the bucket's own if the planned one is taken."""
        assert self._home is not None
        buffer = self._home
        if buffer.tenant is not None:
            if self.open_forwards:
                raise RuntimeError(
                    f"{self.name} and {buffer.tenant.name} need the same gather buffer at the same time, and the first "
                    f"has a forward whose backward is pending, so it cannot move. Keep one of the two units resharded, or call "
                    f"set_reshard_after_forward(False) on one of them before the first forward."
                )
            buffer = self._home = self._context.pool.own(self.gathered_nbytes)
        flat, free = buffer.occupy(self)
        if buffer is not self._buffer:
            self._bind(flat)
            self._buffer = buffer
        assert self._wire is not None
        return self._wire, free

    def _bind(self, flat: torch.Tensor) -> None:
        """Makes the wire tensor and the unsharded parameters views of a buffer, each with its own version counter."""
        typed = flat[: self.gathered_nbytes].view(self.dtypes.compute)
        self._wire = typed.data
        for param, part in zip(self.params, self._stager.views(typed.data), strict=True):
            param.init_unsharded_param(part)

    # ---- backward ----------------------------------------------------------------------------------------------------

    def _register_post_backward_hook(
        self, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Wraps the tensors among a forward's inputs that require gradients, so that their backward ends this unit's."""
        args, kwargs, found = watch_inputs(self, args, kwargs)
        if found:
            self.open_forwards += 1
        return args, kwargs

    def post_backward(self) -> None:
        """Reshards and, when the last open forward's backward has passed, reduces.

        Every rank reduces at the same place whether or not its own parameters got a gradient: the number of open
        forwards is the same on all ranks, gradients need not be.
        """
        self.phase.training_state = TrainingState.POST_BACKWARD
        self.open_forwards = max(0, self.open_forwards - 1)
        if self.settings.reshard_after_backward:
            self.reshard()
        if not self.open_forwards:
            self.reduce_gradients()

    def reduce_gradients(self) -> None:
        """Takes the gradients that autograd left on the unsharded parameters and reduces or keeps them."""
        if not self.is_trainable:
            return
        grads = self._take_gradients()
        if not self.settings.requires_gradient_sync:
            self._accumulate(grads)
            return
        if self._accumulated is not None:
            self._accumulate(grads)
        self.is_reduced = True
        self._reduce(grads)

    def has_gradients(self) -> bool:
        """Whether autograd left a gradient that has not been reduced or kept."""
        return any(p.unsharded_param is not None and p.unsharded_param.grad is not None for p in self.params)

    def _take_gradients(self) -> list[torch.Tensor | None]:
        grads: list[torch.Tensor | None] = []
        for index, param in enumerate(self.params):
            full = param.unsharded_param
            grad = full.grad if full is not None else None
            if grad is not None:
                assert full is not None
                full.grad = None
                self.contributed[index] = True
                if grad.is_sparse:
                    raise RuntimeError(
                        f"{param.name}: got a sparse gradient, which cannot be reduced into shards; build the embedding "
                        f"with sparse=False"
                    )
            grads.append(grad)
        return grads

    def _accumulate(self, grads: list[torch.Tensor | None]) -> None:
        """Adds gradients up in the dtype of the reduction, in what will be its input."""
        if self._accumulated is None:
            if not any(grad is not None for grad in grads):
                return
            self._accumulated = torch.zeros(
                self.layout.padded_numel, dtype=self.dtypes.reduce, device=self.shard.device
            )
        views = self._stager.views(self._accumulated)
        pairs = [(view, grad.reshape(-1)) for view, grad in zip(views, grads, strict=True) if grad is not None]
        if pairs:
            targets, sources = zip(*pairs, strict=True)
            torch._foreach_add_(targets, sources)

    def _reduce(self, grads: list[torch.Tensor | None]) -> None:
        comm = self._context
        comm.finish_reduction()
        reduction = self._plan_reduction()
        output = torch.empty(self.layout.shard_numel, dtype=self.dtypes.reduce, device=self.shard.device)
        needs_cast = self.dtypes.reduce != self.dtypes.master
        result = torch.empty_like(output, dtype=self.dtypes.master) if needs_cast else output
        flights: list[InFlight] = []
        accumulated, self._accumulated = self._accumulated, None
        if accumulated is not None:
            if reduction.pre_scale != 1.0:
                accumulated.mul_(reduction.pre_scale)
            flights.append(comm.reduce_scatter(self.mesh.shard, output, accumulated, reduction))
        else:
            for index, chunk in enumerate(self._stager.chunks):
                if len(flights) > 1:
                    flights.pop(0).wait()
                staging = torch.empty(
                    self.layout.world_size * chunk.width, dtype=self.dtypes.reduce, device=self.shard.device
                )
                self._stager.fill(staging, index, grads)
                if reduction.pre_scale != 1.0:
                    staging.mul_(reduction.pre_scale)
                part = output[chunk.first : chunk.stop]
                flights.append(comm.reduce_scatter(self.mesh.shard, part, staging, reduction))
        self._finish_on_reduce_stream(flights, output, result, reduction)

    def _finish_on_reduce_stream(
        self, flights: list[InFlight], output: torch.Tensor, result: torch.Tensor, reduction: Reduction
    ) -> None:
        """On an accelerator the rest is queued behind the collective; on CPU it is left until somebody waits."""
        comm, runtime = self._context, self._context.runtime
        contributed, self.contributed = self.contributed, [False] * len(self.params)

        def complete() -> None:
            for flight in flights:
                flight.wait()
            self._complete_reduction(output, result, reduction, contributed)

        if runtime.is_async_host:
            comm.defer_reduction(complete)
            return
        with runtime.on(runtime.reduce_stream):
            self._complete_reduction(output, result, reduction, contributed)
            done = runtime.record()

        def join() -> None:
            for flight in flights:
                flight.wait()
            runtime.wait(done)

        comm.defer_reduction(join)

    def _complete_reduction(
        self, output: torch.Tensor, result: torch.Tensor, reduction: Reduction, contributed: list[bool]
    ) -> None:
        """All-reduces over replicas, scales, casts, and hands the flat gradient shard to the parameters."""
        replicate = self.mesh.replicate
        if replicate is not None:
            if self._partial_shard is not None:
                output.add_(self._partial_shard)
                self._partial_shard = None
            if not self.settings.requires_all_reduce:
                self._partial_shard = output
                self.contributed = [a or b for a, b in zip(self.contributed, contributed, strict=True)]
                return
            replicate.all_reduce(output, reduction, async_op=False)
        if reduction.post_scale != 1.0:
            output.mul_(reduction.post_scale)
        if result is not output:
            result.copy_(output)
        self._assign_gradients(result, contributed)

    def _assign_gradients(self, flat: torch.Tensor, contributed: list[bool]) -> None:
        views = self._local_views(flat)
        sums: tuple[list[torch.Tensor], list[torch.Tensor]] = ([], [])
        for index, (param, view) in enumerate(zip(self.params, views, strict=True)):
            sharded = param.sharded_param
            if not contributed[index]:
                if sharded.requires_grad:
                    self.missing.append((index, view))
            elif sharded.grad is None:
                sharded.grad = RaggedShardDTensor.wrap(view, sharded._spec)  # type: ignore[attr-defined]
            else:
                sums[0].append(sharded.grad._local_tensor)  # type: ignore[attr-defined]
                sums[1].append(view)
        if sums[0]:
            torch._foreach_add_(*sums)

    def assign_missing(self, index: int, view: torch.Tensor) -> None:
        """Gives a parameter without a gradient of its own the average of the other ranks'."""
        param = self.params[index].sharded_param
        if param.grad is None:
            param.grad = RaggedShardDTensor.wrap(view, param._spec)  # type: ignore[attr-defined]
        else:
            param.grad._local_tensor.add_(view)  # type: ignore[attr-defined]

    def _plan_reduction(self) -> Reduction:
        settings = self.settings
        return plan_reduction(
            self.mesh.num_ranks,
            self.dtypes.reduce,
            divide_factor=settings.gradient_divide_factor,
            force_sum=settings.force_sum_reduction,
        )

    # ---- upkeep ------------------------------------------------------------------------------------------------------

    def reset(self) -> None:
        """Returns to rest after an exception: nothing gathered, no gradient half reduced or half accumulated."""
        self.reshard()
        for param in self.params:
            if param.unsharded_param is not None:
                param.unsharded_param.grad = None
        self._accumulated = self._partial_shard = None
        self.contributed = [False] * len(self.params)
        self.missing.clear()
        self.open_forwards = 0
        self.is_reduced = False

    def adopt_parameters(self, resolve: Callable[[torch.dtype], ResolvedDtypes]) -> None:
        """Takes over what became of the sharded parameters outside (moved, cast, or replaced by other slices).

        Args:
            resolve: Dtypes for a new master dtype.

        Raises:
            RuntimeError: If a module shows something that is not this bucket's slice of the parameter.
        """
        self.reshard()
        for param in self.params:
            param.adopt()
        locals_ = [p.sharded_param._local_tensor for p in self.params]  # type: ignore[attr-defined]
        first = locals_[0]
        views = self._local_views(self.shard)
        in_place = all(
            new.untyped_storage()._cdata == old.untyped_storage()._cdata
            and new.storage_offset() == old.storage_offset()
            and new.dtype == old.dtype
            for new, old in zip(locals_, views, strict=True)
        )
        if in_place:
            return
        if any(local.dtype != first.dtype or local.device != first.device for local in locals_):
            raise RuntimeError(
                f"{self.name}: its parameters were changed to different dtypes or devices, "
                f"{sorted({f'{local.dtype} on {local.device}' for local in locals_})}; change all of them alike"
            )
        shard = torch.zeros(self.layout.shard_numel, dtype=first.dtype, device=first.device)
        for param, local, view in zip(self.params, locals_, self._local_views(shard), strict=True):
            view.copy_(local)
            param.sharded_param._local_tensor = view  # type: ignore[attr-defined]
        self.shard, self.dtypes = shard, resolve(first.dtype)
        self._buffer = None  # the unsharded parameters are rebuilt at the next gather

    def _local_views(self, shard: torch.Tensor) -> list[torch.Tensor]:
        parts = shard.split_with_sizes(self._local_partition.sizes)
        return [part for part, is_member in zip(parts, self._local_partition.is_member, strict=True) if is_member]

    @property
    def _context(self) -> YaFSDPCommContext:
        assert self._comm is not None, f"{self.name} has not joined a root yet"
        return self._comm
