"""Gives a unit's parameters memory and the values and dtype to start from, just before it is sharded."""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from ya_fsdp._torch_compat import get_module_state
from ya_fsdp.wrapper.options import Precision

__all__ = ["UnitPreparation", "own_modules"]

_Slot = tuple[dict[str, Any], str]
"""A module's dict of parameters or buffers, and a name in it."""


def own_modules(modules: Sequence[nn.Module]) -> list[nn.Module]:
    """Modules of a unit's trees without those that are sharded already."""
    found: dict[nn.Module, None] = {}

    def walk(module: nn.Module) -> None:
        if module not in found and get_module_state(module) is None:
            found[module] = None
            for child in module.children():
                walk(child)

    for module in modules:
        walk(module)
    return list(found)


class UnitPreparation:
    """Materialises, casts and synchronises one unit after the other, so that only one is whole at a time.

    Args:
        model: The model, for names.
        param_init_fn: Gives a module's own parameters and buffers memory and values.
        sync_group: Take all values from the first rank of this group; None: keep each rank's own.
        device: Where values are exchanged.
        precision: Dtype that parameters are kept in.
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        param_init_fn: Callable[[nn.Module], object] | None,
        sync_group: dist.ProcessGroup | None,
        device: torch.device,
        precision: Precision,
    ) -> None:
        self._paths = {module: path for path, module in model.named_modules()}
        self._init = param_init_fn
        self._sync_group = sync_group
        self._device = device
        self._precision = precision
        self._check_source(model)

    def __call__(self, modules: Sequence[nn.Module]) -> None:
        """Prepares what the modules hold and no unit has taken. A collective if values are synchronised."""
        members = own_modules(modules)
        if any(tensor.is_meta for tensor in _tensors(members)):
            self._materialize(members)
        for tensor in _tensors(members):
            if isinstance(tensor, nn.Parameter):
                if not self._precision.is_trainable:
                    tensor.requires_grad_(False)
                tensor.data = tensor.data.to(self._precision.stored(tensor))
        if self._sync_group is not None and self._sync_group.size() > 1:
            for tensor in _tensors(members):
                full = tensor.detach().to(self._device).contiguous()
                dist.broadcast(full, group_src=0, group=self._sync_group)
                tensor.data = full

    def _materialize(self, members: list[nn.Module]) -> None:
        """Runs the user's function on the modules whose own tensors have no memory; ties stay ties."""
        slots: dict[int, list[_Slot]] = {}
        for module in members:
            for table in _tables(module):
                for name, tensor in table.items():
                    if tensor is not None:
                        slots.setdefault(id(tensor), []).append((table, name))
        for module in members:
            if any(self._without_memory([module])):
                if self._init is not None:
                    self._init(module)
                else:  # the values come from another rank
                    module.to_empty(device=self._device, recurse=False)
        for places in slots.values():
            (table, name), *others = places
            for other, alias in others:
                other[alias] = table[name]
        left = next(self._without_memory(members), None)
        if left is not None:
            raise ValueError(
                f"YaFSDP: rank {dist.get_rank()}: param_init_fn left {left} on the meta device; it has to give memory "
                f"to every parameter and buffer of the module that it gets, as module.to_empty(device=..., "
                f"recurse=False) does"
            )

    def _check_source(self, model: nn.Module) -> None:
        """Refuses, on all ranks alike, a model that has no values to start from, or other tensors than the source's."""
        first = next(self._without_memory(list(model.modules())), None)
        group = self._sync_group
        problem = None
        if first is not None and self._init is None and (group is None or group.rank() == 0):
            problem = (
                f"{first} is on the meta device on rank {dist.get_rank()}, so there is nothing to start from: give "
                f"param_init_fn, or real weights on the first rank with sync_module_states=True"
            )
        if group is not None:
            own = self._tensor_list(model)
            source: list[list[str]] = [own]
            dist.broadcast_object_list(source, group_src=0, group=group)
            if problem is None and own != source[0]:
                differing = sorted(set(own) ^ set(source[0])) or ["their order"]
                problem = (
                    f"sync_module_states: rank {dist.get_rank()} has another model than the first rank: {differing[:4]}"
                )
            problems: list[str | None] = [None] * group.size()
            dist.all_gather_object(problems, problem, group=group)
            problem = next((found for found in problems if found is not None), None)
        if problem is not None:
            raise ValueError(f"YaFSDP: {problem}")

    def _tensor_list(self, model: nn.Module) -> list[str]:
        """Names, shapes and, where it counts, dtypes of all parameters and buffers, in the order of the exchange."""
        found = []
        for module in model.modules():
            for table in _tables(module):
                for name, tensor in table.items():
                    if tensor is not None:
                        dtype = self._precision.stored(tensor) if isinstance(tensor, nn.Parameter) else tensor.dtype
                        found.append(
                            f"{self._paths[module]}.{name}".removeprefix(".") + f" {list(tensor.shape)} {dtype}"
                        )
        return found

    def _without_memory(self, members: Sequence[nn.Module]) -> Iterator[str]:
        for module in members:
            for table in _tables(module):
                for name, tensor in table.items():
                    if tensor is not None and tensor.is_meta:
                        yield f"{self._paths[module]}.{name}".removeprefix(".")


def _tables(module: nn.Module) -> tuple[dict[str, Any], dict[str, Any]]:
    return module._parameters, module._buffers


def _tensors(members: Sequence[nn.Module]) -> Iterator[torch.Tensor]:
    """Parameters and buffers, each once."""
    seen: set[int] = set()
    for module in members:
        for table in _tables(module):
            for tensor in table.values():
                if tensor is not None and id(tensor) not in seen:
                    seen.add(id(tensor))
                    yield tensor
