"""The placement tells every rank's slice by arithmetic, and is a value that travels between processes."""

import copy
import pickle

import pytest
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.placement_types import Placement

from tests.unit.layout.strategies import layouts
from ya_fsdp import RaggedShard
from ya_fsdp.layout import FlatLayout

placements = st.builds(RaggedShard, st.integers(0, 500), st.integers(1, 80))


@given(layouts())
def test_a_placement_gives_the_slices_of_its_layout(layout: FlatLayout) -> None:
    for index, span in enumerate(layout.spans):
        placement = RaggedShard(span.start, layout.shard_numel)
        for rank in range(layout.world_size):
            assert placement.slice_of(span.numel, rank) == layout.local_slices(rank)[index]


@given(placements, st.integers(0, 300))
def test_owners_are_the_ranks_whose_slice_is_not_empty(placement: RaggedShard, numel: int) -> None:
    last = (placement.start + numel) // placement.shard_numel + 2
    expected = [rank for rank in range(last) if placement.slice_of(numel, rank).numel]
    assert list(placement.owners(numel)) == expected


@given(placements, placements)
def test_placements_are_equal_if_and_only_if_their_numbers_are(first: RaggedShard, second: RaggedShard) -> None:
    same = (first.start, first.shard_numel) == (second.start, second.shard_numel)
    assert (first == second) == same
    assert (hash(first) == hash(second)) or not same
    assert len({first, second, RaggedShard(first.start, first.shard_numel)}) == (1 if same else 2)


@given(placements)
def test_pickling_copying_and_printing_give_an_equal_placement(placement: RaggedShard) -> None:
    assert pickle.loads(pickle.dumps(placement)) == placement
    assert copy.deepcopy(placement) == placement
    assert eval(repr(placement), {"RaggedShard": RaggedShard}) == placement
    assert str(placement) == f"R({placement.start}/{placement.shard_numel})"


def test_it_is_a_placement_but_none_of_torchs() -> None:
    placement = RaggedShard(0, 8)
    assert isinstance(placement, Placement)
    assert not isinstance(placement, Shard)
    assert [placement.is_shard(), placement.is_replicate(), placement.is_partial()] == [False] * 3
    assert placement not in (Shard(0), Replicate())


@pytest.mark.parametrize(("start", "shard_numel"), [(-1, 8), (0, -8)])
def test_negative_numbers_are_refused(start: int, shard_numel: int) -> None:
    with pytest.raises(ValueError, match=f"start={start}, shard_numel={shard_numel}"):
        RaggedShard(start, shard_numel)
