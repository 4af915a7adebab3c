"""A flat range of a tensor as N-dimensional boxes.

A rank's slice may start and end in the middle of a row. Checkpoints and reductions along a dimension want rectangles;
a range of an N-dimensional tensor falls into at most ``2 N - 1`` of them, each contiguous in the flat order::

    . . . # # #      first row, cut
    # # # # # #      full rows
    # # # # # #
    # # . . . .      last row, cut
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import prod

__all__ = ["Box", "boxes"]


@dataclass(frozen=True, slots=True)
class Box:
    """One rectangle. Units: elements.

    Attributes:
        offsets: Its first corner in the full tensor.
        sizes: Its extent.
        start: Where its elements begin, counted from the start of the flat range; they are contiguous from there.
    """

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    start: int

    @property
    def numel(self) -> int:
        """Number of elements."""
        return prod(self.sizes)

    def moved(self, corner: Sequence[int]) -> "Box":
        """The same box in a tensor of which the one it was cut from is a block that starts at ``corner``."""
        return Box(tuple(a + b for a, b in zip(self.offsets, corner, strict=True)), self.sizes, self.start)


def boxes(shape: Sequence[int], start: int, stop: int) -> tuple[Box, ...]:
    """Cuts the flat range ``[start, stop)`` of a tensor into boxes, in flat order.

    Args:
        shape: Shape of the full tensor.
        start: First element of the range in the flattened tensor.
        stop: First element behind it.

    Raises:
        ValueError: If the range leaves the tensor.
    """
    if not 0 <= start <= stop <= prod(shape):
        raise ValueError(f"the range [{start}, {stop}) leaves a tensor of shape {tuple(shape)}")
    if start == stop:
        return ()
    return tuple(Box(offsets, sizes, first - start) for offsets, sizes, first in _cut(tuple(shape), start, stop))


def _cut(shape: tuple[int, ...], start: int, stop: int) -> Iterator[tuple[tuple[int, ...], tuple[int, ...], int]]:
    """Yields offsets, sizes and first flat element of each box."""
    if not shape:
        yield (), (), start
        return
    row = prod(shape[1:])
    first_row, last_row = start // row, (stop - 1) // row
    if first_row == last_row and stop - start < row:
        for offsets, sizes, first in _cut(shape[1:], start - first_row * row, stop - first_row * row):
            yield (first_row, *offsets), (1, *sizes), first + first_row * row
        return
    full_start = -(-start // row)
    full_stop = stop // row
    if start < full_start * row:
        yield from _cut(shape, start, full_start * row)
    if full_start < full_stop:
        zeros = (0,) * (len(shape) - 1)
        yield (full_start, *zeros), (full_stop - full_start, *shape[1:]), full_start * row
    if full_stop * row < stop:
        yield from _cut(shape, full_stop * row, stop)
