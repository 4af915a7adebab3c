"""peft's merging of adapters into sharded weights, layer by layer, as trl does it to hand weights to a generator.

A merge multiplies the two factors of an adapter, which a rank that holds a slice of each cannot do. So each layer is
gathered, merged, and its result sliced again; no rank ever holds more than one whole layer. What the weights were is
kept in slices, so that taking the adapters out again restores every bit; peft itself subtracts, and keeps the rounding.
"""

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn

from accelerate_plugin.hooks import unless_asked
from ya_fsdp import RaggedShardDTensor

__all__ = ["wrap_merge_adapter", "wrap_unmerge_adapter"]

Function = Callable[..., Any]
_KEPT = "_ya_fsdp_before_merge"


def wrap_merge_adapter(original: Function) -> Function:
    """Merges the adapters of a sharded model in its slices. A collective."""

    @unless_asked(original)
    def merge_adapter(self: Any, adapter_names: list[str] | None = None, safe_merge: bool = False) -> None:
        if not _is_sharded(self.model):
            original(self, adapter_names=adapter_names, safe_merge=safe_merge)
            return
        self._check_merge_allowed()
        for layer in _adapted_layers(self.model):
            base = _sharded(layer.get_base_layer())
            if not hasattr(layer, _KEPT):
                setattr(layer, _KEPT, [(part, part.to_local().detach().clone()) for *_, part in base])
            with _whole(layer):
                layer.merge(safe_merge=safe_merge, adapter_names=adapter_names)
                merged = [module._parameters[name] for module, name, _ in base]
            with torch.no_grad():
                for (*_, part), value in zip(base, merged, strict=True):
                    assert value is not None
                    part.copy_(value)

    return merge_adapter


def wrap_unmerge_adapter(original: Function) -> Function:
    """Takes the adapters of a sharded model out again, bit for bit."""

    @unless_asked(original)
    def unmerge_adapter(self: Any) -> None:
        if not _is_sharded(self.model):
            original(self)
            return
        for layer in _adapted_layers(self.model):
            with _whole(layer):
                layer.unmerge()  # for its own records; the values come from what was kept
            with torch.no_grad():
                for part, kept in layer.__dict__.pop(_KEPT, ()):
                    part.to_local().copy_(kept)

    return unmerge_adapter


def _adapted_layers(model: nn.Module) -> Iterator[Any]:
    from peft.tuners.tuners_utils import BaseTunerLayer

    return (module for module in model.modules() if isinstance(module, BaseTunerLayer))


def _is_sharded(model: nn.Module) -> bool:
    return any(isinstance(parameter, RaggedShardDTensor) for parameter in model.parameters())


def _sharded(layer: nn.Module) -> list[tuple[nn.Module, str, Any]]:
    """Where a layer holds sharded parameters, and which."""
    return [
        (module, name, parameter)
        for module in layer.modules()
        for name, parameter in module._parameters.items()
        if isinstance(parameter, RaggedShardDTensor)
    ]


@contextlib.contextmanager
def _whole(layer: nn.Module) -> Iterator[None]:
    """Shows whole parameters in place of a layer's sharded ones. A collective."""
    places = _sharded(layer)
    try:
        for module, name, parameter in places:
            module._parameters[name] = nn.Parameter(parameter.full_tensor().detach(), parameter.requires_grad)
        yield
    finally:
        for module, name, parameter in places:
            module._parameters[name] = parameter
