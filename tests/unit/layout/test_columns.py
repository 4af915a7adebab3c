"""Column chunks carry exactly the columns of the [world_size, shard_numel] view, with few copies of bounded size."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from tests.unit.layout.strategies import layouts
from tests.unit.layout.test_flat import naive_flat
from ya_fsdp.layout import FlatLayout, ParamSpec, plan_contiguous
from ya_fsdp.layout.columns import Block, ColumnChunk, column_chunks, param_blocks

limits = st.integers(1, 3000)


def copy_block(staging: np.ndarray, param: np.ndarray, block: Block) -> None:
    """Copy row by row, as the fields of a block say; numpy refuses what leaves either array."""
    for row in range(block.rows):
        source = block.param_offset + row * block.param_stride
        target = block.staging_offset + row * block.staging_stride
        assert 0 <= source <= source + block.width <= param.size
        assert 0 <= target <= target + block.width <= staging.size
        assert not staging[target : target + block.width].any(), "written twice"
        staging[target : target + block.width] = param[source : source + block.width]


@given(layouts(), limits)
def test_chunks_cover_the_shard_in_aligned_steps_below_the_limit(layout: FlatLayout, limit: int) -> None:
    chunks = column_chunks(layout, limit)
    assert [chunk.first for chunk in chunks] == [0, *(chunk.stop for chunk in chunks[:-1])]
    assert chunks[-1].stop == layout.shard_numel
    largest = max(limit, layout.world_size * layout.alignment)
    for chunk in chunks:
        assert chunk.width > 0 or layout.shard_numel == 0
        assert chunk.width * layout.world_size <= largest
        assert chunk.first % layout.alignment == 0
        assert chunk.width % layout.alignment == 0
    if layout.padded_numel <= limit:
        assert len(chunks) == 1


@given(layouts(), limits)
def test_there_are_no_more_chunks_than_the_limit_asks_for(layout: FlatLayout, limit: int) -> None:
    chunks = column_chunks(layout, limit)
    if len(chunks) > 1:
        widest = max(layout.alignment, limit // layout.world_size // layout.alignment * layout.alignment)
        assert len(chunks) <= -(-layout.shard_numel // widest)
        widths = [chunk.width for chunk in chunks[:-1]]
        assert len(set(widths)) == 1, "chunks of equal width reuse each other's memory"


@given(layouts(), limits)
def test_blocks_carry_the_columns_of_the_two_dimensional_view(layout: FlatLayout, limit: int) -> None:
    flat = naive_flat(layout)
    view = flat.reshape(layout.world_size, layout.shard_numel)
    for chunk in column_chunks(layout, limit):
        staging = np.zeros(layout.world_size * chunk.width, dtype=flat.dtype)
        for span in layout.spans:
            blocks = param_blocks(span, layout.shard_numel, chunk)
            assert len(blocks) <= 3
            for block in blocks:
                copy_block(staging, flat[span.start : span.stop], block)
        np.testing.assert_array_equal(
            staging.reshape(layout.world_size, chunk.width), view[:, chunk.first : chunk.stop]
        )


@given(layouts(), st.data())
def test_blocks_are_right_for_any_columns(layout: FlatLayout, data: st.DataObject) -> None:
    first = data.draw(st.integers(0, layout.shard_numel))
    chunk = ColumnChunk(first, data.draw(st.integers(first, layout.shard_numel)))
    flat = naive_flat(layout)
    staging = np.zeros(layout.world_size * chunk.width, dtype=flat.dtype)
    for span in layout.spans:
        for block in param_blocks(span, layout.shard_numel, chunk):
            assert block.rows > 0
            assert block.width > 0
            copy_block(staging, flat[span.start : span.stop], block)
    view = flat.reshape(layout.world_size, layout.shard_numel)
    np.testing.assert_array_equal(staging.reshape(layout.world_size, chunk.width), view[:, chunk.first : chunk.stop])


def test_a_whole_bucket_needs_one_block_per_parameter() -> None:
    layout = plan_contiguous([ParamSpec("a", (50, 7)), ParamSpec("b", (3,))], 4, 8)
    (chunk,) = column_chunks(layout, layout.padded_numel)
    assert [len(param_blocks(span, layout.shard_numel, chunk)) for span in layout.spans] == [1, 1]


def test_an_embedding_over_a_thousand_ranks_is_chunked_by_arithmetic() -> None:
    layout = plan_contiguous([ParamSpec("embedding", (128256, 8192))], 1024, 8)
    limit = 32 * 2**20
    chunks = column_chunks(layout, limit)
    assert len(chunks) == -(-layout.padded_numel // limit) or len(chunks) == -(-layout.padded_numel // limit) + 1
    copied = sum(b.rows * b.width for c in chunks for b in param_blocks(layout.spans[0], layout.shard_numel, c))
    assert copied == 128256 * 8192
