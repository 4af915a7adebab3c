"""The plan of a reduction divides by exactly what was asked for, with an operator that every backend gets right."""

import math

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st

from ya_fsdp.comm import Reduction, plan_reduction

AVG, SUM = dist.ReduceOp.AVG, dist.ReduceOp.SUM
ranks = st.integers(1, 20000)
dtypes = st.sampled_from([torch.float32, torch.bfloat16, torch.float16, torch.float64])
factors = st.floats(1e-6, 1e6)
LARGEST = torch.finfo(torch.float16).max


def divisor(plan: Reduction, num_ranks: int) -> float:
    """Return what a plan divides the sum over ranks by."""
    return (num_ranks if plan.op == AVG else 1) / (plan.pre_scale * plan.post_scale)


@given(ranks, dtypes, st.none() | factors, st.booleans())
def test_the_sum_is_divided_by_the_factor_or_by_the_ranks(
    num_ranks: int, dtype: torch.dtype, factor: float | None, force_sum: bool
) -> None:
    plan = plan_reduction(num_ranks, dtype, divide_factor=factor, force_sum=force_sum)
    expected = num_ranks if factor is None else factor
    assert divisor(plan, num_ranks) == pytest.approx(expected, rel=1e-14)


@given(ranks, dtypes, st.none() | factors, st.booleans())
def test_averages_are_left_to_the_collective_only_if_they_are_what_was_asked_for(
    num_ranks: int, dtype: torch.dtype, factor: float | None, force_sum: bool
) -> None:
    plan = plan_reduction(num_ranks, dtype, divide_factor=factor, force_sum=force_sum)
    may_average = not force_sum and dtype is not torch.float16 and factor in (None, num_ranks)
    assert plan.op == (AVG if may_average else SUM)
    if may_average:
        assert (plan.pre_scale, plan.post_scale) == (1.0, 1.0), "nothing is left to scale"


@given(ranks, st.sampled_from([torch.float32, torch.bfloat16]), factors)
def test_dtypes_with_range_enough_are_scaled_once(num_ranks: int, dtype: torch.dtype, factor: float) -> None:
    assert plan_reduction(num_ranks, dtype, divide_factor=factor).pre_scale == 1.0


@given(ranks, st.none() | st.floats(1.0, 1e6))
def test_fp16_loses_no_more_than_the_root_of_the_factor_on_either_side(num_ranks: int, factor: float | None) -> None:
    plan = plan_reduction(num_ranks, torch.float16, divide_factor=factor)
    root = math.sqrt(num_ranks if factor is None else factor)
    # The sum on the way is at most `root` times the result, and what is sent at least the gradient over 2 `root`.
    assert 1 / plan.post_scale <= root * (1 + 1e-12)
    assert 1 / plan.pre_scale < 2 * root + 1e-12 or plan.pre_scale == 1.0
    assert math.frexp(plan.pre_scale)[0] == 0.5, "a power of two loses no digit"


@given(st.integers(1, 2048), st.floats(1e-2, 1.0))
def test_an_fp16_average_that_leaves_room_for_the_root_of_the_ranks_is_reached(num_ranks: int, share: float) -> None:
    average = torch.tensor(LARGEST * share / math.sqrt(num_ranks)).half()
    plan = plan_reduction(num_ranks, torch.float16)
    total = torch.tensor(0.0, dtype=torch.float16)
    for _ in range(num_ranks if num_ranks < 64 else 0):
        total = total + average * plan.pre_scale
    if num_ranks >= 64:  # one multiplication instead of a long sum, whose rounding is not the matter here
        total = (average * plan.pre_scale).double().mul(num_ranks).half()
    assert total.isfinite()
    reduced = float(total * plan.post_scale)
    assert reduced == pytest.approx(float(average), rel=2e-2)


def test_two_ranks_average_the_largest_fp16_numbers() -> None:
    plan = plan_reduction(2, torch.float16)
    gradient = torch.tensor(LARGEST, dtype=torch.float16)
    total = gradient * plan.pre_scale + gradient * plan.pre_scale
    assert float(total * plan.post_scale) == LARGEST


@pytest.mark.parametrize("factor", [0.0, -1.0, float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_a_factor_that_is_not_positive_and_finite_is_refused(factor: float, dtype: torch.dtype) -> None:
    with pytest.raises(ValueError, match=f"positive and finite, got {factor}"):
        plan_reduction(4, dtype, divide_factor=factor)
