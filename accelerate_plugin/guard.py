"""Asked for but not active is an error: no run may quietly train on another engine, or on unsharded weights."""

import weakref
from types import ModuleType
from typing import Any

from accelerate_plugin.startup import ENABLED, requested

__all__ = ["note_managed", "parameters_before", "watch_optimizers"]

# Managed models, and for each what knows the parameters it had before.
_managed: "weakref.WeakKeyDictionary[Any, Any]" = weakref.WeakKeyDictionary()
_checked: "weakref.WeakSet[Any]" = weakref.WeakSet()
_HOW_TO_GO_ON = "To train without it, leave out --fsdp_ya_fsdp_enabled or set it to false."


def note_managed(model: Any, before: Any) -> None:
    """Called when the engine has taken over a model.

    Args:
        before: answers ``name_of(parameter)`` for the parameters that the model had.
    """
    _managed[model] = before


def parameters_before(model: Any) -> Any:
    """What knows the parameters that a managed model had; None for a model that is not managed."""
    return _managed.get(model)


def watch_optimizers(module: ModuleType) -> None:
    """Looks at each optimizer once, at its first step."""
    module.register_optimizer_step_pre_hook(_before_step)


def _before_step(optimizer: Any, args: Any, kwargs: Any) -> None:
    del args, kwargs
    if optimizer in _checked or not requested():
        return
    _checked.add(optimizer)
    kind = type(optimizer).__name__
    if not _managed:
        raise RuntimeError(
            f"ya-fsdp was asked for ({ENABLED} is set) but is not active: {kind} is about to step, and no model of "
            "this process is managed by ya-fsdp; pass model and optimizer to accelerator.prepare (the Trainer does), "
            f"and do not wrap the model in DDP or another FSDP. {_HOW_TO_GO_ON}"
        )
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            for model, before in _managed.items():
                name = before.name_of(parameter)
                if name is not None and parameter is not dict(model.named_parameters()).get(name):
                    raise RuntimeError(
                        f"{kind} is about to step on {name} as it was before {type(model).__name__} was sharded, so "
                        "the model would never change; pass the optimizer to accelerator.prepare too"
                    )
