"""Where each parameter starts in the flat buffer of its bucket."""

from collections.abc import Sequence
from math import lcm

from ya_fsdp.layout.flat import FlatLayout, ParamSpan, ParamSpec

__all__ = ["aligned_elements", "plan_contiguous", "round_up"]

_BYTES = 16  # vector width that copy kernels and collectives want pieces and parameters to start at


def round_up(value: int, multiple: int) -> int:
    """Smallest multiple of ``multiple`` that is not below ``value``."""
    return -(-value // multiple) * multiple


def aligned_elements(alignment: int, *itemsizes: int) -> int:
    """Elements that satisfy the user's alignment and 16 bytes in every given element size.

    Args:
        alignment: Requested alignment in elements, at least 1.
        itemsizes: Bytes per element of each dtype in which the buffer is used.

    Raises:
        ValueError: If ``alignment`` is not positive.
    """
    if alignment < 1:
        raise ValueError(f"shard_alignment must be a positive number of elements, got {alignment}")
    return lcm(alignment, *(max(1, _BYTES // itemsize) for itemsize in itemsizes))


def plan_contiguous(specs: Sequence[ParamSpec], world_size: int, alignment: int) -> FlatLayout:
    """Lays parameters out one behind the other, in the order given.

    Args:
        specs: Parameters of the bucket.
        world_size: Number of ranks to shard over.
        alignment: Elements at whose multiples parameters and pieces start.

    Returns:
        The layout. The buffer is at most ``alignment`` elements per parameter and per rank larger than the parameters.
    """
    spans, end = [], 0
    for spec in specs:
        start = round_up(end, alignment)
        spans.append(ParamSpan(start, spec.numel))
        end = start + spec.numel
    shard_numel = round_up(-(-end // world_size), alignment)
    return FlatLayout(tuple(specs), tuple(spans), world_size, shard_numel, alignment)
