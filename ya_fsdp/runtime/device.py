"""Streams and events, with one code path for accelerators and CPU.

On an accelerator, gathers and reductions run on streams of their own and events order them against compute. Every
tensor is allocated on the compute stream and a side stream starts only behind an event of that stream, so memory needs
no ``record_stream`` and returns to the allocator in order. On CPU there are no streams: collectives are issued
asynchronously and are waited for through their work handles.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Protocol

import torch

from ya_fsdp.comm import Pending

__all__ = ["DeviceRuntime", "Event", "InFlight"]


class Event(Protocol):
    """A point in a stream's work."""

    def wait(self, stream: Any = None) -> object:
        """Makes a stream wait until the point is reached."""


class InFlight:
    """A collective on a side stream (accelerator) or in the background (CPU), and what it must keep alive."""

    __slots__ = ("_done", "_keep", "_runtime", "_work")

    def __init__(
        self, runtime: "DeviceRuntime", work: Pending | None, done: Event | None, keep: tuple[torch.Tensor, ...]
    ) -> None:
        self._runtime = runtime
        self._work = work
        self._done = done
        self._keep = keep

    def wait(self) -> None:
        """Lets the current stream (accelerator) or the host (CPU) go on only behind the collective."""
        if self._done is not None:
            self._runtime.wait(self._done)
        elif self._work is not None:
            self._work.wait()
            self._work = None
        # What the collective reads came from the compute stream, which is behind the collective from here on.
        self._keep = ()


class DeviceRuntime:
    """The streams on which one root's units gather, compute and reduce.

    Args:
        device: Where shards and buffers live.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.is_async_host = device.type == "cpu"
        """Collectives return work handles that the host waits for (CPU)."""
        self._module: Any = torch.get_device_module(device)
        # High priority: a collective that is ready should not queue behind compute kernels.
        self.gather_stream: Any = None if self.is_async_host else self._module.Stream(priority=-1)
        self.reduce_stream: Any = None if self.is_async_host else self._module.Stream(priority=-1)

    def record(self) -> Event | None:
        """Event behind everything issued so far on the current stream."""
        if self.is_async_host:
            return None
        event = self._module.Event()
        event.record(self._module.current_stream())
        return event  # type: ignore[no-any-return]

    def wait(self, event: Event | None) -> None:
        """Makes the current stream wait for an event."""
        if event is not None:
            self._module.current_stream().wait_event(event)

    def synchronise(self) -> None:
        """Makes the host wait for the current stream."""
        if not self.is_async_host:
            self._module.current_stream().synchronize()

    def on(self, stream: Any) -> AbstractContextManager[object]:
        """Issues work on ``stream`` while the context is open."""
        return nullcontext() if self.is_async_host else self._module.stream(stream)

    def issue(
        self, stream: Any, behind: Event | None, start: Callable[[], Pending | None], *keep: torch.Tensor
    ) -> Pending:
        """Starts a collective.

        Args:
            stream: Where, on an accelerator.
            behind: Event that it must not run ahead of.
            start: Starts it.
            keep: What has to live until it is through.
        """
        if self.is_async_host:
            work = start()
            return work if work is not None and not keep else InFlight(self, work, None, keep)
        with self._module.stream(stream):
            self.wait(behind)
            start()
            return InFlight(self, None, self.record(), keep)
