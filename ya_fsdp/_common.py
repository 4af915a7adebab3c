"""States that a unit and its parameters pass through; also the documented import path of :class:`TrainingState`."""

from enum import Enum, auto

__all__ = ["ShardedState", "TrainingState"]


class TrainingState(Enum):
    """Where one unit is in its training step.

    A unit moves ``IDLE -> FORWARD -> IDLE -> PRE_BACKWARD -> POST_BACKWARD -> IDLE``; without a backward it returns to
    ``IDLE`` after its forward.
    """

    FORWARD = auto()
    """From the start of the unit's forward (pre-forward) to its end (post-forward)."""
    PRE_BACKWARD = auto()
    """Parameters are gathered for the backward, which computes this unit's gradients."""
    POST_BACKWARD = auto()
    """Gradients are complete: parameters are resharded, gradients reduced."""
    IDLE = auto()
    """Before or after a forward, before ``PRE_BACKWARD``, or after ``POST_BACKWARD``."""


class ShardedState(Enum):
    """Which parameters the modules of a unit show."""

    SHARDED = auto()
    """``RaggedShardDTensor`` parameters: this rank's slices."""
    GATHERING = auto()
    """Still the sharded parameters; an all-gather into the unit's buffer is under way."""
    UNSHARDED = auto()
    """Full parameters that are views of the gather buffer."""
