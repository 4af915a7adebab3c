"""A flat tensor is cut into members and gaps that add up to the whole."""

from hypothesis import given
from hypothesis import strategies as st

from tests.unit.layout.strategies import layouts
from ya_fsdp.layout import FlatLayout, Partition
from ya_fsdp.layout.flat import partition


def member_ranges(cuts: Partition) -> list[tuple[int, int]]:
    """Return start and length of every member."""
    ranges, end = [], 0
    for size, is_member in zip(cuts.sizes, cuts.is_member, strict=True):
        if is_member:
            ranges.append((end, size))
        end += size
    return ranges


@given(st.lists(st.tuples(st.integers(0, 5), st.integers(0, 7)), max_size=10), st.integers(0, 9))
def test_members_lie_where_they_were_given_and_gaps_fill_the_rest(pieces: list[tuple[int, int]], tail: int) -> None:
    ranges, end = [], 0
    for gap, numel in pieces:
        ranges.append((end + gap, numel))
        end += gap + numel
    total = end + tail
    cuts = partition(tuple(ranges), total)
    assert sum(cuts.sizes) == total
    found = member_ranges(cuts)
    assert [numel for _, numel in found] == [numel for _, numel in ranges]
    assert [r for r in found if r[1]] == [r for r in ranges if r[1]]
    gaps = [size for size, is_member in zip(cuts.sizes, cuts.is_member, strict=True) if not is_member]
    assert all(gaps), "an empty gap is no piece"


@given(layouts(), st.data())
def test_layout_and_shards_are_cut_at_their_parameters(layout: FlatLayout, data: st.DataObject) -> None:
    whole = member_ranges(layout.partition)
    assert [r for r in whole if r[1]] == [(s.start, s.numel) for s in layout.spans if s.numel]
    assert sum(layout.partition.sizes) == layout.padded_numel
    rank = data.draw(st.integers(0, layout.world_size - 1))
    cuts = layout.local_partition(rank)
    slices = layout.local_slices(rank)
    assert sum(cuts.sizes) == layout.shard_numel
    assert len(member_ranges(cuts)) == len(slices), "every parameter has a part, an empty one too"
    assert [r for r in member_ranges(cuts) if r[1]] == [(s.shard_offset, s.numel) for s in slices if s.numel]


def test_an_empty_member_takes_no_place_wherever_it_starts() -> None:
    assert partition(((0, 0), (2, 3), (0, 0), (9, 0)), 8) == Partition(
        (0, 2, 3, 0, 0, 3), (True, False, True, True, True, False)
    )


def test_nothing_is_cut_into_nothing() -> None:
    assert partition((), 0) == Partition((), ())
