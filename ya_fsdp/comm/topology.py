"""The nodes that the ranks of a process group live on, as a grid."""

import os
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist

from ya_fsdp.comm.colors import ColorExpression

__all__ = ["Colors", "NodeGrid", "group_colors", "parse_colors", "ranks_per_node"]

Colors = ColorExpression | tuple[int, int] | None
"""How a backend knows the nodes: an expression for all ranks, this rank's own pair, or from how the job was started."""


def parse_colors(colors: str | tuple[int, int] | None) -> Colors:
    """Reads what a user gave.

    Raises:
        ColorExpressionError: If an expression is not understood.
        TypeError: If it is something else than a string or two integers.
    """
    if colors is None or isinstance(colors, str):
        return None if colors is None else ColorExpression(colors)
    if isinstance(colors, tuple) and len(colors) == 2 and all(type(color) is int for color in colors):
        return colors
    raise TypeError(f"expected colours as a string such as 'rank // 8, rank % 8' or as two integers, got {colors!r}")


def group_colors(colors: Colors, group: dist.ProcessGroup) -> list[tuple[int, int]]:
    """Colours of all ranks of a group, by their rank in it. A collective if colours are given per rank.

    ``rank`` and ``world_size`` of an expression are those of the whole job, so every rank can compute all colours, and
    all ranks find the same fault.

    Raises:
        ColorExpressionError: If the expression cannot be computed for one of the ranks.
        ValueError: If nothing tells which ranks share a node.
    """
    ranks = dist.get_process_group_ranks(group)
    if isinstance(colors, tuple):
        gathered: list[tuple[int, int]] = [(0, 0)] * len(ranks)
        dist.all_gather_object(gathered, colors, group=group)
        return gathered
    if colors is not None:
        return [colors.colors(rank, dist.get_world_size()) for rank in ranks]
    per_node = ranks_per_node()
    return [(rank // per_node, rank % per_node) for rank in ranks]


def ranks_per_node() -> int:
    """Ranks on each node, from the launcher (``LOCAL_WORLD_SIZE``) or from the number of accelerators.

    Raises:
        ValueError: If neither is there.
    """
    local = os.environ.get("LOCAL_WORLD_SIZE", "")
    if local.isdecimal() and int(local):
        return int(local)
    if torch.accelerator.is_available():
        return torch.accelerator.device_count()
    raise ValueError(
        "nothing says which ranks share a node: LOCAL_WORLD_SIZE is not set (torchrun and accelerate set it) and there "
        "is no accelerator. Give a backend colours, such as 'rank // 8, rank % 8', and YaFSDP also "
        "intra_node_data_parallel_process_group."
    )


@dataclass(frozen=True)
class NodeGrid:
    """Ranks as a grid: one row per node, one column per place in a node.

    Attributes:
        rows: Ranks of each node, in order of their columns.
    """

    rows: tuple[tuple[int, ...], ...]

    @classmethod
    def from_colors(cls, colors: Sequence[tuple[int, int]]) -> "NodeGrid":
        """Arranges ranks by their ``(intra, inter)`` colours.

        Args:
            colors: Colours by rank.

        Raises:
            ValueError: If the colours do not make a full grid: each intra colour with each inter colour exactly once.
        """
        nodes: dict[int, dict[int, int]] = {}
        for rank, (intra, inter) in enumerate(colors):
            row = nodes.setdefault(intra, {})
            if inter in row:
                raise ValueError(
                    f"ranks {row[inter]} and {rank} have the same colours, intra {intra} and inter {inter}; ranks of "
                    f"one node (intra) need different inter colours"
                )
            row[inter] = rank
        columns = list(next(iter(nodes.values())))
        for intra, row in nodes.items():
            if set(row) != set(columns):
                raise ValueError(
                    f"every node must hold the same inter colours, but the node of intra colour {intra} has "
                    f"{sorted(row)} (ranks {sorted(row.values())}) and the first has {sorted(columns)}"
                )
        return cls(tuple(tuple(row[inter] for inter in columns) for row in nodes.values()))

    def place(self, rank: int) -> tuple[int, int]:
        """Node and column of a rank."""
        return next((node, row.index(rank)) for node, row in enumerate(self.rows) if rank in row)
