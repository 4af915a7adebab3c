"""Weights that travel in 8 bits, in plain torch: what a parameter with gather hooks may look like."""

from typing import Any

import torch
import torch.distributed as dist
from torch import nn

LEVELS = 127


def quantise(weight: torch.Tensor, largest: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return 8-bit integers and the scale by which they are to be multiplied."""
    scale = largest.clamp(min=1e-12) / LEVELS
    return (weight / scale).round().to(torch.int8), scale


class Wrapped(torch.Tensor):
    """A tensor around another one; operators work on the inner tensor and give ordinary tensors."""

    @staticmethod
    def __new__(cls, data: torch.Tensor) -> Any:
        return torch.Tensor._make_wrapper_subclass(cls, data.shape, dtype=data.dtype, device=data.device)

    def __init__(self, data: torch.Tensor) -> None:
        self.inner = data

    def __tensor_flatten__(self) -> tuple[list[str], Any]:
        return ["inner"], None

    @classmethod
    def __tensor_unflatten__(cls, inner: dict[str, torch.Tensor], context: Any, size: Any, stride: Any) -> Any:
        return cls(inner["inner"])

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        args, kwargs = torch.utils._pytree.tree_map_only(Wrapped, lambda t: t.inner, (args, kwargs or {}))
        result = func(*args, **kwargs)
        keeps = func in (torch.ops.aten.detach.default, torch.ops.aten._to_copy.default)
        return cls(result) if keeps else result


class OneScale(Wrapped):
    """One scale for the whole tensor, agreed upon between ranks; it goes to the second hook as metadata."""

    calls: list[str] = []

    def fsdp_pre_all_gather(self, mesh, outer_size, outer_stride, module, mp_policy):
        assert self.shape[1:] == outer_size[1:]
        assert isinstance(module, nn.Linear)
        self.calls.append("pre")
        largest = self.inner.abs().max()
        dist.all_reduce(largest, op=dist.ReduceOp.MAX, group=mesh.get_group())
        integers, scale = quantise(self.inner, largest)
        return (integers,), (scale, tuple(outer_size))

    def fsdp_post_all_gather(self, all_gather_outputs, metadata, param_dtype, *, out=None):
        self.calls.append("post")
        (integers,), (scale, size) = all_gather_outputs, metadata
        assert integers.dtype == torch.int8
        assert integers.shape == size
        full = integers.to(param_dtype) * scale.to(param_dtype)
        if out is not None:
            out.copy_(full)
            return None
        return full, (full,)


class Stays8Bit(torch.Tensor):
    """An unsharded weight that stays in 8 bits and is multiplied out where it is used."""

    @staticmethod
    def __new__(cls, integers: torch.Tensor, scale: torch.Tensor, dtype: torch.dtype) -> Any:
        return torch.Tensor._make_wrapper_subclass(cls, integers.shape, dtype=dtype, device=integers.device)

    def __init__(self, integers: torch.Tensor, scale: torch.Tensor, dtype: torch.dtype) -> None:
        self.integers, self.scale = integers, scale

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.detach.default:
            return cls(args[0].integers, args[0].scale, args[0].dtype)
        whole = lambda t: t.integers.to(t.dtype) * t.scale.to(t.dtype)  # noqa: E731
        args, kwargs = torch.utils._pytree.tree_map_only(Stays8Bit, whole, (args, kwargs or {}))
        return func(*args, **kwargs)


class ScalePerRank(Wrapped):
    """Each rank has its own scale, which is gathered too; the gathered weight stays in 8 bits."""

    def fsdp_pre_all_gather(self, mesh):
        integers, scale = quantise(self.inner, self.inner.abs().max())
        return (integers, scale.reshape(1)), None

    def fsdp_post_all_gather(self, all_gather_outputs, metadata, param_dtype, *, out=None):
        integers, scales = all_gather_outputs
        rows = -(-integers.shape[0] // scales.numel())
        scale = scales.repeat_interleave(rows)[: integers.shape[0], None]
        if out is not None:
            assert out.integers.data_ptr() == integers.data_ptr()
            out.scale = scale
            return None
        return Stays8Bit(integers, scale, param_dtype), (integers,)


class Straight(torch.autograd.Function):
    """What both kinds compute in one process: the forward sees rounded weights, the gradient goes straight through."""

    @staticmethod
    def forward(ctx, weight, num_scales):
        rows = -(-weight.shape[0] // num_scales)
        parts = [quantise(part, part.abs().max()) for part in weight.split(rows)]
        return torch.cat([integers.to(weight.dtype) * scale for integers, scale in parts])

    @staticmethod
    def backward(ctx, grad):
        return grad, None


class RoundedLinear(nn.Linear):
    """The single-process model of a linear layer whose weight travels in 8 bits."""

    num_scales = 1

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.linear(x, Straight.apply(self.weight, self.num_scales), self.bias)
