"""What all units of one root share for communication: streams, buffers, the reduction in flight, the order of units."""

from collections.abc import Callable
from typing import Any

import torch

from ya_fsdp.comm import Collectives, Pending, Reduction
from ya_fsdp.runtime.buffer_plan import plan_buffers
from ya_fsdp.runtime.buffers import BufferPool
from ya_fsdp.runtime.device import DeviceRuntime, Event
from ya_fsdp.runtime.schedule import ForwardOrder, PostForwardOrder

__all__ = ["InFlight", "YaFSDPCommContext"]


class InFlight:
    """A collective on a side stream (accelerator) or in the background (CPU), and what it must keep alive."""

    __slots__ = ("_done", "_keep", "_runtime", "_work")

    def __init__(self, work: Pending | None, done: Event | None, runtime: DeviceRuntime, *keep: torch.Tensor) -> None:
        self._work = work if runtime.is_async_host else None
        self._done = done
        self._runtime = runtime
        self._keep = keep

    def wait(self) -> None:
        """Lets the current stream (accelerator) or the host (CPU) go on only behind the collective."""
        if self._work is not None:
            self._work.wait()
            self._work = None
        self._runtime.wait(self._done)
        # What the collective reads came from the compute stream, which is behind the collective from here on.
        self._keep = ()


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
    ) -> InFlight:
        """Starts a reduce-scatter behind everything issued so far on the current stream."""
        runtime = self.runtime
        ready = runtime.record()
        with runtime.on(runtime.reduce_stream):
            runtime.wait(ready)
            work = collectives.reduce_scatter(output, staging, reduction, async_op=runtime.is_async_host)
            return InFlight(work, runtime.record(), runtime, staging)

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
