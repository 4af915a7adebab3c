"""Dtype and device changes of whatever goes into or comes out of a forward."""

from typing import Any

import torch
from torch.utils._pytree import tree_map_only

__all__ = ["cast_floating", "move_to_device"]


def cast_floating(value: Any, dtype: torch.dtype) -> Any:
    """Casts the floating-point tensors in a nest of containers; what has the dtype already is returned as it is."""
    if isinstance(value, torch.Tensor):
        return value.to(dtype) if value.is_floating_point() and value.dtype != dtype else value
    return tree_map_only(torch.Tensor, lambda t: t.to(dtype) if t.is_floating_point() else t, value)


def move_to_device(value: Any, device: torch.device) -> Any:
    """Moves the tensors in a nest of containers, without waiting where the source is pinned."""
    return tree_map_only(torch.Tensor, lambda t: t.to(device, non_blocking=True) if t.device != device else t, value)
