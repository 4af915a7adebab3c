"""Tensor subclasses as the local slice of a ragged tensor, such as weights that are sent in 8 bits.

A subclass wraps tensors and says which (``__tensor_flatten__``), or is an ordinary tensor with another class. Its
*data* are the inner tensors of its own shape; they are what is cut into slices. The others (a scale) go along.
"""

from typing import Any

import torch
from torch.utils._python_dispatch import is_traceable_wrapper_subclass as _is_wrapper

__all__ = ["data_of", "plain", "with_data"]


def _wraps(tensor: Any) -> bool:
    return _is_wrapper(tensor)


def data_of(tensor: Any) -> dict[str, torch.Tensor]:
    """The data of a tensor by name; a tensor that wraps nothing is its own data, under the empty name."""
    if not _wraps(tensor):
        return {"": tensor.as_subclass(torch.Tensor)}
    inner = {name: getattr(tensor, name) for name in tensor.__tensor_flatten__()[0]}
    return {name: value for name, value in inner.items() if value.shape == tensor.shape}


def with_data(tensor: Any, data: dict[str, torch.Tensor]) -> Any:
    """A tensor of the same class, and with the same attributes, around other data of one common shape."""
    first = next(iter(data.values()))
    if not _wraps(tensor):
        other = first.as_subclass(type(tensor))
        other.__dict__.update(tensor.__dict__)
        return other
    names, context = tensor.__tensor_flatten__()
    inner = {name: data.get(name, getattr(tensor, name)) for name in names}
    return type(tensor).__tensor_unflatten__(inner, context, first.shape, first.stride())


def plain(local: torch.Tensor) -> torch.Tensor:
    """What optimizers, reductions and checkpoints work on: the data where there is one, else the subclass itself."""
    if type(local) is torch.Tensor:
        return local
    data = data_of(local)
    return next(iter(data.values())) if len(data) == 1 else local
