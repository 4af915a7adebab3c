"""What may change on a unit: the user's switches, and its place in the step."""

import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from ya_fsdp._common import TrainingState
from ya_fsdp.runtime.debug import DEBUG, check_transition

__all__ = ["ForwardGraph", "UnitPhase", "UnitSettings"]


@dataclass
class UnitSettings:
    """What the user may switch on a unit between iterations."""

    reshard_after_forward: bool = True
    reshard_group_size: int | None = None
    """Between forward and backward, this many neighbouring ranks hold the unit together; None: all ranks."""
    reshard_after_backward: bool = True
    unshard_in_backward: bool = True
    requires_gradient_sync: bool = True
    requires_all_reduce: bool = True
    gradient_divide_factor: float | None = None
    force_sum_reduction: bool = False

    @property
    def is_kept(self) -> bool:
        """The unit stays gathered beyond its forward or its backward."""
        return not (self.reshard_after_forward and self.reshard_after_backward)


class ForwardGraph:
    """Stands for the autograd graph of one forward of a unit, which keeps it alive."""

    has_run = False
    """A backward has reached the graph."""
    left_open: Sequence[Callable[[], None]] = ()
    """Gathers the units below whose weights may be in the graph without a hook of theirs in front of them."""


@dataclass
class UnitPhase:
    """Where a unit is in its step; written by the unit and its own buckets only."""

    name: str = ""
    """Name of the unit, for messages."""
    training_state: TrainingState = TrainingState.IDLE
    is_borrowed: bool = False
    """The last forward left modules out, so somebody may have read their weights: a graph without a hook of ours."""
    enter_backward: Callable[[], Callable[[ForwardGraph], None] | None] = lambda: None
    """Gives what to call when a backward reaches a graph of the unit; weak, since buckets hold the phase."""
    _graphs: list[weakref.ref[ForwardGraph]] = field(default_factory=list)

    def move_to(self, state: TrainingState) -> None:
        """Enters another state."""
        if DEBUG.is_on:
            check_transition(self.name, self.training_state, state)
        self.training_state = state

    def open_graph(self, left_open: Sequence[Callable[[], None]] = ()) -> ForwardGraph:
        """Notes a forward whose graph points into the unit's gather buffer.

        Args:
            left_open: See :class:`ForwardGraph`.
        """
        graph = ForwardGraph()
        if left_open:
            graph.left_open = left_open
        self._graphs.append(weakref.ref(graph, self._graphs.remove))
        return graph

    def has_pending_graph(self) -> bool:
        """Whether a backward may still want the parameters at the address that they were gathered to."""
        return any((graph := ref()) is not None and not graph.has_run for ref in self._graphs)
