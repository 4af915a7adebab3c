"""The debug switch: released memory becomes NaN, and every transition of a unit is checked.

On with ``ya_fsdp.set_debug(True)`` or ``YA_FSDP_DEBUG=1`` in the environment. Whoever reads a gathered parameter after
it was given back then sees NaN (-1 in integers) at once, instead of values that happen to be right until another unit
takes the buffer. Buffers stay allocated, so a run takes more memory.
"""

import os

import torch

from ya_fsdp._common import TrainingState

__all__ = ["DEBUG", "check_transition", "poison", "set_debug"]

_F, _PRE, _POST, _IDLE = (
    TrainingState.FORWARD,
    TrainingState.PRE_BACKWARD,
    TrainingState.POST_BACKWARD,
    TrainingState.IDLE,
)
_ALLOWED = {
    _IDLE: {_F, _PRE, _IDLE},
    _F: {_IDLE, _F, _PRE},  # a unit may run inside of itself, and a backward may begin inside of a forward
    _PRE: {_POST, _PRE, _IDLE},
    _POST: {_IDLE, _PRE, _POST, _F},  # the backward of another forward, or the recomputation of one
}


class _Switch:
    """An attribute, not a function, since every unit looks at it several times per step."""

    __slots__ = ("is_on",)

    def __init__(self) -> None:
        self.is_on = os.environ.get("YA_FSDP_DEBUG", "").lower() in ("1", "true", "yes")


DEBUG = _Switch()
"""Whether the debug switch is on."""


def set_debug(enabled: bool) -> None:
    """Turns the debug switch on or off, for all models of the process; best between steps."""
    DEBUG.is_on = bool(enabled)


def poison(storage: torch.UntypedStorage) -> None:
    """Overwrites memory with bytes that are NaN in every floating-point dtype, and -1 in integers."""
    torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage).fill_(255)


def check_transition(unit: str, old: TrainingState, new: TrainingState) -> None:
    """Raises AssertionError if a unit cannot come from one state to the other."""
    if new not in _ALLOWED[old]:
        raise AssertionError(
            f"{unit} went from {old.name} to {new.name}; from there it can only go to "
            f"{', '.join(sorted(state.name for state in _ALLOWED[old]))}. This is a fault of ya_fsdp: please report it"
        )
