"""A fake accelerator: torch's spare device type with streams and events that only keep time.

No number is computed (models run under ``FakeTensorMode``). What is kept is *order*: every stream has a vector clock,
an event is a copy of one, and waiting merges clocks. One piece of work happens before another if and only if the
other's clock has seen it, which is what an accelerator guarantees, however fast or slow its streams happen to be.

``install()`` renames a device type for the whole process and cannot be undone: only the helper process calls it.
"""

import contextlib
import itertools
import types
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist

NAME = "fakegpu"
Clock = dict[int, int]
"""Number of pieces of work seen, by stream."""


def merge(clock: Clock, other: Clock) -> None:
    """Make ``clock`` see what ``other`` has seen."""
    for stream, count in other.items():
        clock[stream] = max(clock.get(stream, 0), count)


class Host:
    """The thread that issues work.

    Attributes:
        clock: What the host has waited for: work that is issued from now on comes behind it.
        num_waits: How often the host has waited for the device.
    """

    def __init__(self) -> None:
        self.clock: Clock = {}
        self.num_waits = 0

    def wait(self, clock: Clock) -> None:
        """Block the host until a clock is reached."""
        self.num_waits += 1
        merge(self.clock, clock)


HOST = Host()


class Stream:
    """A queue of work; see :class:`torch.Stream`."""

    _numbers = itertools.count()

    def __init__(self, device: Any = None, priority: int = 0, **_: Any) -> None:
        self.number = next(self._numbers)
        self.priority = priority
        self.clock: Clock = {}

    def issue(self) -> Clock:
        """Add one piece of work and return its clock."""
        merge(self.clock, HOST.clock)
        self.clock[self.number] = self.clock.get(self.number, 0) + 1
        return dict(self.clock)

    def wait_event(self, event: "Event") -> None:
        merge(self.clock, event.clock)

    def wait_stream(self, stream: "Stream") -> None:
        merge(self.clock, stream.clock)

    def record_event(self, event: "Event | None" = None) -> "Event":
        event = event or Event()
        event.record(self)
        return event

    def synchronize(self) -> None:
        HOST.wait(self.clock)

    def query(self) -> bool:
        return False


class Event:
    """A point in a stream's work; one that was never recorded holds nobody up."""

    def __init__(self, *_: Any, **__: Any) -> None:
        self.clock: Clock = {}

    def record(self, stream: Stream | None = None) -> None:
        self.clock = dict((stream or current_stream()).clock)

    def wait(self, stream: Stream | None = None) -> None:
        (stream or current_stream()).wait_event(self)

    def synchronize(self) -> None:
        HOST.wait(self.clock)

    def query(self) -> bool:
        return False


_streams: list[Stream] = [Stream()]  # the last one is current


def current_stream(device: Any = None) -> Stream:
    """Return the stream that work is issued to."""
    return _streams[-1]


def default_stream(device: Any = None) -> Stream:
    """Return the stream on which a program computes."""
    return _streams[0]


@contextlib.contextmanager
def on_stream(stream: Stream | None) -> Iterator[None]:
    """Issue work to ``stream`` while the context is open."""
    _streams.append(stream or current_stream())
    try:
        yield
    finally:
        _streams.pop()


def _synchronize(device: Any = None) -> None:
    for stream in _streams:
        stream.synchronize()


def _refuse_record_stream(tensor: torch.Tensor, stream: Any) -> None:
    raise AssertionError("record_stream leaves it to chance when memory returns; order streams with events instead")


def _backend() -> types.ModuleType:
    """Return what ``torch.fakegpu`` is to be."""
    module: Any = types.ModuleType(f"torch.{NAME}")
    module.Stream, module.Event = Stream, Event
    module.current_stream, module.default_stream = current_stream, default_stream
    module.stream, module.synchronize = on_stream, _synchronize
    module.is_available = module.is_initialized = lambda: True
    module._is_in_bad_fork = lambda: False
    module._lazy_init = lambda: None
    module.device_count = lambda: 1
    module.current_device = lambda: 0
    module.set_device = lambda device: None
    module.get_amp_supported_dtype = lambda: [torch.bfloat16, torch.float16]
    module.manual_seed = module.manual_seed_all = lambda seed: None
    module.get_rng_state = lambda device=None: torch.get_rng_state()
    module.set_rng_state = lambda state, device=None: None
    return module  # type: ignore[no-any-return]


def install() -> None:
    """Give torch the device type, for the rest of the process, and let the 'fake' process group serve it."""
    from torch.testing._internal.distributed import fake_pg
    from torch.utils.backend_registration import _setup_privateuseone_for_python_backend

    _setup_privateuseone_for_python_backend(NAME, backend_module=_backend())
    torch.Tensor.record_stream = _refuse_record_stream  # type: ignore[assignment,method-assign]
    assert fake_pg.FakeStore, "importing the module registers the process group"
    capability = dist.Backend.backend_capability.setdefault("fake", [])
    if NAME not in capability:
        capability.append(NAME)
    dist.Backend.default_device_backend_map[NAME] = "fake"


@contextlib.contextmanager
def fake_ranks(world_size: int) -> Iterator[None]:
    """Be rank 0 of a process group whose collectives return at once and move nothing."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", rank=0, world_size=world_size, store=FakeStore())
    try:
        yield
    finally:
        dist.destroy_process_group()
