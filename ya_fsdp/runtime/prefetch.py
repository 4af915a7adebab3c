"""Which units a unit gathers ahead of themselves: those that the user has listed, or the one that comes next."""

import operator
import weakref
from collections.abc import Sequence
from typing import Protocol

from ya_fsdp.runtime.comm_context import YaFSDPCommContext

__all__ = ["Prefetch", "PrefetchUnit"]


class PrefetchUnit(Protocol):
    """A unit that may be gathered ahead."""

    def gathers_in_backward(self) -> bool:
        """Whether the unit's backward reads its parameters."""

    def wants_gather(self) -> bool:
        """Whether the unit's backward reads parameters that are not gathered."""

    def gather_ahead(self) -> None:
        """Starts the unit's gathers if its buffers are free."""


_WANTS_GATHER = operator.methodcaller("wants_gather")
Units = list[weakref.ref[PrefetchUnit]]


class Prefetch:
    """What one unit gathers ahead. Holds units weakly."""

    def __init__(self) -> None:
        self._forward: Units | None = None
        self._backward: Units | None = None

    @property
    def reach(self) -> int:
        """Length of the longer list."""
        return max(len(self._forward or ()), len(self._backward or ()))

    def fix(
        self, *, forward: Sequence[PrefetchUnit] | None = None, backward: Sequence[PrefetchUnit] | None = None
    ) -> None:
        """Fixes which units are gathered ahead in the forward or the backward; None: as before."""
        if forward is not None:
            self._forward = [weakref.ref(unit) for unit in forward]
        if backward is not None:
            self._backward = [weakref.ref(unit) for unit in backward]

    def in_forward(self, unit: PrefetchUnit, comm: YaFSDPCommContext) -> None:
        """Gathers ahead when the forward has come to the unit; the order of the last forward says what comes next."""
        if self._forward is None:
            following = comm.forward_order.next_after(unit)
            if following is not None:
                following.gather_ahead()
            return
        for ref in self._forward:
            if (target := ref()) is not None:
                target.gather_ahead()

    def in_backward(self, unit: PrefetchUnit, comm: YaFSDPCommContext) -> None:
        """Gathers ahead when the backward has come to the unit; the order of this forward says what comes next."""
        previous = comm.post_forward_order.previous(unit, _WANTS_GATHER)
        if self._backward is None:
            if previous is not None:
                previous.gather_ahead()
            return
        for ref in self._backward:
            if (target := ref()) is not None and target.gathers_in_backward():
                target.gather_ahead()
