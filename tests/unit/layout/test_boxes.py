"""A flat range of a tensor is cut into few boxes that cover it once, in order."""

from math import prod

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.unit.layout.strategies import non_empty_shapes
from ya_fsdp.layout.boxes import boxes


@st.composite
def ranges(draw: st.DrawFn) -> tuple[tuple[int, ...], int, int]:
    """Return a shape and a range of its elements."""
    shape = draw(non_empty_shapes)
    start = draw(st.integers(0, prod(shape)))
    return shape, start, draw(st.integers(start, prod(shape)))


@given(ranges())
def test_boxes_cover_the_range_once_in_flat_order(drawn: tuple[tuple[int, ...], int, int]) -> None:
    shape, start, stop = drawn
    elements = np.arange(prod(shape)).reshape(shape)
    end = 0
    for box in boxes(shape, start, stop):
        inside = elements[tuple(slice(o, o + s) for o, s in zip(box.offsets, box.sizes, strict=True))]
        assert inside.shape == box.sizes
        assert box.start == end
        assert box.numel == inside.size > 0
        # Contiguous: the box's elements, in its own order, are a run of the flat range.
        assert inside.reshape(-1).tolist() == list(range(start + end, start + end + box.numel))
        end += box.numel
    assert end == stop - start


@given(ranges())
def test_a_range_of_n_dimensions_takes_at_most_two_n_minus_one_boxes(drawn: tuple[tuple[int, ...], int, int]) -> None:
    shape, start, stop = drawn
    assert len(boxes(shape, start, stop)) <= max(1, 2 * len(shape) - 1)


@given(non_empty_shapes)
def test_a_whole_tensor_is_one_box(shape: tuple[int, ...]) -> None:
    (box,) = boxes(shape, 0, prod(shape))
    assert (box.offsets, box.sizes, box.start) == ((0,) * len(shape), shape, 0)


@given(st.lists(st.integers(0, 4), max_size=4).map(tuple))
def test_an_empty_range_has_no_box(shape: tuple[int, ...]) -> None:
    assert boxes(shape, 0, 0) == ()


@pytest.mark.parametrize(("start", "stop"), [(-1, 2), (0, 7), (4, 3)])
def test_a_range_outside_of_the_tensor_is_refused(start: int, stop: int) -> None:
    with pytest.raises(ValueError, match=rf"\[{start}, {stop}\) leaves a tensor of shape \(2, 3\)"):
        boxes((2, 3), start, stop)
