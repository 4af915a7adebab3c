"""What torch.compile needs of the engine: places where it stops, and names without its own part in them."""

from collections.abc import Callable, MutableMapping
from functools import wraps
from itertools import chain
from typing import Any, TypeVar, cast

import torch
from torch import nn

from ya_fsdp._torch_compat import compiled_autograd, current_tracer, never_trace

__all__ = ["add_wrapper_names", "plain_name", "refuse_compiled_autograd", "strip_wrapper_names", "untraced"]

F = TypeVar("F", bound=Callable[..., Any])

_REASON = (
    "ya_fsdp gathers parameters and reduces gradients outside of graphs. For fullgraph=True compile units that have "
    "no unit inside (block.compile(fullgraph=True)), not the model."
)
_WRAPPER = "_orig_mod."


def untraced(function: F) -> F:
    """Keeps torch.compile out of a function and of all that it calls; a compiled caller goes on behind it.

    Where nothing is being compiled, which is known at once, the function is called without further ado.
    """
    disabled: Any = torch.compiler.disable(function, reason=_REASON)  # type: ignore[no-untyped-call]

    @wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        return function(*args, **kwargs) if current_tracer() is None else disabled(*args, **kwargs)

    never_trace(call, _REASON)
    return cast(F, call)


def refuse_compiled_autograd() -> None:
    """Raises NotImplementedError if the backward that is under way was traced as a whole."""
    if compiled_autograd.in_compiled_autograd_region:
        raise NotImplementedError(
            "compiled autograd traces the whole backward, and with it what it reads before ya_fsdp has gathered it; "
            "leave it off (torch._dynamo.config.compiled_autograd) and compile the model or its blocks only"
        )


def plain_name(name: str) -> str:
    """A parameter's name as it is without ``torch.compile(module)``, which wraps the module in another one."""
    return name.replace(_WRAPPER, "")


def strip_wrapper_names(module: nn.Module, state_dict: MutableMapping[str, Any], prefix: str, metadata: Any) -> None:
    """Hook of ``state_dict()``: saved names are those of the model without torch.compile."""
    if prefix or not any(_WRAPPER in name for name in state_dict):
        return  # part of a larger state dict, whose names are its owner's
    for name in list(state_dict):  # all are taken out and put back, to keep their order
        state_dict[plain_name(name)] = state_dict.pop(name)


def add_wrapper_names(module: nn.Module, state_dict: MutableMapping[str, Any], prefix: str, *unused: Any) -> None:
    """Hook of ``load_state_dict()``: names without torch.compile are found in a model with it."""
    if prefix:
        return
    tensors = chain(module.named_parameters(remove_duplicate=False), module.named_buffers(remove_duplicate=False))
    for name, _ in tensors:
        plain = plain_name(name)
        if plain != name and plain in state_dict:
            state_dict.setdefault(name, state_dict[plain])
            del state_dict[plain]
