"""Where torch.compile has to stop."""

from collections.abc import Callable
from typing import Any, TypeVar, cast

import torch

__all__ = ["untraced"]

F = TypeVar("F", bound=Callable[..., Any])

_REASON = (
    "ya_fsdp gathers parameters and reduces gradients outside of graphs. For fullgraph=True compile units that have "
    "no unit inside (block.compile(fullgraph=True)), not the model."
)


def untraced(function: F) -> F:
    """Keeps torch.compile out of a function and of all that it calls; a compiled caller goes on behind it."""
    return cast(F, torch.compiler.disable(function, reason=_REASON))  # type: ignore[no-untyped-call]
