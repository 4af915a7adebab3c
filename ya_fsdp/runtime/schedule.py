"""Which unit to gather ahead: decisions from the order in which units ran."""

import weakref
from collections.abc import Callable
from typing import Generic, TypeVar

__all__ = ["ForwardOrder", "PostForwardOrder"]

T = TypeVar("T")


class ForwardOrder(Generic[T]):
    """Remembers the order of one forward to tell, in the next, which unit follows. Holds units weakly."""

    def __init__(self) -> None:
        self._current: list[weakref.ref[T]] = []
        self._successor: dict[int, weakref.ref[T]] = {}

    def record(self, unit: T) -> None:
        """Notes that a unit's forward starts."""
        self._current.append(weakref.ref(unit))

    def end(self) -> None:
        """Ends the forward: its order is the forecast for the next one.

        A unit that ran several times is followed by what came after its last run.
        """
        self._successor = {id(a()): b for a, b in zip(self._current, self._current[1:], strict=False)}
        self._current = []

    def abandon(self) -> None:
        """Forgets a forward that broke off."""
        self._current = []

    def next_after(self, unit: T) -> T | None:
        """Unit that followed ``unit`` in the last forward."""
        successor = self._successor.get(id(unit))
        return successor() if successor is not None else None


class PostForwardOrder(Generic[T]):
    """The order in which forwards ended; the backward runs through it from the end. Holds units weakly."""

    def __init__(self) -> None:
        self._order: list[weakref.ref[T] | None] = []
        self._places: dict[int, list[int]] = {}

    def record(self, unit: T) -> None:
        """Notes that a unit's forward has ended."""
        self._places.setdefault(id(unit), []).append(len(self._order))
        self._order.append(weakref.ref(unit))

    def previous(self, unit: T, wanted: Callable[[T], bool]) -> T | None:
        """Takes back a unit's last forward and returns the nearest one before it that is ``wanted``."""
        places = self._places.get(id(unit))
        if not places:
            return None
        own = places.pop()
        self._order[own] = None  # a later backward, of another micro-batch, does not come by here again
        for place in range(own - 1, -1, -1):
            entry = self._order[place]
            candidate = entry() if entry is not None else None
            if candidate is not None and wanted(candidate):
                return candidate
        return None

    def clear(self) -> None:
        """Forgets everything, at the end of a backward."""
        self._order.clear()
        self._places.clear()
