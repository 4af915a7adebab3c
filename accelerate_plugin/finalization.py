"""A clean end on gloo: its threads let go of tensors before the interpreter goes away.

A gloo thread that is the last to hold a tensor needs the interpreter's lock to free it. If the script ends just then,
the thread is stopped inside a C++ destructor and takes the finished process with it ("terminate called without an
active exception", exit code -6; pytorch/pytorch#179291). Scripts of transformers and trl end right behind a last
collective and leave process groups open, so this can happen to any of them.
"""

import atexit
import time
from functools import cache

__all__ = ["let_gloo_finish"]

_SECONDS = 0.1


@cache
def let_gloo_finish() -> None:
    """Makes the process wait a moment, without the interpreter's lock, before it is torn down."""
    atexit.register(time.sleep, _SECONDS)
