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
        self._order: list[weakref.ref[T]] = []

    def record(self, unit: T) -> None:
        """Notes that a unit's forward has ended."""
        self._order.append(weakref.ref(unit))

    def previous(self, unit: T, wanted: Callable[[T], bool]) -> T | None:
        """Takes back a unit's last forward and returns the nearest one before it that is ``wanted``."""
        order, place = self._order, len(self._order) - 1
        while place >= 0 and order[place]() is not unit:  # the last one, as a rule
            place -= 1
        if place < 0:
            return None
        del order[place]  # a later backward, of another micro-batch, does not come by here again
        for before in range(place - 1, -1, -1):
            candidate = order[before]()
            if candidate is not None and wanted(candidate):
                return candidate
        return None

    def clear(self) -> None:
        """Forgets everything, at the end of a backward."""
        self._order.clear()
