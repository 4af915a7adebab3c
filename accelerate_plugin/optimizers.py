"""Optimizers follow their parameters: from the whole ones they were built with to the sharded ones.

Group count, order and settings, the class and the object itself stay as they were, so that schedulers keep driving it.
State that an optimizer already has is carried over to the shards.
"""

import weakref
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from ya_fsdp import RaggedShardDTensor

__all__ = ["DetachedOptimizer", "KnownParameters", "bind_late", "detach", "inner_optimizer", "refuse_unsuited"]

# By name of the class, or of the package it comes from.
_UNSUITED = {
    "Muon": "it multiplies whole matrices of momentum",
    "Shampoo": "it multiplies whole matrices",
    "SOAP": "it multiplies whole matrices",
    "LBFGS": "it compares whole gradients of several evaluations",
    "Rprop": "it writes single elements by a mask",
    "bitsandbytes": "it works on raw memory of whole tensors, in blocks",
}


class KnownParameters:
    """The parameters that a model had before it was sharded, by identity, without keeping them alive."""

    def __init__(self, model: nn.Module) -> None:
        self._names: dict[int, tuple[weakref.ref[nn.Parameter], str]] = {}
        for name, parameter in model.named_parameters():
            self._names[id(parameter)] = (weakref.ref(parameter), name)

    def name_of(self, parameter: torch.Tensor) -> str | None:
        """The name that a parameter had in the model; None where it was not in it."""
        entry = self._names.get(id(parameter))
        return entry[1] if entry is not None and entry[0]() is parameter else None


def inner_optimizer(optimizer: Any) -> torch.optim.Optimizer:
    """The optimizer inside accelerate's (and other) wrappers."""
    while isinstance(getattr(optimizer, "optimizer", None), torch.optim.Optimizer):
        optimizer = optimizer.optimizer
    assert isinstance(optimizer, torch.optim.Optimizer)
    return optimizer


def refuse_unsuited(optimizer: Any) -> None:
    """Stops optimizers that cannot work on slices, before training rather than at the first step.

    Raises:
        ValueError: naming the optimizer, why, and what works.
    """
    inner = inner_optimizer(optimizer)
    for kind in type(inner).__mro__:
        reason = _UNSUITED.get(kind.__name__) or _UNSUITED.get(kind.__module__.partition(".")[0])
        if reason is not None:
            raise ValueError(
                f"{type(inner).__name__} cannot train sharded parameters: {reason}, and each rank holds a slice; use "
                "one that works element by element (AdamW, SGD, Adagrad, RMSprop) or Adafactor"
            )


@dataclass
class DetachedOptimizer:
    """An optimizer whose parameters have been taken out, so that the whole ones can be freed during sharding.

    Attributes:
        slots: ``(group, index in group, name in the model)`` of each parameter taken out.
        states: state per name.
    """

    optimizer: torch.optim.Optimizer
    slots: list[tuple[int, int, str]]
    states: dict[str, dict[str, Any]]

    def attach(self, parameters: Mapping[str, nn.Parameter]) -> None:
        """Puts the sharded parameters, and the state carried over to them, in place. A collective if there is state."""
        for group, index, name in self.slots:
            self.optimizer.param_groups[group]["params"][index] = parameters[name]
        for name, state in self.states.items():
            self.optimizer.state[parameters[name]] = _carry_state(self.optimizer, name, state, parameters[name])
        self.states.clear()


def detach(optimizer: Any, name_of: Callable[[torch.Tensor], str | None]) -> DetachedOptimizer:
    """Takes the parameters that ``name_of`` knows out of an optimizer; others stay where they are."""
    inner = inner_optimizer(optimizer)
    taken = DetachedOptimizer(inner, [], {})
    for number, group in enumerate(inner.param_groups):
        for index, parameter in enumerate(group["params"]):
            name = name_of(parameter)
            if name is None:
                continue
            taken.slots.append((number, index, name))
            group["params"][index] = nn.Parameter(torch.empty(0), requires_grad=False)
            if parameter in inner.state:
                taken.states[name] = inner.state.pop(parameter)
    return taken


def bind_late(
    optimizer: Any,
    known: Iterable[tuple[KnownParameters, Mapping[str, nn.Parameter]]],
    rank: int,
) -> None:
    """Binds an optimizer that is prepared after its model.

    Args:
        known: for each prepared model, the parameters it had and those it has, by name.

    Raises:
        ValueError: for a parameter that belongs to no prepared model, or an optimizer that cannot work on slices.
    """
    refuse_unsuited(optimizer)
    known = list(known)
    inner = inner_optimizer(optimizer)
    for before, now in known:
        detach(inner, before.name_of).attach(now)
    managed = {id(parameter) for _, now in known for parameter in now.values()}
    for number, group in enumerate(inner.param_groups):
        names = group.get("param_names") or []
        for index, parameter in enumerate(group["params"]):
            if id(parameter) not in managed:
                name = f"{names[index]!r}, " if index < len(names) else ""
                raise ValueError(
                    f"rank {rank}: {type(inner).__name__} holds a parameter that is in no prepared model: {name}number "
                    f"{index} of group {number}, shape {tuple(parameter.shape)}, {parameter.dtype}; build the "
                    "optimizer from the parameters of the model that is passed to accelerator.prepare"
                )


def _carry_state(
    optimizer: torch.optim.Optimizer, name: str, state: dict[str, Any], parameter: nn.Parameter
) -> dict[str, Any]:
    carried = {}
    for key, value in state.items():
        if not isinstance(value, torch.Tensor) or value.dim() == 0:
            carried[key] = value
        elif not isinstance(parameter, RaggedShardDTensor):
            carried[key] = value.to(parameter.device)
        elif value.shape == parameter.shape:
            dtype = parameter.dtype if value.is_floating_point() else value.dtype
            full = value.to(device=parameter.to_local().device, dtype=dtype)
            carried[key] = RaggedShardDTensor.from_full(full, parameter.device_mesh, parameter.placements)
        else:
            raise ValueError(
                f"{type(optimizer).__name__} has already taken steps, and its state {key!r} of {name} has shape "
                f"{tuple(value.shape)} where the parameter has {tuple(parameter.shape)}: it cannot be split with the "
                "parameter; call accelerator.prepare before the first step"
            )
    return carried
