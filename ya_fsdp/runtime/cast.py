"""Dtype and device changes of whatever goes into or comes out of a forward."""

from collections.abc import Callable
from copy import copy
from dataclasses import fields, is_dataclass
from typing import Any

import torch
from torch.utils._pytree import tree_map

__all__ = ["cast_floating", "move_to_device"]


def cast_floating(value: Any, dtype: torch.dtype) -> Any:
    """Casts the floating-point tensors in a nest of containers; what has the dtype already is returned as it is."""
    return _map(value, lambda t: t.to(dtype) if t.is_floating_point() and t.dtype != dtype else t)


def move_to_device(value: Any, device: torch.device) -> Any:
    """Moves the tensors in a nest of containers, without waiting where the source is pinned."""
    return _map(value, lambda t: t.to(device, non_blocking=True) if t.device != device else t)


def _map(value: Any, function: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    """Applies a function to the tensors in containers and dataclasses; a dataclass with other tensors is a new one."""
    if isinstance(value, torch.Tensor):
        return function(value)

    def change(leaf: Any) -> Any:
        if isinstance(leaf, torch.Tensor):
            return function(leaf)
        if not is_dataclass(leaf) or isinstance(leaf, type):
            return leaf
        old = {member.name: getattr(leaf, member.name) for member in fields(leaf)}
        new = {name: _map(member, function) for name, member in old.items()}
        if all(new[name] is old[name] for name in old):
            return leaf
        result = copy(leaf)
        for name, member in new.items():
            object.__setattr__(result, name, member)  # also where the dataclass is frozen
        return result

    return tree_map(change, value)
