"""The input of a reduction equals a naive flatten of the gradients, whole or in column chunks."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.unit.layout.strategies import layouts
from ya_fsdp.layout import FlatLayout, ParamSpec, plan_contiguous
from ya_fsdp.runtime.gradients import GradientStager, member_views

DTYPES = st.sampled_from([torch.float32, torch.bfloat16, torch.float16])
GARBAGE = 777.0


def naive_flatten(layout: FlatLayout, grads: list[torch.Tensor | None], dtype: torch.dtype) -> torch.Tensor:
    """Return ``[world_size, shard_numel]``: the specification of all chunks together."""
    flat = torch.zeros(layout.padded_numel, dtype=dtype)
    for span, grad in zip(layout.spans, grads, strict=True):
        if grad is not None:
            flat[span.start : span.stop] = torch.cat([torch.empty(0), grad.flatten()]).to(dtype)
    return flat.view(layout.world_size, layout.shard_numel)


@st.composite
def gradients(draw: st.DrawFn, layout: FlatLayout, dtype: torch.dtype) -> list[torch.Tensor | None]:
    """Return gradients of a bucket: contiguous, transposed, expanded, sliced out of a larger tensor, or missing."""
    grads: list[torch.Tensor | None] = []
    for number, spec in enumerate(layout.specs):
        form = draw(st.sampled_from(["plain", "transposed", "expanded", "slice", "missing"]))
        values = (torch.arange(spec.numel, dtype=torch.float32) % 50 + number + 1).view(spec.shape)
        grad: torch.Tensor | None = values.to(dtype)
        assert grad is not None
        if form == "transposed" and grad.ndim > 1:
            grad = grad.transpose(0, -1).contiguous().transpose(0, -1)
        elif form == "expanded":
            grad = torch.tensor(number + 1.5, dtype=dtype).expand(spec.shape)
        elif form == "slice":
            grad = torch.nn.functional.pad(grad, (2, 3))[..., 2:-3] if grad.ndim else grad
        grads.append(None if form == "missing" else grad)
    return grads


@settings(deadline=None)
@given(st.data(), layouts(), DTYPES, DTYPES, st.integers(1, 3000))
def test_filling_equals_a_naive_flatten(
    data: st.DataObject, layout: FlatLayout, grad_dtype: torch.dtype, dtype: torch.dtype, limit: int
) -> None:
    grads = data.draw(gradients(layout, grad_dtype))
    stager = GradientStager(layout, limit)
    expected = naive_flatten(layout, [None if g is None else g.float() for g in grads], dtype)
    for index, chunk in enumerate(stager.chunks):
        staging = torch.full((layout.world_size * chunk.width,), GARBAGE, dtype=dtype)
        stager.fill(staging, index, grads)
        found = staging.view(layout.world_size, chunk.width)
        torch.testing.assert_close(found, expected[:, chunk.first : chunk.stop], rtol=0, atol=0)
        # And by whatever way is shortest for these gradients.
        found = stager.stage(index, grads, dtype, torch.device("cpu")).view(layout.world_size, chunk.width)
        torch.testing.assert_close(found, expected[:, chunk.first : chunk.stop], rtol=0, atol=0)


@pytest.mark.parametrize("world_size", [4, 5])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_gradients_that_need_no_cast_are_staged_by_one_operator(world_size: int, dtype: torch.dtype) -> None:
    layout = plan_contiguous([ParamSpec("a", (8, 4)), ParamSpec("b", (16,))], world_size, 4)
    padding = layout.padded_numel - layout.numel
    assert (padding > 0) == (world_size == 5)
    grads = [torch.randn(8, 4), torch.randn(16)]
    stager = GradientStager(layout, 1000)
    with torch.profiler.profile() as profile:
        staging = stager.stage(0, grads, dtype, torch.device("cpu"))
    names = {event.key for event in profile.key_averages()}
    assert ("aten::cat" in names) == (dtype == torch.float32), names
    assert ("aten::_foreach_copy_" in names) == (dtype != torch.float32), names
    expected = torch.cat([grads[0].view(-1), grads[1], torch.zeros(padding)]).to(dtype)
    assert torch.equal(staging, expected)


@pytest.mark.parametrize("limit", [10_000, 40])
def test_a_bucket_without_any_gradient_is_filled_with_zeros(limit: int) -> None:
    layout = plan_contiguous([ParamSpec("a", (5, 7)), ParamSpec("b", (9,))], 3, 2)
    stager = GradientStager(layout, limit)
    for index, chunk in enumerate(stager.chunks):
        staging = torch.full((3 * chunk.width,), GARBAGE)
        stager.fill(staging, index, [None, None])
        assert not staging.any()


def test_staging_may_be_a_part_of_a_larger_tensor() -> None:
    layout = plan_contiguous([ParamSpec("a", (11, 3))], 4, 1)
    stager = GradientStager(layout, 8)
    assert len(stager.chunks) > 1
    grad = torch.arange(1.0, 34.0).view(11, 3)
    expected = naive_flatten(layout, [grad], torch.float32)
    for index, chunk in enumerate(stager.chunks):
        memory = torch.full((5 + 4 * chunk.width + 5,), GARBAGE)
        stager.fill(memory[5:-5], index, [grad])
        assert (memory[:5] == GARBAGE).all()
        assert (memory[-5:] == GARBAGE).all()
        assert torch.equal(memory[5:-5].view(4, -1), expected[:, chunk.first : chunk.stop])


@given(layouts())
def test_member_views_are_the_parameters_places_in_the_same_memory(layout: FlatLayout) -> None:
    flat = torch.arange(layout.padded_numel)
    views = member_views(flat, layout.partition)
    for span, view in zip(layout.spans, views, strict=True):
        assert torch.equal(view, flat[span.start : span.stop])
        assert view.untyped_storage()._cdata == flat.untyped_storage()._cdata
