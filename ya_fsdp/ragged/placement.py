"""``RaggedShard``: one parameter's contiguous slice of a flat buffer."""

from typing import Any

from ya_fsdp._torch_compat import DTensorSpec, Placement
from ya_fsdp.layout import LocalSlice, local_slice

__all__ = ["RaggedShard", "ragged_axis"]


class RaggedShard(Placement):
    """Placement of a tensor that lies in a flat buffer which is cut into equal pieces, one per rank.

    A rank's slice may start and end in the middle of a row and may be empty. Two integers describe the slices of all
    ranks, so the placement is equal on every rank and costs the same for 2 and for 10,000 of them.

    Attributes:
        start: Where the tensor starts in the flat buffer. Units: elements.
        shard_numel: Length of each rank's piece of the flat buffer. Units: elements.
    """

    start: int
    shard_numel: int

    def __init__(self, start: int, shard_numel: int) -> None:
        super().__init__()
        if start < 0 or shard_numel < 0:
            raise ValueError(f"RaggedShard expects non-negative numbers, got start={start}, shard_numel={shard_numel}")
        self.start = start
        self.shard_numel = shard_numel

    def slice_of(self, numel: int, rank: int) -> LocalSlice:
        """Slice of a tensor of ``numel`` elements that lies on ``rank``."""
        return local_slice(self.start, numel, self.shard_numel, rank)

    def owners(self, numel: int) -> range:
        """Ranks whose slice of a tensor of ``numel`` elements is not empty."""
        if not numel:
            return range(0)
        return range(self.start // self.shard_numel, (self.start + numel - 1) // self.shard_numel + 1)

    def __eq__(self, other: Any) -> bool:
        return isinstance(other, RaggedShard) and (self.start, self.shard_numel) == (other.start, other.shard_numel)

    def __hash__(self) -> int:
        return hash((RaggedShard, self.start, self.shard_numel))

    def __repr__(self) -> str:
        return f"RaggedShard(start={self.start}, shard_numel={self.shard_numel})"

    def __str__(self) -> str:
        return f"R({self.start}/{self.shard_numel})"

    def __reduce__(self) -> Any:
        return RaggedShard, (self.start, self.shard_numel)


def ragged_axis(spec: DTensorSpec) -> tuple[int, RaggedShard]:
    """Mesh axis along which a tensor is sharded, and its placement there.

    Raises:
        ValueError: If no placement of the spec is a ``RaggedShard``.
    """
    for axis, placement in enumerate(spec.placements):
        if isinstance(placement, RaggedShard):
            return axis, placement
    raise ValueError(f"expected a RaggedShard placement, got {spec.placements}")
