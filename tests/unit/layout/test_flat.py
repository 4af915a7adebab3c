"""A planned layout puts every element on exactly one rank, aligned, with little padding."""

import time

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.unit.layout.strategies import alignments, buckets, layouts, world_sizes
from ya_fsdp.layout import FlatLayout, ParamSpan, ParamSpec, local_slice, plan_contiguous
from ya_fsdp.layout.planner import aligned_elements, round_up


def naive_flat(layout: FlatLayout) -> np.ndarray:
    """Return the whole flat buffer: elements numbered from 1 through all parameters, 0 in the padding."""
    flat = np.zeros(layout.padded_numel, dtype=np.int64)
    first = 1
    for span in layout.spans:
        flat[span.start : span.stop] = np.arange(first, first + span.numel)
        first += span.numel
    return flat


@given(layouts())
def test_ranks_together_hold_every_element_once(layout: FlatLayout) -> None:
    flat = naive_flat(layout)
    assert sorted(flat[flat > 0]) == list(range(1, layout.numel + 1))
    pieces = flat.reshape(layout.world_size, layout.shard_numel)
    first = 1
    for index, spec in enumerate(layout.specs):
        found = []
        for rank in range(layout.world_size):
            mine = layout.local_slices(rank)[index]
            assert len(found) == mine.param_offset or mine.numel == 0
            found.extend(pieces[rank][mine.shard_offset : mine.shard_offset + mine.numel])
        assert found == list(range(first, first + spec.numel)), f"{spec.name} over the ranks"
        first += spec.numel


@given(layouts())
def test_starts_and_pieces_are_aligned_and_in_the_order_given(layout: FlatLayout) -> None:
    assert layout.shard_numel % layout.alignment == 0
    assert all(span.start % layout.alignment == 0 for span in layout.spans)
    ends = [0, *(span.stop for span in layout.spans)]
    assert all(end <= span.start for end, span in zip(ends, layout.spans, strict=False))
    assert ends[-1] <= layout.padded_numel


@given(buckets(), world_sizes, alignments)
def test_padding_is_bounded_by_the_alignment_per_parameter_and_rank(
    specs: list[ParamSpec], world_size: int, alignment: int
) -> None:
    layout = plan_contiguous(specs, world_size, alignment)
    numel = sum(spec.numel for spec in specs)
    assert numel <= layout.padded_numel <= numel + alignment * (len(specs) + world_size)


@given(
    start=st.integers(0, 300),
    numel=st.integers(0, 300),
    shard_numel=st.integers(1, 80),
    rank=st.integers(0, 70),
)
def test_a_local_slice_is_the_overlap_of_two_ranges(start: int, numel: int, shard_numel: int, rank: int) -> None:
    mine = local_slice(start, numel, shard_numel, rank)
    shard = range(rank * shard_numel, (rank + 1) * shard_numel)
    overlap = [position for position in range(start, start + numel) if position in shard]
    assert mine.numel == len(overlap)
    if overlap:
        assert (mine.param_offset, mine.shard_offset) == (overlap[0] - start, overlap[0] - shard.start)
    # Slicing with the numbers of an empty slice must stay inside the parameter and the shard.
    assert 0 <= mine.param_offset <= numel
    assert 0 <= mine.shard_offset <= shard_numel


@given(
    start=st.integers(0, 300),
    numel=st.integers(0, 300),
    shard_numel=st.integers(1, 80),
)
def test_slices_of_consecutive_ranks_join_without_gap(start: int, numel: int, shard_numel: int) -> None:
    end = 0
    for rank in range((start + numel) // shard_numel + 2):
        mine = local_slice(start, numel, shard_numel, rank)
        assert mine.param_offset == end
        end += mine.numel
    assert end == numel


def test_sixteen_thousand_ranks_and_a_thousand_parameters_take_less_than_a_second() -> None:
    world_size = 16384
    specs = [ParamSpec(f"p{i}", (4096 + i, 4096)) for i in range(1000)]
    start = time.perf_counter()
    layout = plan_contiguous(specs, world_size, 8)
    slices = [layout.local_slices(rank) for rank in (0, 1, world_size // 2, world_size - 1)]
    layout.local_partition(world_size - 1)
    seconds = time.perf_counter() - start
    assert seconds < 1, f"{seconds:.2f} s"
    assert all(sum(mine.numel for mine in of_rank) <= layout.shard_numel for of_rank in slices)
    assert layout.padded_numel - layout.numel <= 8 * (1000 + world_size)
    # A full piece in the middle of the buffer belongs to one or two neighbouring parameters.
    assert sum(mine.numel for mine in slices[2]) == layout.shard_numel


def test_more_ranks_than_elements_leave_the_last_ranks_empty() -> None:
    layout = plan_contiguous([ParamSpec("a", (3,)), ParamSpec("b", ())], 7, 1)
    assert layout.shard_numel == 1
    held = [sum(mine.numel for mine in layout.local_slices(rank)) for rank in range(7)]
    assert held == [1, 1, 1, 1, 0, 0, 0]


def test_a_bucket_without_elements_takes_no_memory() -> None:
    layout = plan_contiguous([ParamSpec("a", (0, 5))], 3, 8)
    assert (layout.padded_numel, layout.numel, layout.shard_numel) == (0, 0, 0)
    assert layout.local_slices(2)[0].numel == 0


@given(st.integers(0, 1000), st.integers(1, 50))
def test_rounding_up_gives_the_next_multiple(value: int, multiple: int) -> None:
    rounded = round_up(value, multiple)
    assert rounded % multiple == 0
    assert value <= rounded < value + multiple


@given(st.integers(1, 40), st.lists(st.sampled_from([1, 2, 4, 8, 16]), min_size=1, max_size=3))
def test_aligned_elements_are_sixteen_bytes_in_every_dtype(alignment: int, itemsizes: list[int]) -> None:
    elements = aligned_elements(alignment, *itemsizes)
    assert elements % alignment == 0
    assert all(elements * itemsize % 16 == 0 for itemsize in itemsizes)
    assert elements <= alignment * 16


@pytest.mark.parametrize("alignment", [0, -8])
def test_an_alignment_below_one_is_refused(alignment: int) -> None:
    with pytest.raises(ValueError, match=f"positive number of elements, got {alignment}"):
        aligned_elements(alignment, 4)


A, B = ParamSpec("a", (4,)), ParamSpec("b", (2,))


@pytest.mark.parametrize(
    ("specs", "spans", "world_size", "shard_numel", "alignment", "message"),
    [
        ((A,), (), 1, 8, 1, "1 parameters but 0 ranges"),
        ((A,), (ParamSpan(0, 4),), 0, 8, 1, "positive world size"),
        ((A,), (ParamSpan(0, 4),), 1, 8, 0, "positive world size"),
        ((A,), (ParamSpan(0, 4),), 1, 9, 2, "multiple of the alignment"),
        ((A,), (ParamSpan(0, 3),), 1, 8, 1, "a has 4 elements but a range of 3"),
        ((A,), (ParamSpan(1, 4),), 1, 8, 2, "a starts at 1, which is not aligned to 2"),
        ((A, B), (ParamSpan(0, 4), ParamSpan(3, 2)), 1, 8, 1, "b starts at 3.*overlaps the parameter that ends at 4"),
        ((A, B), (ParamSpan(0, 4), ParamSpan(4, 2)), 2, 2, 1, "parameters end at 6, behind the buffer of 4"),
    ],
)
def test_a_layout_that_contradicts_itself_is_refused(
    specs: tuple[ParamSpec, ...],
    spans: tuple[ParamSpan, ...],
    world_size: int,
    shard_numel: int,
    alignment: int,
    message: str,
) -> None:
    with pytest.raises(ValueError, match=message):
        FlatLayout(specs, spans, world_size, shard_numel, alignment)
