"""Collectives in two stages give what flat ones give, and send less between nodes."""

import dataclasses

import pytest
import torch
import torch.distributed as dist

from tests.support.engines import full_gradients, full_parameters, shard
from tests.support.guards import assert_really_sharded, assert_same_numbers, assert_same_values
from tests.support.models import build_model, my_rows, token_batches
from tests.support.recorder import CollectiveRecorder
from tests.support.training import adamw, causal_loss, reference_run, sharded_run
from ya_fsdp import HierarchicalBackend
from ya_fsdp.comm import ProcessGroupCollectives, plan_reduction
from ya_fsdp.comm.hierarchical import HierarchicalCollectives

#: Two nodes of two ranks: side by side, interleaved, and with the places of the second node swapped.
COLORINGS = ("rank // 2, rank % 2", "rank % 2, rank // 2", "(rank // 2, (rank + (rank >= 2)) % 2)")
#: Elements per rank.
NUMEL = 24


@dataclasses.dataclass
class ByteCounter:
    """Wraps the collectives of a process group and counts what this rank receives from ranks of other nodes.

    A rank receives a piece from every other member of the group, at whatever path the pieces travel.
    """

    inner: ProcessGroupCollectives
    node_of: dict[int, int]
    received: int = 0

    def __post_init__(self):
        ranks = dist.get_process_group_ranks(self.inner.group)
        mine = self.node_of[dist.get_rank()]
        self.num_foreign = sum(self.node_of[rank] != mine for rank in ranks)
        self.rank, self.world_size = self.inner.rank, self.inner.world_size

    def all_gather(self, output, piece, *, async_op):
        self.received += self.num_foreign * piece.numel() * piece.itemsize
        return self.inner.all_gather(output, piece, async_op=async_op)

    def reduce_scatter(self, output, staging, reduction, *, async_op):
        self.received += self.num_foreign * output.numel() * staging.itemsize
        return self.inner.reduce_scatter(output, staging, reduction, async_op=async_op)


def counted(collectives, node_of):
    """Put a counter under each of the process groups of hierarchical collectives."""
    counters = []
    for name in ("_flat", "_intra", "_inter"):
        counters.append(ByteCounter(getattr(collectives, name), node_of))
        setattr(collectives, name, counters[-1])
    return counters


def hierarchical(colors):
    found = HierarchicalBackend(colors).collectives(dist.group.WORLD)
    assert isinstance(found, HierarchicalCollectives)
    return found


def gather_all_ways(colors):
    flat, staged = ProcessGroupCollectives(dist.group.WORLD), hierarchical(colors)
    rank = dist.get_rank()
    for dtype in (torch.float32, torch.bfloat16, torch.uint8, torch.int64):
        torch.manual_seed(rank)
        piece = (torch.rand(NUMEL) * 200).to(dtype)
        expected, found = torch.empty(4 * NUMEL, dtype=dtype), torch.empty(4 * NUMEL, dtype=dtype)
        flat.all_gather(expected, piece, async_op=False)
        for async_op in (False, True):
            for in_place in (False, True):
                found.zero_()
                source = piece
                if in_place:
                    source = found[rank * NUMEL : (rank + 1) * NUMEL]
                    source.copy_(piece)
                work = staged.all_gather(found, source, async_op=async_op)
                assert (work is not None) == async_op
                if work is not None:
                    work.wait()
                assert torch.equal(found, expected), f"rank {rank}, {colors}, {dtype}, {async_op=}, {in_place=}"


@pytest.mark.parametrize("world", [4])
@pytest.mark.parametrize("colors", COLORINGS)
def test_gathers_are_equal_to_flat_ones_bit_by_bit(on_ranks, world, colors):
    on_ranks(world, gather_all_ways, colors)


def reduce_all_ways(colors):
    flat, staged = ProcessGroupCollectives(dist.group.WORLD), hierarchical(colors)
    rank = dist.get_rank()
    for force_sum in (False, True):
        for wire, wide in (
            (torch.float32, torch.float32),
            (torch.float64, torch.float64),
            (torch.bfloat16, torch.float32),
        ):
            reduction = plan_reduction(4, wire, force_sum=force_sum)
            torch.manual_seed(rank)
            gradient = torch.randn(4 * NUMEL).to(wire)
            expected, found = torch.empty(NUMEL, dtype=wide), torch.empty(NUMEL, dtype=wide)
            flat.reduce_scatter(expected, gradient.clone(), reduction, async_op=False)
            for async_op in (False, True):
                found.zero_()
                work = staged.reduce_scatter(found, gradient.clone(), reduction, async_op=async_op)
                if work is not None:
                    work.wait()
                what = f"rank {rank}, {colors}, {wire}, {force_sum=}, {async_op=}"
                torch.testing.assert_close(
                    found, expected, atol=1e-6, rtol=1e-6, msg=lambda text, w=what: f"{w}: {text}"
                )


@pytest.mark.parametrize("world", [4])
@pytest.mark.parametrize("colors", COLORINGS)
def test_reductions_are_equal_to_flat_ones(on_ranks, world, colors):
    on_ranks(world, reduce_all_ways, colors)


def count_bytes(colors):
    """Return bytes received from the other node: of a flat gather, a staged one, and of the reductions."""
    staged = hierarchical(colors)
    node_of = {rank: HierarchicalBackend(colors)._colors.colors(rank, 4)[0] for rank in range(4)}
    flat = ByteCounter(ProcessGroupCollectives(dist.group.WORLD), node_of)
    counters = counted(staged, node_of)
    totals = []
    for collectives, members in ((flat, [flat]), (staged, counters)):
        collectives.all_gather(torch.empty(4 * NUMEL), torch.ones(NUMEL), async_op=False)
        totals.append(sum(counter.received for counter in members))
        collectives.reduce_scatter(
            torch.empty(NUMEL), torch.ones(4 * NUMEL), plan_reduction(4, torch.float32), async_op=False
        )
        totals.append(sum(counter.received for counter in members) - totals[-1])
    return totals


@pytest.mark.parametrize("world", [4])
@pytest.mark.parametrize("colors", COLORINGS)
def test_between_nodes_half_as_much_travels_with_two_ranks_per_node(on_ranks, world, colors):
    piece = NUMEL * 4
    for flat_gather, flat_reduce, gather, reduce in on_ranks(world, count_bytes, colors):
        assert flat_gather == flat_reduce == 2 * piece
        assert gather == reduce == piece


def train_on_two_stages(steps=4):
    batches = token_batches(2) * (steps // 2)
    expected = reference_run(build_model("llama"), adamw, batches, max_norm=1.0)
    backend = HierarchicalBackend("rank // 2, rank % 2")
    model = shard(build_model("llama"), backend=backend)
    found = sharded_run(model, adamw, batches, max_norm=1.0)
    assert_same_numbers(found.losses, expected.losses, "loss", atol=1e-5)
    assert_same_numbers(found.norms, expected.norms, "gradient norm", atol=1e-5)
    assert_same_values(found.parameters, expected.parameters, "weights", atol=1e-4)

    # bf16 on the way, prefetching, units kept or not: the flat engine is the measure.
    for keep in (True, False):
        policy = {"param_dtype": torch.bfloat16, "reduce_dtype": torch.float32}
        models = [
            shard(build_model("llama"), mp=policy, reshard_after_forward=not keep, backend=made)
            for made in (backend, None)
        ]
        for _ in range(2):  # the second pass gathers ahead
            for sharded in models:
                rows = my_rows(batches[0], dist.get_rank(), 4)
                with CollectiveRecorder() as recorder:
                    causal_loss(sharded, rows).backward()
                assert_really_sharded(sharded, recorder, "ya_fsdp")
        assert_same_values(full_parameters(models[0]), full_parameters(models[1]), "bf16 weights")
        gradients = [full_gradients(sharded) for sharded in models]
        assert_same_values(*gradients, "bf16 gradients", atol=1e-6, rtol=1e-6)


@pytest.mark.parametrize("world", [4])
def test_training_on_two_stages_matches_one_process(on_ranks, world):
    on_ranks(world, train_on_two_stages)


def make_in_odd_ways():
    rank, world = dist.get_rank(), dist.group.WORLD
    # One node, or one rank on each: nothing to stage.
    for colors in ("0, rank", "rank, 0"):
        assert isinstance(HierarchicalBackend(colors).collectives(world), ProcessGroupCollectives)
    # This rank's own pair of colours; and the same object for the same group, so that no group is made twice.
    backend = HierarchicalBackend((rank // 2, rank % 2))
    assert isinstance(backend.collectives(world), HierarchicalCollectives)
    assert backend.collectives(world) is backend.collectives(world)
    for colors, reason in (
        ("0, 0", "ranks 0 and 1 have the same colours"),
        ("rank // 3, rank % 3", "every node must hold the same inter colours"),
        ("1 // (rank - 3), 0", "at position 2: division by zero for rank 3 of 4"),
    ):
        with pytest.raises(ValueError, match=reason):  # on every rank alike, before anybody waits for another
            HierarchicalBackend(colors).collectives(world)


@pytest.mark.parametrize("world", [4])
def test_one_node_is_flat_and_colours_without_nodes_are_refused_on_all_ranks(on_ranks, world):
    on_ranks(world, make_in_odd_ways)


def take_nodes_from_the_launcher():
    import os

    before = os.environ.pop("LOCAL_WORLD_SIZE", None)
    try:
        with pytest.raises(ValueError, match="LOCAL_WORLD_SIZE is not set"):
            HierarchicalBackend().collectives(dist.group.WORLD)
        os.environ["LOCAL_WORLD_SIZE"] = "2"
        assert isinstance(HierarchicalBackend().collectives(dist.group.WORLD), HierarchicalCollectives)
    finally:
        os.environ.pop("LOCAL_WORLD_SIZE", None)
        if before is not None:
            os.environ["LOCAL_WORLD_SIZE"] = before


@pytest.mark.parametrize("world", [4])
def test_without_colours_the_launcher_tells_the_nodes(on_ranks, world):
    on_ranks(world, take_nodes_from_the_launcher)
