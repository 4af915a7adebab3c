"""What the user asks for: dtypes of compute, communication and output, and where shards live."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import lru_cache

import torch

__all__ = ["CPUOffloadPolicy", "MixedPrecisionPolicy", "OffloadPolicy", "ResolvedDtypes"]


@dataclass(frozen=True)
class MixedPrecisionPolicy:
    """Dtypes of one unit.

    Attributes:
        param_dtype: Dtype of forward and backward, and of the all-gather. ``None``: the parameter's own.
        reduce_dtype: Dtype of the gradient reduction. ``None``: the dtype of the forward and backward.
        output_dtype: Floating-point outputs of the unit's forward are cast to it. ``None``: left as they are.
        cast_forward_inputs: Cast floating-point inputs of the unit's forward to ``param_dtype``.
        bit32_acc_for_bit16_reduce_scatter: Send 16-bit gradients but add them up in 32 bits.
        all_gather_dtype_to_param_cls: Parameter class to wrap what was gathered in a given dtype.
    """

    param_dtype: torch.dtype | None = None
    reduce_dtype: torch.dtype | None = None
    output_dtype: torch.dtype | None = None
    cast_forward_inputs: bool = True
    bit32_acc_for_bit16_reduce_scatter: bool = False
    all_gather_dtype_to_param_cls: Mapping[torch.dtype, type[torch.Tensor]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for name in ("param_dtype", "reduce_dtype", "output_dtype"):
            dtype = getattr(self, name)
            if dtype is not None and not (isinstance(dtype, torch.dtype) and dtype.is_floating_point):
                raise ValueError(f"MixedPrecisionPolicy: {name} must be a floating-point torch.dtype, got {dtype!r}")


@dataclass(frozen=True)
class OffloadPolicy:
    """Shards, gradients and optimizer state stay on the device that computes."""


@dataclass(frozen=True)
class CPUOffloadPolicy(OffloadPolicy):
    """Shards, gradients and optimizer state live in host memory.

    Attributes:
        pin_memory: Keep the host shards in pinned memory, so that copies overlap with compute.
    """

    pin_memory: bool = True


@dataclass(frozen=True, slots=True)
class ResolvedDtypes:
    """Dtypes of one parameter with every default filled in.

    Attributes:
        master: The sharded parameter, its gradient and optimizer state.
        compute: The unsharded parameter; also what travels in the all-gather.
        reduce: What travels in the reduce-scatter.
        accumulate: What gradients are added up in, between ranks and over micro-batches.
    """

    master: torch.dtype
    compute: torch.dtype
    reduce: torch.dtype
    accumulate: torch.dtype

    @classmethod
    def resolve(cls, master: torch.dtype, policy: MixedPrecisionPolicy) -> "ResolvedDtypes":
        """Applies a policy to a parameter's own dtype; only floating-point parameters are ever cast."""
        if not master.is_floating_point:
            return _dtypes(master, master, master, master)
        compute = policy.param_dtype or master
        reduce = policy.reduce_dtype or compute
        widens = policy.bit32_acc_for_bit16_reduce_scatter and reduce.itemsize == 2
        return _dtypes(master, compute, reduce, torch.float32 if widens else reduce)


_dtypes = lru_cache(maxsize=None)(ResolvedDtypes)
"""One object for all units with the same dtypes."""
