"""Ranks that run different units are told so, instead of waiting for one another or mixing up their parameters.

Collectives match by the order in which ranks issue them. All ranks know the order of units in the last forward, and a
rank that keeps to it is right to go on without asking. One that leaves it (or has no order yet) meets the others at
the process group's store first: it goes on when all of them come to the same unit at the same place. If one of them has
gone on elsewhere, which a thread of each process answers when asked, the error says who runs what.

So a step costs a comparison of names per unit, and only the first forward and a change of order cost messages.
"""

import atexit
import json
import logging
import os
import threading
import time
from itertools import count
from typing import Any
from weakref import WeakSet

import torch.distributed as dist

from ya_fsdp._torch_compat import default_store

__all__ = ["OrderCheck"]

_log = logging.getLogger("ya_fsdp")
_PREFIX = "ya_fsdp/order"
_END = "(the end of the forward)"
_POLL_SECONDS = 1.0
_PATIENCE_SECONDS = 1800.0
_numbers = count()


class OrderCheck:
    """Compares the order of a root's units between the ranks that share its parameters.

    Args:
        group: Those ranks; None if there is nobody to compare with.
    """

    def __init__(self, group: dist.ProcessGroup | None) -> None:
        self.number = next(_numbers)
        self._forward = 0
        self._is_open = False
        self._order: list[str] = []
        self._current: list[str] = []
        self._claim = ""
        self._keeps_to_order = False
        self._ranks = [] if group is None else dist.get_process_group_ranks(group)
        self._key = "" if group is None else f"{_PREFIX}/{group.group_name}/{self.number}"
        self._store: Any = _usable_store() if len(self._ranks) > 1 else None
        if self._store is not None:
            _Responder.watch(self)

    def begin(self) -> None:
        """A forward of the root starts; it counts from the first unit that gathers on."""
        self._is_open = False

    def enter(self, unit: str) -> None:
        """A unit is about to run that has to be gathered (a rank may run gathered units alone, as often as it likes).

        Raises:
            RuntimeError: If other ranks run another one at this place.
        """
        if not self._is_open:
            self._is_open = True
            self._forward += 1
            self._current = []
            self._keeps_to_order = bool(self._order)
        place = len(self._current)
        if not (self._keeps_to_order and place < len(self._order) and self._order[place] == unit):
            self._meet(place, unit)
        self._current.append(unit)

    def end(self) -> bool:
        """The forward of the root ends.

        Returns:
            Whether it gathered anything, so that all ranks have run it.

        Raises:
            RuntimeError: If other ranks run another unit.
        """
        if not self._is_open:
            return False
        self._is_open = False
        if not (self._keeps_to_order and len(self._current) == len(self._order)):
            self._meet(len(self._current), _END)
            self._order = self._current
        self._current = [*self._current, _END]
        return True

    def answer(self) -> str:
        """Where this rank is, for a rank that waits: the forward, its units so far, and those of the last one."""
        return json.dumps([self._forward, [*self._current, *([self._claim] if self._claim else [])], self._order])

    # ---- leaving the known order -----------------------------------------------------------------------------------

    def _meet(self, place: int, unit: str) -> None:
        self._keeps_to_order = False
        if self._store is None:
            return
        key = f"{self._key}/{self._forward}/{place}/{unit}"
        self._claim = unit
        if self._store.add(key, 1) == len(self._ranks):
            self._store.set(f"{key}/all", b"1")
        started = time.monotonic()
        while not self._have_all_come(f"{key}/all"):
            self._look_for_others(place, unit)
            if time.monotonic() - started > _PATIENCE_SECONDS:
                raise RuntimeError(
                    f"rank {dist.get_rank()} has waited {_PATIENCE_SECONDS:g} s for others to run {unit}"
                )
        self._claim = ""

    def _have_all_come(self, key: str) -> bool:
        """Looks for a while; the store's own wait would fill the log with warnings about its timeout."""
        deadline, pause = time.monotonic() + _POLL_SECONDS, 0.001
        while not self._store.check([key]):
            if time.monotonic() > deadline:
                return False
            time.sleep(pause)
            pause = min(2 * pause, 0.05)
        return True

    def _look_for_others(self, place: int, unit: str) -> None:
        """Asks where the others are; raises if one of them has come by here and runs something else."""
        question = self._store.add(f"{_PREFIX}/questions", 1)
        self._store.set(f"{_PREFIX}/question/{question}", b"1")
        time.sleep(2 * _POLL_SECONDS)
        elsewhere: dict[str, list[int]] = {}
        for rank in self._ranks:
            key = f"{self._key}/answer/{question}/{rank}"
            if rank == dist.get_rank() or not self._store.check([key]):
                continue
            forward, units, last = json.loads(self._store.get(key))
            if forward > self._forward:  # it is through with this one
                units = [*last, _END]
            if forward >= self._forward and place < len(units) and units[place] != unit:
                elsewhere.setdefault(units[place], []).append(rank)
        if elsewhere:
            raise RuntimeError(self._describe(place, unit, elsewhere))

    def _describe(self, place: int, unit: str, elsewhere: dict[str, list[int]]) -> str:
        others = ", ".join(f"{other} on rank(s) {', '.join(map(str, ranks))}" for other, ranks in elsewhere.items())
        return (
            f"ranks run different units: number {place + 1} of this forward is {unit} on rank {dist.get_rank()} but "
            f"{others}. Every rank must run the same units in the same order, or gathers do not match. Run the unit on "
            f"every rank (for example with its output multiplied by 0), or shard it as a part of the unit around it."
        )


class _Responder(threading.Thread):
    """Answers where this process's roots are; looks for questions once a second."""

    _running: "_Responder | None" = None

    def __init__(self, store: Any) -> None:
        super().__init__(name="ya-fsdp-order", daemon=True)
        self.store = store
        self._own = store.clone()  # a connection of its own: the main thread may block in the other
        self._checks: WeakSet[OrderCheck] = WeakSet()
        self._leaving = threading.Event()
        self._question = 0

    @classmethod
    def watch(cls, check: OrderCheck) -> None:
        """Answers for a root from now on."""
        running = cls._running
        if running is None or running.store is not check._store or not running.is_alive():
            if running is not None:
                running.leave()
            cls._running = running = cls(check._store)
            running.start()
            # Not torn down in the middle of a call to the store, when the interpreter goes away.
            atexit.register(running.leave)
        running._checks.add(check)

    def leave(self) -> None:
        """Ends the thread."""
        self._leaving.set()
        self.join(2 * _POLL_SECONDS)
        atexit.unregister(self.leave)

    def run(self) -> None:
        try:
            while not self._leaving.wait(_POLL_SECONDS):
                while self._own.check([f"{_PREFIX}/question/{self._question + 1}"]):
                    self._question += 1
                    for check in list(self._checks):
                        key = f"{check._key}/answer/{self._question}/{dist.get_rank()}"
                        self._own.set(key, check.answer())
        except Exception as error:  # the process group is gone, and with it whoever could ask
            _log.debug("no more answers about the order of units: %s", error)


def _usable_store() -> Any:
    if os.environ.get("YA_FSDP_CHECK_ORDER", "1").lower() in ("0", "false", "no"):
        return None
    store = default_store()
    try:
        store.check([_PREFIX])
    except RuntimeError:  # simulated process groups have a store without values
        return None
    return store
