"""Which elements of which parameter lie on which rank.

A bucket of parameters is laid out in one flat buffer, padded and cut into equal pieces, one per rank::

    |<---------- rank 0 ---------->|<---------- rank 1 ---------->|<---------- rank 2 ---------->|
    | weight a          |. bias b |.|        weight c             |      weight c      |. . . . .|
    0                                S                             2S                            3S

    S = shard_numel (elements per rank), '.' = padding, padded_numel = 3 S

Parameters start at aligned offsets and may cross the border of a rank anywhere, in the middle of a row too. Everything
follows from the start of a parameter and S by arithmetic, so a rank knows every other rank's slice at no cost,
whatever the number of ranks.
"""

from dataclasses import dataclass
from functools import cached_property, lru_cache
from math import prod

__all__ = ["FlatLayout", "LocalSlice", "ParamSpan", "ParamSpec", "Partition", "local_slice", "partition"]


@dataclass(frozen=True, slots=True)
class ParamSpec:
    """Name and shape of a parameter that is to be laid out.

    Attributes:
        name: Name used in error messages.
        shape: Shape of the full parameter; ``()`` is a scalar, a zero makes it empty.
    """

    name: str
    shape: tuple[int, ...]

    @property
    def numel(self) -> int:
        """Number of elements of the full parameter."""
        return prod(self.shape)


@dataclass(frozen=True, slots=True)
class ParamSpan:
    """Half-open range ``[start, start + numel)`` of one parameter in the flat buffer. Units: elements."""

    start: int
    numel: int

    @property
    def stop(self) -> int:
        """First element behind the parameter."""
        return self.start + self.numel


@dataclass(frozen=True, slots=True)
class LocalSlice:
    """One rank's part of one parameter. Units: elements.

    Attributes:
        param_offset: Where the part starts in the flattened parameter.
        shard_offset: Where the part starts in the rank's shard.
        numel: Length of the part; 0 where the rank holds nothing of the parameter.
    """

    param_offset: int
    shard_offset: int
    numel: int


def local_slice(start: int, numel: int, shard_numel: int, rank: int) -> LocalSlice:
    """Part of a parameter that a rank holds.

    Args:
        start: First element of the parameter in the flat buffer.
        numel: Elements of the full parameter.
        shard_numel: Elements per rank.
        rank: Rank along the sharding axis of the mesh.

    Returns:
        The slice; an empty one lies at the near end of the parameter, so that offsets never leave it.
    """
    first, stop = rank * shard_numel, (rank + 1) * shard_numel
    lower = min(max(first, start), start + numel)
    upper = max(min(stop, start + numel), lower)
    shard_offset = lower - first if upper > lower else 0
    return LocalSlice(lower - start, shard_offset, upper - lower)


@dataclass(frozen=True, slots=True)
class Partition:
    """A flat tensor cut into consecutive pieces, members and the gaps around them. Units: elements.

    Attributes:
        sizes: Lengths of all pieces, in order; they add up to the whole.
        is_member: Whether the piece belongs to a member (else it is padding).
    """

    sizes: tuple[int, ...]
    is_member: tuple[bool, ...]


@lru_cache(maxsize=1024)
def partition(ranges: tuple[tuple[int, int], ...], total: int) -> Partition:
    """Cuts ``[0, total)`` at the given members. Equal arguments, as of repeated blocks, give one object.

    Args:
        ranges: ``(start, numel)`` of the members, ascending and not overlapping; where an empty one starts is ignored.
        total: Length of the whole. Units: elements.
    """
    sizes: list[int] = []
    is_member: list[bool] = []
    end = 0
    for start, numel in (*ranges, (total, -1)):
        if numel and start > end:
            sizes.append(start - end)
            is_member.append(False)
            end = start
        if numel >= 0:
            sizes.append(numel)
            is_member.append(True)
            end += numel
    return Partition(tuple(sizes), tuple(is_member))


@dataclass(frozen=True)
class FlatLayout:
    """Places of a bucket's parameters in its flat buffer.

    Attributes:
        specs: The parameters, in layout order.
        spans: Their ranges, in the same order; ranges do not overlap and ascend.
        world_size: Number of equal pieces.
        shard_numel: Elements per piece, a multiple of ``alignment``.
        alignment: Every parameter and every piece starts at a multiple of this many elements.

    Raises:
        ValueError: If the ranges overlap, leave the buffer or are not aligned.
    """

    specs: tuple[ParamSpec, ...]
    spans: tuple[ParamSpan, ...]
    world_size: int
    shard_numel: int
    alignment: int

    def __post_init__(self) -> None:
        if len(self.specs) != len(self.spans):
            raise ValueError(f"{len(self.specs)} parameters but {len(self.spans)} ranges")
        if self.world_size < 1 or self.alignment < 1 or self.shard_numel % self.alignment:
            raise ValueError(
                f"expected a positive world size and a shard that is a multiple of the alignment, got world size "
                f"{self.world_size}, shard {self.shard_numel} and alignment {self.alignment} elements"
            )
        end = 0
        for spec, span in zip(self.specs, self.spans, strict=True):
            if span.numel != spec.numel:
                raise ValueError(f"parameter {spec.name} has {spec.numel} elements but a range of {span.numel}")
            if span.start < end or span.start % self.alignment:
                raise ValueError(
                    f"parameter {spec.name} starts at {span.start}, which is not aligned to {self.alignment} "
                    f"elements or overlaps the parameter that ends at {end}"
                )
            end = span.stop
        if end > self.padded_numel:
            raise ValueError(f"parameters end at {end}, behind the buffer of {self.padded_numel} elements")

    @property
    def padded_numel(self) -> int:
        """Elements of the whole flat buffer, padding included."""
        return self.world_size * self.shard_numel

    @cached_property
    def numel(self) -> int:
        """Elements of all parameters, without padding."""
        return sum(span.numel for span in self.spans)

    def local_slices(self, rank: int) -> tuple[LocalSlice, ...]:
        """Part of every parameter that ``rank`` holds, in layout order."""
        return tuple(local_slice(span.start, span.numel, self.shard_numel, rank) for span in self.spans)

    @cached_property
    def partition(self) -> Partition:
        """The flat buffer cut into parameters and padding."""
        return partition(tuple((span.start, span.numel) for span in self.spans), self.padded_numel)

    def local_partition(self, rank: int) -> Partition:
        """The shard of ``rank`` cut into its parts of the parameters and padding."""
        return partition(tuple((s.shard_offset, s.numel) for s in self.local_slices(rank)), self.shard_numel)
