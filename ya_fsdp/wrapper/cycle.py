"""Counts the backwards of an accumulation cycle and lets only its last one reduce."""

from collections.abc import Callable, Sequence

import torch

from ya_fsdp._torch_compat import queue_backward_callback
from ya_fsdp.fully_shard import YaFSDPModule

__all__ = ["AccumulationCycle"]


class AccumulationCycle:
    """Sets the units' switches when a backward starts, from the number of backwards before it.

    Args:
        units: All units.
        kept: Those that stay gathered until the cycle ends.
        num_steps: Backwards per cycle.
        reduces_each: Reduce in every backward, and only keep units for the cycle.
        at_end: Called at the end of each cycle.
    """

    def __init__(
        self,
        units: Sequence[YaFSDPModule],
        kept: Sequence[YaFSDPModule],
        num_steps: int,
        *,
        reduces_each: bool,
        at_end: Callable[[], None] | None = None,
    ) -> None:
        self._units = units
        self._kept = kept
        self._num_steps = num_steps
        self._reduces_each = reduces_each
        self._at_end = at_end
        self._num_done = 0
        self._task = -1

    def reset(self) -> None:
        """Starts a new cycle."""
        self._num_done = 0

    def enter(self) -> None:
        """A backward has reached one of the model's outputs."""
        task = torch._C._current_graph_task_id()
        if task != self._task:  # a model may have several outputs
            self._task = task
            self._switch(is_last=self._num_done == self._num_steps - 1)
            queue_backward_callback(self._leave)

    def _leave(self) -> None:
        self._num_done = (self._num_done + 1) % self._num_steps
        if not self._num_done and self._at_end is not None:
            self._at_end()

    def _switch(self, *, is_last: bool) -> None:
        for unit in self._kept:
            unit.set_reshard_after_backward(is_last, recurse=False)
        if not self._reduces_each:
            for unit in self._units:
                unit.set_requires_gradient_sync(is_last, recurse=False)
