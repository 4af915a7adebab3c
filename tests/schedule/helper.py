"""The helper process: the fake accelerator changes torch for good, so it lives outside of the tests' process."""

import multiprocessing
import os
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any


def _serve(pipe: Connection) -> None:
    """Run jobs until the pipe closes."""
    from tests.schedule.fake_accelerator import install

    install()
    while True:
        try:
            job, args = pipe.recv()
        except EOFError:
            return
        try:
            pipe.send((None, job(*args)))
        except BaseException:  # the tests' process shows it
            pipe.send((traceback.format_exc(), None))


class Helper:
    """A process with the fake accelerator; started by the first job, and again after one that hung or crashed."""

    def __init__(self) -> None:
        self._process: Any = None
        self._pipe: Any = None

    def run(self, job: Callable[..., Any], *args: Any, limit: float = 90.0) -> Any:
        """Run ``job(*args)``, an importable function, and return what it returns.

        Raises:
            AssertionError: With the job's traceback, if it raised, crashed or took longer than ``limit`` seconds.
        """
        __tracebackhide__ = True
        if self._process is None:
            self._start()
        self._pipe.send((job, args))
        if not self._pipe.poll(limit):
            self.close()
            raise AssertionError(f"{job.__qualname__} did not finish in {limit} s")
        try:
            error, value = self._pipe.recv()
        except EOFError:
            self.close()
            raise AssertionError(f"the helper process died in {job.__qualname__}") from None
        if error is not None:
            raise AssertionError(f"{job.__qualname__}{args} in the helper process:\n{error}")
        return value

    def _start(self) -> None:
        context = multiprocessing.get_context("spawn")
        self._pipe, theirs = context.Pipe()
        before = os.environ.get("OMP_NUM_THREADS")
        os.environ["OMP_NUM_THREADS"] = "1"
        try:
            self._process = context.Process(target=_serve, args=(theirs,), daemon=True)
            self._process.start()
        finally:
            if before is None:
                del os.environ["OMP_NUM_THREADS"]
            else:
                os.environ["OMP_NUM_THREADS"] = before
        theirs.close()

    def close(self) -> None:
        """End the process, if there is one."""
        if self._process is not None:
            self._pipe.close()
            self._process.join(5)
            if self._process.is_alive():
                self._process.kill()
                self._process.join()
            self._process = None
