"""Memory that gathered parameters live in.

A :class:`Buffer` is one storage that is never replaced, only resized, because autograd's saved tensors point into it.
"""

import weakref
from typing import Protocol

import torch

from ya_fsdp.runtime.buffer_plan import BufferPlan
from ya_fsdp.runtime.debug import DEBUG, poison
from ya_fsdp.runtime.device import DeviceRuntime, Event

__all__ = ["Buffer", "BufferPool", "Tenant"]


class Tenant(Protocol):
    """Whoever gathers into a buffer."""

    @property
    def name(self) -> str:
        """Name for messages."""

    def yield_buffer(self) -> bool:
        """Leaves the buffer if it is not in use; says whether the buffer is free now."""

    def allocate(self, nbytes: int) -> torch.Tensor | None:
        """Memory that the tenant's collectives insist on, as bytes; None if any will do."""


class Buffer:
    """One storage of fixed identity.

    Args:
        nbytes: Size while allocated.
        runtime: Device to allocate on.
        is_shared: Stays allocated between tenants, rather than only while it is occupied.
    """

    def __init__(self, nbytes: int, runtime: DeviceRuntime, *, is_shared: bool) -> None:
        self.nbytes = nbytes
        self.is_shared = is_shared
        self._runtime = runtime
        self._bytes: torch.Tensor | None = None
        self.is_occupied = False
        """A tenant is in, or was never seen leaving."""
        self._is_allocated = False
        self._is_lent = False
        """The memory belongs to a communication backend, so it is kept at its size."""
        self._tenant: weakref.ref[Tenant] | None = None
        self._vacated: Event | None = None

    @property
    def tenant(self) -> Tenant | None:
        """Who occupies the buffer now."""
        return self._tenant() if self._tenant is not None else None

    @property
    def live_nbytes(self) -> int:
        """Bytes allocated at this moment."""
        return 0 if self._bytes is None else self._bytes.untyped_storage().nbytes()

    def occupy(self, tenant: Tenant) -> tuple[torch.Tensor, Event | None]:
        """Gives the memory to ``tenant``.

        Returns:
            The whole buffer as bytes, and the event behind which it may be written. Shapes: ``[nbytes]``.
        """
        assert not self.is_occupied or self.tenant is None, f"{tenant.name} was given {self.tenant}'s buffer"
        self.is_occupied, self._tenant = True, weakref.ref(tenant)
        fresh = not self._is_allocated
        self._is_allocated = True
        if self._bytes is None:
            self._bytes = tenant.allocate(self.nbytes)
            self._is_lent = self._bytes is not None
            if self._bytes is None:
                self._bytes = torch.empty(self.nbytes, dtype=torch.uint8, device=self._runtime.device)
        elif fresh:
            self._bytes.untyped_storage().resize_(self.nbytes)
        # Fresh memory may still be read by earlier work of the compute stream, which is where it came from.
        return self._bytes, self._runtime.record() if fresh else self._vacated

    def vacate(self) -> None:
        """Takes the memory back from its tenant, behind the work that the current stream has been given."""
        self.is_occupied, self._tenant = False, None
        if DEBUG.is_on and self._bytes is not None:
            poison(self._bytes.untyped_storage())
            self._vacated = self._runtime.record()
        elif not (self.is_shared or self._is_lent):
            self.free()
        elif not self._runtime.is_async_host:
            self._vacated = self._runtime.record()

    def free(self) -> None:
        """Returns the memory to the allocator; views of it stay valid for the next time that it is occupied."""
        assert self._tenant is None
        if self._is_allocated and self._bytes is not None and not self._is_lent:
            self._is_allocated = False
            self._bytes.untyped_storage().resize_(0)


class BufferPool:
    """The shared buffers of a root and the plan that assigns them.

    Args:
        plan: Assignment, by the buckets' order.
        runtime: Device to allocate on.
    """

    def __init__(self, plan: BufferPlan, runtime: DeviceRuntime) -> None:
        self.plan = plan
        self.shared = [Buffer(nbytes, runtime, is_shared=True) for nbytes in plan.shared_nbytes]
        self._runtime = runtime

    def home(self, index: int, nbytes: int) -> Buffer:
        """Buffer that the plan gives to bucket ``index``, of ``nbytes`` bytes."""
        assigned = self.plan.assignments[index]
        return self.own(nbytes) if assigned is None else self.shared[assigned]

    def own(self, nbytes: int) -> Buffer:
        """A buffer for one bucket alone."""
        return Buffer(nbytes, self._runtime, is_shared=False)

    def free_idle(self) -> None:
        """Frees shared buffers that nobody occupies."""
        for buffer in self.shared:
            if buffer.tenant is None:
                buffer.free()
