"""The op table of ragged tensors: operator -> handler. Filled by ``ragged/ops.py``."""

from collections.abc import Callable
from typing import Any

import torch

__all__ = ["Handler", "find", "refusal", "register", "register_fallback"]

Handler = Callable[[Any, tuple[Any, ...], dict[str, Any]], Any]
Fallback = Callable[[Any], Handler]

_handlers: dict[Any, Handler] = {}
_resolved: dict[Any, Handler] = {}
_fallbacks: list[Fallback] = []


def register(*ops: Any) -> Callable[[Handler], Handler]:
    """Decorator that enters a handler for operators (overload packets or single overloads).

    Raises:
        ValueError: If an operator has a handler already.
    """

    def enter(handler: Handler) -> Handler:
        for op in ops:
            if op in _handlers:
                raise ValueError(f"operator {op} has a handler already: {_handlers[op].__name__}")
            _handlers[op] = handler
        return handler

    return enter


def register_fallback(fallback: Fallback) -> Fallback:
    """Sets the function that chooses a handler for operators without an entry of their own.

    Raises:
        ValueError: If it is set already.
    """
    if _fallbacks:
        raise ValueError("the fallback of the op table is set already")
    _fallbacks.append(fallback)
    return fallback


def refusal(func: Any, reason: str, tensor: torch.Tensor | None = None) -> RuntimeError:
    """The error for an operator that has no meaning on a slice."""
    shape = f" (full shape {tuple(tensor.shape)})" if tensor is not None else ""
    return RuntimeError(
        f"{func}: {reason}{shape}. A sharded parameter holds one slice of its flattened elements on each rank; call "
        f".full_tensor() for the full tensor or .to_local() for this rank's slice."
    )


def find(func: Any) -> Handler:
    """Handler of an operator; the choice is remembered."""
    handler = _resolved.get(func)
    if handler is None:
        handler = _handlers.get(func) or _handlers.get(func.overloadpacket) or _fallbacks[0](func)
        _resolved[func] = handler
    return handler
