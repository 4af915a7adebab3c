"""How gradients are added up and divided, as a value."""

from dataclasses import dataclass
from functools import cache
from math import isfinite

import torch
import torch.distributed as dist

__all__ = ["Reduction", "check_divide_factor", "plan_reduction"]


@dataclass(frozen=True, slots=True)
class Reduction:
    """``post_scale * op(pre_scale * gradient over ranks)``; a scale of 1 is not applied.

    Attributes:
        pre_scale: Factor on every rank's gradient before it is sent.
        op: ``SUM`` or ``AVG``.
        post_scale: Factor on the reduced shard.
    """

    pre_scale: float
    op: dist.ReduceOp.RedOpType
    post_scale: float


def check_divide_factor(factor: float) -> None:
    """Raises ValueError if gradients cannot be divided by ``factor``."""
    if not (factor > 0 and isfinite(factor)):
        raise ValueError(f"the gradient divide factor must be positive and finite, got {factor}")


@cache
def plan_reduction(
    num_ranks: int, dtype: torch.dtype, *, divide_factor: float | None = None, force_sum: bool = False
) -> Reduction:
    """Chooses operator and scales.

    By default gradients are averaged. In fp16 a sum over ranks overflows before it is divided, so the division is
    split: about the square root of it (a power of two, which is exact) before the sum, the rest behind it. Other dtypes
    have range enough and are divided once. Equal arguments give one object.

    Args:
        num_ranks: Ranks that contribute a gradient.
        dtype: Dtype of the reduction.
        divide_factor: Divide the sum by this instead of ``num_ranks``; any positive number.
        force_sum: Use no other operator than ``SUM``.

    Raises:
        ValueError: If ``divide_factor`` is not positive and finite.
    """
    if divide_factor is not None:
        check_divide_factor(divide_factor)
    factor = float(num_ranks if divide_factor is None else divide_factor)
    if dtype is torch.float16:
        before = 1.0
        while before * before < factor:
            before *= 2
        return Reduction(1.0 / before, dist.ReduceOp.SUM, before / factor)
    if factor == num_ranks and not force_sum:
        return Reduction(1.0, dist.ReduceOp.AVG, 1.0)
    return Reduction(1.0, dist.ReduceOp.SUM, 1.0 / factor)
