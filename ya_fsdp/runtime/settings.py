"""What may change on a unit: the user's switches, and its place in the step."""

from dataclasses import dataclass

from ya_fsdp._common import TrainingState

__all__ = ["UnitPhase", "UnitSettings"]


@dataclass
class UnitSettings:
    """What the user may switch on a unit between iterations."""

    reshard_after_forward: bool = True
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


@dataclass
class UnitPhase:
    """Where a unit is in its step; written by the unit and its own buckets only."""

    training_state: TrainingState = TrainingState.IDLE
