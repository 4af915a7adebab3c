"""Asked for but not active is an error: no run may quietly train on another engine, or on unsharded weights."""

import weakref
from types import ModuleType
from typing import Any

__all__ = ["note_managed", "watch_optimizers"]

_managed: "weakref.WeakSet[Any]" = weakref.WeakSet()
_checked: "weakref.WeakSet[Any]" = weakref.WeakSet()


def note_managed(model: Any) -> None:
    """Called when the engine has taken over a model."""
    _managed.add(model)


def watch_optimizers(module: ModuleType) -> None:
    """Looks at each optimizer once, at its first step."""
    module.register_optimizer_step_pre_hook(_before_step)


def _before_step(optimizer: Any, args: Any, kwargs: Any) -> None:
    del args, kwargs
    from accelerate_plugin.startup import ENABLED, requested

    if optimizer in _checked or not requested():
        return
    _checked.add(optimizer)
    from torch.distributed.tensor import DTensor

    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    if _managed and (not parameters or any(isinstance(parameter, DTensor) for parameter in parameters)):
        return
    if _managed and not any(parameter.numel() for parameter in parameters):
        return
    first = next(iter(parameters), None)
    described = (
        "no parameters" if first is None else f"{len(parameters)} plain ones, the first of shape {tuple(first.shape)}"
    )
    reason = (
        "no model of this process is managed by ya-fsdp: pass model and optimizer to accelerator.prepare (the Trainer "
        "does), and do not wrap the model in DDP or another FSDP"
        if not _managed
        else "it was built from parameters that prepare never saw: pass the optimizer to accelerator.prepare too"
    )
    raise RuntimeError(
        f"ya-fsdp was asked for ({ENABLED} is set) but is not active: {type(optimizer).__name__} is about to step on "
        f"{described}; {reason}. To train without it, leave out --fsdp_ya_fsdp_enabled or set it to false."
    )
