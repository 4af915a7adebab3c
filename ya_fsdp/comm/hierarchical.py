"""Collectives in two stages: between nodes among the ranks at the same place of their nodes, and inside each node.

With J nodes of I ranks (W = I J) and pieces of n bytes, a gather runs as::

    between nodes   every rank gets the J - 1 pieces of its counterparts            one gather of  J n
    inside a node   the ranks of a node exchange what each of them fetched           J gathers of   I n, in place

A rank receives (J - 1) n bytes from other nodes, where a flat gather, in which every rank takes each piece from its
owner, receives (W - I) n = I (J - 1) n: I times as many. A reduce-scatter runs the two stages in the reverse order,
with the same factor. The price is scratch memory of J n bytes, 1 / I of the gather buffer.

It pays where pieces cross from node to node once per rank: direct or all-to-all algorithms, and many small pieces,
whose W - 1 steps around a ring become (J - 1) + (I - 1). A ring that visits the nodes one after the other, as NCCL
builds for large messages, carries each piece over each link between nodes once by itself; there it saves steps, not
bytes.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist

from ya_fsdp.comm.base import Collectives, Pending
from ya_fsdp.comm.process_group import ProcessGroupCollectives, Then
from ya_fsdp.comm.reduction import Reduction
from ya_fsdp.comm.topology import NodeGrid, group_colors, parse_colors

__all__ = ["HierarchicalBackend", "HierarchicalCollectives"]


@dataclass(frozen=True, slots=True)
class _Route:
    """The way to one node.

    Attributes:
        place: The node's place in the group of this rank's counterparts.
        ranks: Whose pieces the ranks of this node fetch there, in the order of the ranks of this node.
    """

    place: int
    ranks: tuple[int, ...]

    @property
    def is_run(self) -> bool:
        """The pieces lie one behind the other in the gathered tensor."""
        return all(b == a + 1 for a, b in zip(self.ranks, self.ranks[1:], strict=False))


class HierarchicalCollectives:
    """Gathers and reduce-scatters in two stages; what is small (flags) and replicas stay flat.

    Args:
        flat: Over all ranks.
        intra: Over the ranks of this node.
        inter: Over the ranks at this rank's place of their nodes.
        grid: All ranks, by their rank in ``flat``.
    """

    def __init__(
        self,
        flat: ProcessGroupCollectives,
        intra: ProcessGroupCollectives,
        inter: ProcessGroupCollectives,
        grid: NodeGrid,
    ) -> None:
        self.rank = flat.rank
        self.world_size = flat.world_size
        self._flat = flat
        self._intra = intra
        self._inter = inter
        self._routes = _routes(grid, flat.rank)

    def allocate(self, nbytes: int, device: torch.device) -> torch.Tensor | None:
        """See :meth:`ya_fsdp.comm.Collectives.allocate`."""
        return None

    def all_gather(self, output: torch.Tensor, piece: torch.Tensor, *, async_op: bool) -> Pending | None:
        """See :meth:`ya_fsdp.comm.Collectives.all_gather`. The stage inside the node starts when somebody waits."""
        numel = piece.numel()
        fetched = piece.new_empty(self._inter.world_size * numel)
        first = self._inter.all_gather(fetched, piece, async_op=async_op)

        def spread() -> None:
            for route in self._routes:
                mine = fetched[route.place * numel : (route.place + 1) * numel]
                if route.is_run:
                    start = route.ranks[0] * numel
                    self._intra.all_gather(output[start : start + len(route.ranks) * numel], mine, async_op=False)
                else:
                    block = piece.new_empty(len(route.ranks) * numel)
                    self._intra.all_gather(block, mine, async_op=False)
                    torch._foreach_copy_(_pieces(output, numel, route.ranks), block.chunk(len(route.ranks)))

        return _after(first, spread)

    def reduce_scatter(
        self, output: torch.Tensor, staging: torch.Tensor, reduction: Reduction, *, async_op: bool
    ) -> Pending | None:
        """See :meth:`ya_fsdp.comm.Collectives.reduce_scatter`. Sums of a node travel in the dtype of ``output``."""
        numel = output.numel()
        sums = output.new_empty(self._inter.world_size * numel)
        first: list[Pending | None] = []
        for route in self._routes:
            start = route.ranks[0] * numel
            if route.is_run:
                block = staging[start : start + len(route.ranks) * numel]
            else:
                block = torch.cat(_pieces(staging, numel, route.ranks))
            mine = sums[route.place * numel : (route.place + 1) * numel]
            first.append(self._intra.reduce_scatter(mine, block, reduction, async_op=async_op))

        def combine() -> None:
            for work in first[:-1]:
                if work is not None:
                    work.wait()
            self._inter.reduce_scatter(output, sums, reduction, async_op=False)

        return _after(first[-1], combine)

    def all_reduce(self, tensor: torch.Tensor, reduction: Reduction, *, async_op: bool) -> Pending | None:
        """See :meth:`ya_fsdp.comm.Collectives.all_reduce`."""
        return self._flat.all_reduce(tensor, reduction, async_op=async_op)


class HierarchicalBackend:
    """Gathers between nodes, then inside each node, with ordinary process groups; for ``fully_shard(backend=...)``.

    Args:
        colors: Which ranks share a node. An expression for the intra and the inter colour of a rank, such as
            ``"rank // 8, rank % 8"``; this rank's two colours; or None to take it from the launcher
            (``LOCAL_WORLD_SIZE``), else from the number of accelerators.

    Raises:
        ColorExpressionError: If the expression is not understood; with the position of the fault.
    """

    def __init__(self, colors: str | tuple[int, int] | None = None) -> None:
        self._colors = parse_colors(colors)
        self._made: dict[dist.ProcessGroup, Collectives] = {}

    def collectives(self, group: dist.ProcessGroup) -> Collectives:
        """See :meth:`ya_fsdp.comm.Backend.collectives`. Makes two process groups per rank, once per ``group``.

        Raises:
            ValueError: If the colours do not arrange the group's ranks in nodes of equal size.
        """
        if group not in self._made:
            self._made[group] = self._make(group)
        return self._made[group]

    def _make(self, group: dist.ProcessGroup) -> Collectives:
        flat = ProcessGroupCollectives(group)
        grid = NodeGrid.from_colors(group_colors(self._colors, group))
        node, column = grid.place(flat.rank)
        if len(grid.rows) == 1 or len(grid.rows[0]) == 1:
            return flat  # one node, or one rank on each: a single stage
        intra = _subgroup(group, grid.rows[node])
        inter = _subgroup(group, [row[column] for row in grid.rows])
        return HierarchicalCollectives(flat, intra, inter, grid)


def _subgroup(group: dist.ProcessGroup, members: Sequence[int]) -> ProcessGroupCollectives:
    """Collectives over some ranks of a group; a collective of those ranks only."""
    world_ranks = dist.get_process_group_ranks(group)
    ranks = sorted(world_ranks[member] for member in members)
    return ProcessGroupCollectives(dist.new_group(ranks, use_local_synchronization=True))


def _routes(grid: NodeGrid, rank: int) -> list[_Route]:
    node, column = grid.place(rank)
    counterparts = sorted(row[column] for row in grid.rows)
    # Process groups number their ranks in ascending order, which need not be the order of columns.
    columns = [grid.place(member)[1] for member in sorted(grid.rows[node])]
    return [_Route(counterparts.index(row[column]), tuple(row[place] for place in columns)) for row in grid.rows]


def _pieces(flat: torch.Tensor, numel: int, ranks: Sequence[int]) -> list[torch.Tensor]:
    """Views of the ranks' pieces; an index would have to travel to the device first."""
    return [flat[rank * numel : (rank + 1) * numel] for rank in ranks]


def _after(first: Pending | None, then: Callable[[], None]) -> Pending | None:
    """Runs the second stage behind the first: at once if that was not asynchronous, else when somebody waits."""
    if first is not None:
        return Then(first, then)
    then()
    return None
