"""How much memory a step holds, by allocation, and what is copied."""

from contextlib import contextmanager

import pytest

from tests.schedule.fake_accelerator import NAME
from tests.schedule.scenarios import BF16, BLOCKS, HIDDEN, UNITS, WIDTH, sharded
from tests.schedule.test_races import small_stagings
from tests.schedule.timeline import GATHER, REDUCE, peak_nbytes

COPIES = {"copy_", "_to_copy", "_foreach_copy_", "clone", "cat", "stack", "split_with_sizes_copy", "contiguous"}


@contextmanager
def watched_steps(num_steps=3, **options):
    """Give the timeline of some steps, while the model is alive, and the elements of each gathered unit."""
    with sharded(NAME, **options) as run, run.watched() as timeline:
        for _ in range(num_steps):
            run.step()
        yield timeline, {name: numel for numel, name in timeline.names.items()}


def check_buffers(itemsize, policy):
    with watched_steps(policy=policy) as (timeline, sizes):
        buffers = timeline.gather_buffers()
        # Blocks alternate: 0 and 2 in the first, 1 and 3 in the second; each is as large as its largest user. In every
        # step each is allocated once. The embedding comes once, since its backward reads no weights, and so does the
        # kept head.
        expected = [sizes[name] * itemsize for name in ("block2", "block3", "embedding", "head")]
        assert sorted(memory.nbytes for memory in buffers) == sorted(3 * expected), buffers
        assert not [memory for memory in buffers if memory.freed is None], "the backward has left them"


@pytest.mark.parametrize(("itemsize", "policy"), [(4, {}), (2, BF16)], ids=["fp32", "bf16"])
def test_blocks_share_two_buffers_and_other_units_hold_memory_while_they_are_gathered(in_helper, itemsize, policy):
    in_helper(check_buffers, itemsize, policy)


def check_peak():
    with watched_steps(policy=BF16) as (timeline, sizes):
        shared = sizes["block2"] + sizes["block3"]
        peak = peak_nbytes(timeline.gather_buffers())
        # Embedding and head are never gathered at the same time.
        assert peak <= 2 * (shared + max(sizes["embedding"], sizes["head"])), peak
        assert peak_nbytes(timeline.memories) > peak


def test_gathered_parameters_never_hold_more_than_the_shared_buffers_and_one_other_unit(in_helper):
    in_helper(check_peak)


def check_no_copies(policy):
    with watched_steps(policy=policy) as (timeline, _):
        buffers = timeline.gather_buffers()
        copies = [op for buffer in buffers for op, writes in buffer.accesses if not writes and op.name in COPIES]
        assert not copies, f"gathered parameters are copied: {copies}"
        rank_pieces = [op for buffer in buffers for op, writes in buffer.accesses if writes and op.name != GATHER]
        names = timeline.names
        largest = max(names)
        # What else is written is this rank's piece, cast where the gather wants it: an eighth of a unit.
        assert all(op.name == "copy_" and op.numel <= largest // 8 for op in rank_pieces), rank_pieces
        assert len(rank_pieces) == (len(timeline.of(GATHER)) if policy else 0), rank_pieces


@pytest.mark.parametrize("policy", [{}, BF16], ids=["fp32", "bf16"])
def test_gathered_parameters_are_used_where_they_arrive(in_helper, policy):
    in_helper(check_no_copies, policy)


def check_one_pass(policy):
    with watched_steps(policy=policy) as (timeline, _):
        stagings = timeline.stagings()
        assert len(stagings) == 3 * len(UNITS)
        for staging in stagings:
            fills = [op.name for op, writes in staging.accesses if writes]
            # Padding is zeroed beside; every gradient is written once.
            # Where nothing is cast, a single gradient is the input as it is.
            whole = (["cat"], ["embedding_dense_backward"])
            once = (["_foreach_copy_"], ["_foreach_copy_", "_foreach_zero_"]) if policy else whole
            assert sorted(fills) in once, fills
            assert len(staging.accesses) == len(fills) + 1, f"besides the reduction, {staging.accesses}"


@pytest.mark.parametrize("policy", [{}, BF16], ids=["fp32", "bf16"])
def test_gradients_are_written_into_the_reductions_input_in_one_pass(in_helper, policy):
    in_helper(check_one_pass, policy)


def check_pieces():
    with small_stagings(), sharded(NAME, policy=BF16) as run, run.watched() as timeline:
        for _ in range(2):
            run.step()
    limit, itemsize, num_ranks = 1024, 4, 8
    stagings = timeline.stagings()
    assert len(stagings) > 2 * 3 * len(UNITS)
    assert max(staging.nbytes for staging in stagings) <= limit // 2
    assert peak_nbytes(stagings) <= limit, "more than two pieces at a time"
    per_step = sum(op.numel for op in timeline.of(REDUCE)) // 2
    assert per_step == sum(timeline.names), "every element is reduced once, padding included"
    outputs = timeline.memories_where(lambda memory: memory.written_by(REDUCE))
    assert sorted(memory.nbytes for memory in outputs) == sorted(
        2 * [n // num_ranks * itemsize for n in timeline.names]
    )


def test_a_bucket_above_the_limit_is_reduced_in_pieces_of_bounded_memory(in_helper):
    in_helper(check_pieces)


def check_whole_below_limit():
    with watched_steps(policy=BF16) as (timeline, sizes):
        assert sorted(op.numel for op in timeline.of(REDUCE)) == sorted(3 * list(sizes.values()))
        # A reduction in flight while the next one is being filled.
        two_largest = sum(sorted(sizes.values())[-2:])
        assert peak_nbytes(timeline.stagings()) <= 4 * two_largest


def test_a_bucket_below_the_limit_is_reduced_whole_two_at_a_time(in_helper):
    in_helper(check_whole_below_limit)


def check_rest():
    with sharded(NAME, policy=BF16) as run, run.watched() as timeline:
        run.step()
        rest = sum(memory.nbytes for memory in timeline.memories if memory.freed is None)
        for _ in range(3):
            run.step()
        assert sum(memory.nbytes for memory in timeline.memories if memory.freed is None) == rest
        run.model.release_buffers()
        shards = sum(timeline.names) // 8 * 4
        left = sum(memory.nbytes for memory in timeline.memories if memory.freed is None)
        assert left <= shards + run.tokens.nbytes, f"{left} bytes are left, {shards} of them sharded parameters"


def test_between_steps_only_shards_and_shared_buffers_remain(in_helper):
    in_helper(check_rest)


def check_order_of_sizes():
    numel = {name: sum(p.numel() for p in unit.parameters()) for name, unit in _units().items()}
    with watched_steps(1) as (timeline, sizes):
        assert list(sizes) == UNITS
        for name in UNITS:
            assert numel[name] <= sizes[name] <= numel[name] + 8 * (4 + 8), f"{name}: {sizes[name]} for {numel[name]}"
        assert {op.numel for op in timeline.of(GATHER)} == set(sizes.values())


def _units():
    from tests.schedule.scenarios import Model

    return Model(8).units()


def test_what_travels_is_the_unit_and_little_padding(in_helper):
    assert len(HIDDEN) == len(BLOCKS)
    assert WIDTH == 8
    in_helper(check_order_of_sizes)
