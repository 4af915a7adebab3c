"""What all units of one root share for communication: streams, buffers, the reduction in flight, the order of units."""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from ya_fsdp.comm import Collectives, Pending, Reduction
from ya_fsdp.runtime.buffer_plan import plan_buffers
from ya_fsdp.runtime.buffers import BufferPool
from ya_fsdp.runtime.device import DeviceRuntime
from ya_fsdp.runtime.schedule import ForwardOrder, PostForwardOrder

__all__ = ["YaFSDPCommContext"]


class YaFSDPCommContext:
    """Streams, buffers and the reduction in flight of one root.

    Args:
        runtime: Streams of the device.
    """

    def __init__(self, runtime: DeviceRuntime) -> None:
        self.runtime = runtime
        self.pool = BufferPool(plan_buffers([]), runtime)
        self.forward_order: ForwardOrder[Any] = ForwardOrder()
        self.post_forward_order: PostForwardOrder[Any] = PostForwardOrder()
        self._reduction: Callable[[], None] | None = None

    def reduce_scatter(
        self, collectives: Collectives, output: torch.Tensor, staging: torch.Tensor, reduction: Reduction
    ) -> Pending:
        """Starts a reduce-scatter behind everything issued so far on the current stream."""
        runtime = self.runtime
        start = partial(collectives.reduce_scatter, output, staging, reduction, async_op=runtime.is_async_host)
        written = None if runtime.is_async_host else runtime.record()
        return runtime.issue(runtime.reduce_stream, written, start, staging)

    def defer_reduction(self, finish: Callable[[], None]) -> None:
        """Keeps the last step of a reduction for later; at most one is in flight."""
        assert self._reduction is None
        self._reduction = finish

    def finish_reduction(self) -> None:
        """Completes the reduction in flight, if there is one."""
        finish, self._reduction = self._reduction, None
        if finish is not None:
            finish()

    def reset(self) -> None:
        """Forgets the iteration under way (after an exception in the middle of it)."""
        if not self.runtime.is_async_host:
            self.finish_reduction()  # its memory must not be freed under the reduce stream
        self._reduction = None
        self.forward_order.abandon()
        self.post_forward_order.clear()
