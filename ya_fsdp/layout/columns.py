"""Column chunks of the ``[world_size, shard_numel]`` view of a flat buffer.

A reduce-scatter over columns ``[first, stop)`` needs a staging tensor of shape ``[world_size, stop - first]`` and
yields elements ``[first, stop)`` of every rank's shard. A bucket that is too large to be staged whole is therefore
reduced chunk by chunk, each rank's result landing in the right place of its flat gradient shard.
"""

from collections.abc import Iterator
from dataclasses import dataclass

from ya_fsdp.layout.flat import FlatLayout, ParamSpan
from ya_fsdp.layout.planner import round_up

__all__ = ["Block", "ColumnChunk", "column_chunks", "param_blocks"]


@dataclass(frozen=True, slots=True)
class ColumnChunk:
    """Columns ``[first, stop)`` of every rank's shard. Units: elements."""

    first: int
    stop: int

    @property
    def width(self) -> int:
        """Elements per rank."""
        return self.stop - self.first


@dataclass(frozen=True, slots=True)
class Block:
    """A rectangle to copy from a flattened parameter into the staging tensor. Units: elements.

    Row ``i`` holds ``width`` elements, at ``param_offset + i * param_stride`` of the parameter and at
    ``staging_offset + i * staging_stride`` of the flattened staging tensor.
    """

    param_offset: int
    staging_offset: int
    rows: int
    width: int
    param_stride: int
    staging_stride: int


def column_chunks(layout: FlatLayout, max_numel: int) -> tuple[ColumnChunk, ...]:
    """Cuts the columns so that no staging tensor exceeds ``max_numel`` elements (or one aligned column per rank).

    Args:
        layout: Layout of the bucket.
        max_numel: Largest staging tensor, over all ranks. Units: elements.

    Returns:
        Chunks of nearly equal, aligned width that cover ``[0, shard_numel)``; one chunk if the bucket fits.
    """
    if layout.padded_numel <= max_numel or not layout.shard_numel:
        return (ColumnChunk(0, layout.shard_numel),)
    widest = max(layout.alignment, max_numel // layout.world_size // layout.alignment * layout.alignment)
    num_chunks = -(-layout.shard_numel // widest)
    width = round_up(-(-layout.shard_numel // num_chunks), layout.alignment)
    return tuple(
        ColumnChunk(first, min(first + width, layout.shard_numel)) for first in range(0, layout.shard_numel, width)
    )


def param_blocks(span: ParamSpan, shard_numel: int, chunk: ColumnChunk) -> tuple[Block, ...]:
    """Rectangles that carry one parameter's part of a chunk into the staging tensor.

    At most three: the cut first row, the full rows between, and the cut last row. A chunk of full width needs one.
    """
    if not span.numel:
        return ()
    if chunk.width == shard_numel:
        return (Block(0, span.start, 1, span.numel, span.numel, span.numel),)
    return tuple(_blocks(span, shard_numel, chunk))


def _blocks(span: ParamSpan, shard_numel: int, chunk: ColumnChunk) -> Iterator[Block]:
    first_row, last_row = span.start // shard_numel, (span.stop - 1) // shard_numel

    def block(row: int, rows: int) -> Block | None:
        lower = max(row * shard_numel + chunk.first, span.start)
        upper = min((row + rows - 1) * shard_numel + chunk.stop, span.stop)
        width = upper - lower - (rows - 1) * shard_numel
        if width <= 0:
            return None
        staging = row * chunk.width + lower - row * shard_numel - chunk.first
        return Block(lower - span.start, staging, rows, width, shard_numel, chunk.width)

    middle = (first_row + 1, last_row - first_row - 1)
    for row, rows in ((first_row, 1), middle, (last_row, 1 if last_row > first_row else 0)):
        if rows > 0 and (found := block(row, rows)) is not None:
            yield found
