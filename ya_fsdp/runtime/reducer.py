"""``GradientReducer``: from the gradients that autograd left to the gradients of a bucket's sharded parameters."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from ya_fsdp._torch_compat import AsyncCollectiveTensor, DTensor, new_dtensor
from ya_fsdp.comm import Pending, Reduction, plan_reduction
from ya_fsdp.layout import FlatLayout
from ya_fsdp.policy import ResolvedDtypes
from ya_fsdp.ragged import RaggedShardDTensor
from ya_fsdp.runtime.comm_context import YaFSDPCommContext
from ya_fsdp.runtime.gradients import GradientStager, member_views
from ya_fsdp.runtime.mesh import ShardMesh
from ya_fsdp.runtime.param import YaFSDPParam
from ya_fsdp.runtime.settings import UnitSettings

__all__ = ["MAX_STAGING_BYTES", "GradientReducer"]

MAX_STAGING_BYTES = 160 * 2**20
"""A bucket whose reduction input is larger is reduced in column chunks of half this size, two in flight."""


def _local_gradient(grad: DTensor, param: nn.Parameter) -> torch.Tensor:
    """The gradient of a rank's block of a DTensor; partial sums over model-parallel ranks are added up first."""
    with torch.no_grad():
        local = grad.redistribute(placements=param._spec.placements).to_local()  # type: ignore[attr-defined]
        return local.wait() if isinstance(local, AsyncCollectiveTensor) else local


class GradientReducer:
    """Takes, keeps and reduces the gradients of one bucket.

    Args:
        params: The bucket's parameters, in layout order.
        layout: Where they lie.
        mesh: Mesh whose ranks are averaged.
        settings: The unit's switches.

    Attributes:
        missing: Reduced gradients of parameters that got none on this rank, by index: kept until it is known whether
            another rank had one.
        has_reduced: A reduction was started in the current backward.
    """

    def __init__(
        self, params: Sequence[YaFSDPParam], layout: FlatLayout, mesh: ShardMesh, settings: UnitSettings
    ) -> None:
        self.missing: list[tuple[int, torch.Tensor]] = []
        self.has_reduced = False
        self._params = params
        self._layout = layout
        self._mesh = mesh
        self._settings = settings
        self._local_partition = layout.local_partition(mesh.shard.rank)
        self._contributed = [False] * len(params)
        self._accumulated: torch.Tensor | None = None
        self._partial_shard: torch.Tensor | None = None
        self._stagers: dict[torch.dtype, GradientStager] = {}

    def take(self) -> list[torch.Tensor | None] | None:
        """Takes what autograd left at the unsharded parameters; None if that is nothing.

        Raises:
            RuntimeError: If a gradient is sparse.
        """
        grads: list[torch.Tensor | None] = []
        is_empty = True
        for index, param in enumerate(self._params):
            full = param.unsharded_param
            grad = full.grad if full is not None else None
            if full is not None and grad is not None:
                full.grad = None
                is_empty, self._contributed[index] = False, True
                if param.parallel is not None and isinstance(grad, DTensor):
                    grad = _local_gradient(grad, full)
                if grad.is_sparse:
                    raise RuntimeError(
                        f"{param.name}: got a sparse gradient, which cannot be reduced into shards; build the "
                        f"embedding with sparse=False"
                    )
            grads.append(grad)
        return None if is_empty else grads

    def reduce(
        self,
        grads: list[torch.Tensor | None] | None,
        comm: YaFSDPCommContext,
        dtypes: ResolvedDtypes,
        device: torch.device,
        shard: torch.Tensor,
    ) -> None:
        """Reduces gradients, or adds them up until they are wanted.

        Args:
            grads: What :meth:`take` has taken.
            comm: What to communicate through.
            dtypes: Dtypes of the bucket.
            device: Where gradients are and are reduced.
            shard: The bucket's shard; its gradient lives where it does, in host memory if shards are offloaded.
        """
        if grads is None:
            grads = [None] * len(self._params)
        if not self._settings.requires_gradient_sync:
            self._accumulate(grads, dtypes.accumulate, device)
            return
        if self._accumulated is not None:
            self._accumulate(grads, dtypes.accumulate, device)
        self.has_reduced = True
        comm.finish_reduction()
        output = torch.empty(self._layout.shard_numel, dtype=dtypes.accumulate, device=device)
        result = output
        if shard.device != device:
            # Pinned memory, so that the copy runs beside compute, comes from torch's cache of it.
            pinned = shard.is_pinned()
            result = torch.empty(output.shape, dtype=dtypes.master, device=shard.device, pin_memory=pinned)
        elif dtypes.accumulate != dtypes.master:
            result = torch.empty_like(output, dtype=dtypes.master)
        reduction = plan_reduction(
            self._mesh.num_ranks,
            dtypes.reduce,
            divide_factor=self._settings.gradient_divide_factor,
            force_sum=self._settings.force_sum_reduction,
        )
        flights = self._start(comm, grads, output, reduction, dtypes.reduce)
        self._finish(comm, flights, output, result, reduction)

    def has_gradients(self) -> bool:
        """Whether autograd left a gradient that has been neither reduced nor kept."""
        for param in self._params:  # a loop, since a generator would take as many calls as there are parameters
            if param.unsharded_param is not None and param.unsharded_param.grad is not None:
                return True
        return False

    def assign_missing(self, index: int, view: torch.Tensor) -> None:
        """Gives a parameter without a gradient of its own the average of the other ranks'."""
        param = self._params[index].sharded_param
        if param.grad is None:
            param.grad = RaggedShardDTensor.wrap(view, param._spec)  # type: ignore[attr-defined]
        else:
            param.grad._local_tensor.add_(view)  # type: ignore[attr-defined]

    def reset(self) -> None:
        """Drops everything that a broken backward left."""
        for param in self._params:
            if param.unsharded_param is not None:
                param.unsharded_param.grad = None
        self._accumulated = self._partial_shard = None
        self._contributed = [False] * len(self._params)
        self.missing.clear()
        self.has_reduced = False

    def local_views(self, shard: torch.Tensor) -> Sequence[torch.Tensor]:
        """The parameters' parts of a flat shard. Shapes: ``[local numel]`` each."""
        return member_views(shard, self._local_partition)

    # ---- before the collective -----------------------------------------------------------------------------------

    def _accumulate(self, grads: list[torch.Tensor | None], dtype: torch.dtype, device: torch.device) -> None:
        """Adds gradients up in the dtype of the reduction, in what will be its input."""
        if all(grad is None for grad in grads):
            return
        if self._accumulated is None:
            self._accumulated = torch.zeros(self._layout.padded_numel, dtype=dtype, device=device)
        views = member_views(self._accumulated, self._layout.partition)
        pairs = [(view, grad.reshape(-1)) for view, grad in zip(views, grads, strict=True) if grad is not None]
        targets, sources = zip(*pairs, strict=True)
        torch._foreach_add_(targets, sources)

    def _start(
        self,
        comm: YaFSDPCommContext,
        grads: list[torch.Tensor | None],
        output: torch.Tensor,
        reduction: Reduction,
        dtype: torch.dtype,
    ) -> list[Pending]:
        accumulated, self._accumulated = self._accumulated, None
        if accumulated is not None:
            if reduction.pre_scale != 1.0:
                accumulated.mul_(reduction.pre_scale)
            return [comm.reduce_scatter(self._mesh.shard, output, accumulated.to(dtype), reduction)]
        flights: list[Pending] = []
        stager = self._stagers.get(dtype) or self._new_stager(dtype)
        for index, chunk in enumerate(stager.chunks):
            if index > 1:
                flights[index - 2].wait()  # two staging tensors at a time
            staging = stager.stage(index, grads, dtype, output.device)
            if reduction.pre_scale != 1.0:
                staging.mul_(reduction.pre_scale)
            part = output if len(stager.chunks) == 1 else output[chunk.first : chunk.stop]
            flights.append(comm.reduce_scatter(self._mesh.shard, part, staging, reduction))
        return flights

    def _new_stager(self, dtype: torch.dtype) -> GradientStager:
        max_numel = MAX_STAGING_BYTES // dtype.itemsize
        if self._layout.padded_numel > max_numel:
            max_numel //= 2
        self._stagers = {dtype: GradientStager(self._layout, max_numel)}
        return self._stagers[dtype]

    # ---- behind the collective -----------------------------------------------------------------------------------

    def _finish(
        self,
        comm: YaFSDPCommContext,
        flights: list[Pending],
        output: torch.Tensor,
        result: torch.Tensor,
        reduction: Reduction,
    ) -> None:
        """On an accelerator the rest is queued behind the collective; on CPU it is left until somebody waits."""
        runtime = comm.runtime
        contributed, self._contributed = self._contributed, [False] * len(self._params)

        def complete() -> None:
            for flight in flights:
                flight.wait()
            self._complete(output, result, reduction, contributed)

        if runtime.is_async_host:
            comm.defer_reduction(complete)
            return
        # Memory of the compute stream that the reduce stream still uses must not be freed before the two have met.
        keep = [output, result, self._partial_shard]
        with runtime.on(runtime.reduce_stream):
            self._complete(output, result, reduction, contributed)
            done = runtime.record()

        def join() -> None:
            for flight in flights:
                flight.wait()
            runtime.wait(done)
            keep.clear()

        comm.defer_reduction(join)

    def _complete(
        self, output: torch.Tensor, result: torch.Tensor, reduction: Reduction, contributed: list[bool]
    ) -> None:
        """All-reduces over replicas, scales, casts, and hands the flat gradient shard to the parameters."""
        replicate = self._mesh.replicate
        if replicate is not None:
            if self._partial_shard is not None:
                output.add_(self._partial_shard)
                self._partial_shard = None
            if not self._settings.requires_all_reduce:
                self._partial_shard = output
                self._contributed = [a or b for a, b in zip(self._contributed, contributed, strict=True)]
                return
            replicate.all_reduce(output, reduction, async_op=False)
        if reduction.post_scale != 1.0:
            output.mul_(reduction.post_scale)
        if result is not output:
            # Gradients in host memory are added up by the host, which must not run ahead of the copy.
            is_first = all(param.sharded_param.grad is None for param in self._params)
            result.copy_(output, non_blocking=is_first)
        self._assign(result, contributed)

    def _assign(self, flat: torch.Tensor, contributed: list[bool]) -> None:
        sums: tuple[list[torch.Tensor], list[torch.Tensor]] = ([], [])
        wrap = new_dtensor
        for index, view in enumerate(member_views(flat, self._local_partition)):
            sharded: Any = self._params[index].sharded_param
            if not contributed[index]:
                if sharded.requires_grad:
                    self.missing.append((index, view))
                continue
            before = sharded.grad
            if before is None:
                sharded.grad = wrap(RaggedShardDTensor, view, sharded._spec, requires_grad=False)
            else:
                sums[0].append(before._local_tensor)
                sums[1].append(view)
        if sums[0]:
            torch._foreach_add_(*sums)
