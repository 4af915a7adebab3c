"""Knows when all of a unit's gradients have arrived, for units whose inputs need no gradient.

Such a unit (an embedding, the first block of a model whose embedding is frozen) has no autograd node that marks the end
of its backward, so the gradients of its parameters are counted instead.
"""

import weakref
from collections.abc import Callable, Sequence

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from ya_fsdp.runtime.compiler import untraced
from ya_fsdp.runtime.hooks import on_gradient

__all__ = ["ArrivalWatch"]


class ArrivalWatch:
    """Counts gradients as autograd accumulates them.

    Args:
        complete: Called when each of the watched parameters has got its gradient.
    """

    def __init__(self, complete: Callable[[], None]) -> None:
        self._complete = weakref.WeakMethod(complete)  # the unit owns the watch
        self.is_counting = False
        self._count = 0
        self._hooks: list[tuple[int, RemovableHandle]] = []

    def start(self, params: Sequence[nn.Parameter]) -> None:
        """Starts counting anew for the unit's trainable unsharded parameters."""
        self._count = 0
        if [watched for watched, _ in self._hooks] == [id(param) for param in params]:
            return
        self.stop()
        self.is_counting = True
        this = weakref.ref(self)

        @untraced
        def arrived(_: torch.Tensor) -> None:
            watch = this()
            if watch is not None:
                watch._count += 1
                if watch._count == len(watch._hooks):
                    watch._finish()

        self._hooks = [(id(param), on_gradient(param, arrived)) for param in params]

    def stop(self) -> None:
        """Stops watching: the unit's inputs need gradients, which come after its parameters'."""
        for _, handle in self._hooks:
            handle.remove()
        self.is_counting, self._hooks = False, []

    def _finish(self) -> None:
        complete = self._complete()
        if complete is not None:
            complete()
