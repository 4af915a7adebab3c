"""Rank processes that stay alive across tests.

Starting a rank costs seconds (torch, transformers), running a tiny test milliseconds; so ranks are started once per
world size, and each job gets a fresh process group in them. A job that hangs, raises or crashes on any rank fails with
every rank's traceback, and takes its pool with it: the next job starts in new processes.
"""

import atexit
import contextlib
import multiprocessing
import os
import pickle
import shutil
import signal
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from multiprocessing import connection
from typing import Any

from tests.support.rank_main import READY, log_path, rank_main

#: Ranks alive at the same time, over all pools: more would only wait for each other on a small machine.
MAX_RANKS = 4
#: Seconds a job may take, unless the test says otherwise.
JOB_LIMIT = 60.0
#: Seconds that ranks get to start: imports on a busy machine are slow, and no part of the job.
START_LIMIT = 120.0
#: Seconds the other ranks get to finish or fail by themselves once one rank has failed.
GRACE = 3.0

_CHILD_ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",
    "MKL_NUM_THREADS": "1",
    "GLOO_SOCKET_IFNAME": "lo",
    "CUDA_VISIBLE_DEVICES": "",
    "HF_HUB_OFFLINE": "1",
    "TRANSFORMERS_VERBOSITY": "error",
    "TOKENIZERS_PARALLELISM": "false",
}


class JobFailedError(AssertionError):
    """A job raised, hung or crashed on at least one rank; the message holds what every rank was doing."""


@dataclass
class _Outcome:
    """What is known about one rank of a running job."""

    done: bool = False
    failed: bool = False
    value: Any = None
    text: str = ""


@dataclass
class RankPool:
    """``world_size`` processes that run jobs together.

    Args:
        world_size: Number of ranks.
    """

    world_size: int
    folder: str = field(init=False)
    processes: list[Any] = field(init=False, default_factory=list)
    pipes: list[connection.Connection] = field(init=False, default_factory=list)
    jobs: int = field(init=False, default=0)
    alive: bool = field(init=False, default=True)

    def __post_init__(self) -> None:
        self.folder = tempfile.mkdtemp(prefix="ranks-")
        context = multiprocessing.get_context("spawn")
        with _environment(_CHILD_ENVIRONMENT):
            for rank in range(self.world_size):
                ours, theirs = context.Pipe()
                process = context.Process(
                    target=rank_main, args=(rank, self.world_size, theirs, self.folder), name=f"rank{rank}", daemon=True
                )
                process.start()
                theirs.close()
                self.processes.append(process)
                self.pipes.append(ours)
        self._wait_until_started()

    def _wait_until_started(self) -> None:
        deadline = time.monotonic() + START_LIMIT
        for rank, pipe in enumerate(self.pipes):
            with contextlib.suppress(EOFError, ConnectionResetError):
                if pipe.poll(max(0.0, deadline - time.monotonic())) and pipe.recv_bytes() == READY:
                    continue
            output = _tail(log_path(self.folder, rank), 0)
            self.kill()
            raise JobFailedError(f"rank {rank} of {self.world_size} did not start within {START_LIMIT:g} s\n{output}")

    def run(self, job: Callable[..., Any], *args: Any, limit: float = JOB_LIMIT, **kwargs: Any) -> list[Any]:
        """Run ``job(*args, **kwargs)`` on every rank.

        Args:
            job: A function at the top level of an importable module.
            *args: Positional arguments; pickled.
            limit: Seconds after which the job counts as hanging.
            **kwargs: Keyword arguments; pickled.

        Returns:
            What each rank returned, by rank.

        Raises:
            JobFailedError: If any rank raised, crashed, or did not finish in time.
        """
        assert self.alive, "a pool whose job failed is not used again"
        self.jobs += 1
        name = f"{job.__module__}:{job.__qualname__}"
        log_starts = [_size(log_path(self.folder, rank)) for rank in range(self.world_size)]
        message = pickle.dumps((self.jobs, pickle.dumps((job, args, kwargs))))
        for pipe in self.pipes:
            with contextlib.suppress(BrokenPipeError):  # a rank that died before the job is found by _collect
                pipe.send_bytes(message)
        outcomes = [_Outcome() for _ in self.pipes]
        try:
            reason = self._collect(outcomes, limit)
        except BaseException:  # an interrupt leaves ranks in the middle of a job
            self.kill()
            raise
        if reason is None:
            return [outcome.value for outcome in outcomes]
        stacks = self._stacks_of([rank for rank, outcome in enumerate(outcomes) if not outcome.done])
        report = self._report(outcomes, stacks, log_starts)
        self.kill()
        raise JobFailedError(f"{name} on {self.world_size} rank(s): {reason}\n{report}")

    def _collect(self, outcomes: list[_Outcome], limit: float) -> str | None:
        """Fill ``outcomes``; return why the job failed, or None."""
        deadline = time.monotonic() + limit
        reason = None
        while not all(outcome.done for outcome in outcomes):
            waiting: dict[Any, int] = {}
            for rank, outcome in enumerate(outcomes):
                if not outcome.done:
                    waiting[self.pipes[rank]] = rank
            ready = connection.wait(list(waiting), timeout=max(0.0, deadline - time.monotonic()))
            if not ready:
                hanging = [rank for rank, outcome in enumerate(outcomes) if not outcome.done]
                return reason or f"rank(s) {hanging} did not finish within {limit:g} s"
            for pipe in ready:
                rank = waiting[pipe]
                self._receive(rank, outcomes[rank])
                if outcomes[rank].failed and reason is None:
                    reason = f"rank {rank} failed"
                    deadline = min(deadline, time.monotonic() + GRACE)
        return reason

    def _receive(self, rank: int, outcome: _Outcome) -> None:
        outcome.done = True
        try:
            succeeded, value = pickle.loads(self.pipes[rank].recv_bytes())
        except (EOFError, ConnectionResetError):
            self.processes[rank].join(5)
            outcome.failed = True
            outcome.text = f"the process ended with exit code {self.processes[rank].exitcode}"
            return
        if succeeded:
            outcome.value = value
        else:
            outcome.failed, outcome.text = True, value

    def _stacks_of(self, ranks: list[int]) -> dict[int, str]:
        """Ask ranks that are still busy where they are."""
        starts = {}
        for rank in ranks:
            starts[rank] = _size(log_path(self.folder, rank))
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.processes[rank].pid, signal.SIGUSR1)
        if ranks:
            time.sleep(0.5)  # the handler writes at once, but the rank needs a turn on the processor
        return {rank: _tail(log_path(self.folder, rank), start) for rank, start in starts.items()}

    def _report(self, outcomes: list[_Outcome], stacks: dict[int, str], log_starts: list[int]) -> str:
        parts = []
        for rank, outcome in enumerate(outcomes):
            if rank in stacks:
                parts.append(f"--- rank {rank}: still running; its stack (and output):\n{stacks[rank]}")
            elif outcome.failed:
                parts.append(f"--- rank {rank}: failed:\n{outcome.text}")
            else:
                parts.append(f"--- rank {rank}: finished")
            if output := _tail(log_path(self.folder, rank), log_starts[rank]).strip():
                parts.append(f"--- rank {rank}: output:\n{output}")
        return "\n".join(parts)

    def kill(self) -> None:
        """End the processes of this pool, by id, without waiting for their work."""
        self.alive = False
        for process in self.processes:
            process.kill()
        self._reap()

    def close(self) -> None:
        """Let idle ranks leave by themselves, and end those that do not."""
        self.alive = False
        for pipe in self.pipes:
            pipe.close()
        deadline = time.monotonic() + 2.0
        for process in self.processes:
            process.join(max(0.0, deadline - time.monotonic()))
            if process.is_alive():
                process.kill()
        self._reap()

    def _reap(self) -> None:
        for process in self.processes:
            process.join(5)
        for pipe in self.pipes:
            pipe.close()
        shutil.rmtree(self.folder, ignore_errors=True)


class RankPools:
    """One pool per world size, at most :data:`MAX_RANKS` ranks alive; the least recently used pool goes first."""

    def __init__(self) -> None:
        self._pools: dict[int, RankPool] = {}  # in order of use
        atexit.register(self.close)

    def run(self, world_size: int, job: Callable[..., Any], *args: Any, **kwargs: Any) -> list[Any]:
        """Run a job on ``world_size`` ranks; see :meth:`RankPool.run`."""
        return self.get(world_size).run(job, *args, **kwargs)

    def get(self, world_size: int) -> RankPool:
        """Return a healthy pool of this size, starting or replacing one if needed."""
        if not 1 <= world_size <= MAX_RANKS:
            raise ValueError(f"world_size must be between 1 and {MAX_RANKS}, got {world_size}")
        pool = self._pools.pop(world_size, None)
        if pool is None or not pool.alive or any(process.exitcode is not None for process in pool.processes):
            if pool is not None and pool.alive:
                pool.kill()
            self._make_room(world_size)
            pool = RankPool(world_size)
        self._pools[world_size] = pool
        return pool

    def _make_room(self, world_size: int) -> None:
        while self._pools and sum(self._pools) + world_size > MAX_RANKS:
            self._pools.pop(next(iter(self._pools))).close()

    def close(self) -> None:
        """End every pool."""
        while self._pools:
            self._pools.popitem()[1].close()


@contextlib.contextmanager
def _environment(values: dict[str, str]) -> Any:
    """Set environment variables for the children that start meanwhile."""
    before = {key: os.environ.get(key) for key in values}
    os.environ.update(values)
    try:
        yield
    finally:
        for key, value in before.items():
            if value is None:
                del os.environ[key]
            else:
                os.environ[key] = value


def _size(path: Any) -> int:
    return path.stat().st_size if path.exists() else 0


def _tail(path: Any, start: int, limit: int = 8000) -> str:
    """Text written to ``path`` after byte ``start``, its last ``limit`` characters."""
    if not path.exists():
        return ""
    with path.open("rb") as stream:
        stream.seek(start)
        return stream.read().decode(errors="replace")[-limit:]
