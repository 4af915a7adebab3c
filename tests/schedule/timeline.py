"""What was issued to which stream, in which memory, and what of it can overlap.

:class:`Timeline` watches every operator and every allocation on a device. :meth:`Timeline.races` then asks what a
caching allocator and a reader of results would suffer from, whatever the speed of the streams:

- two operators touch the same memory, one of them writing, and neither happens before the other;
- memory returns to the stream that it was allocated on, which may hand it out again at once, while work of another
  stream that touches it need not have finished;
- memory is touched by another stream that need not have reached its allocation;
- memory is touched that a storage has given back.
"""

import weakref
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from tests.schedule.fake_accelerator import NAME, Clock, Stream, current_stream

GATHER, REDUCE, ALL_REDUCE = "_allgather_base_", "_reduce_scatter_base_", "allreduce_"
_EMPTY = ("empty", "empty_strided", "empty_like", "new_empty", "new_empty_strided")


@dataclass(eq=False)
class Op:
    """One operator. ``numel`` counts the largest tensor that it touches."""

    index: int
    name: str
    stream: int
    clock: Clock
    numel: int

    def __repr__(self) -> str:
        return f"#{self.index} {self.name}[{self.numel}] on stream {self.stream}"


def before(first: Op, second: Op) -> bool:
    """Whether ``first`` has finished when ``second`` starts."""
    return second.clock.get(first.stream, 0) >= first.clock[first.stream]


def concurrent(first: Op, second: Op) -> bool:
    """Whether the two may run at the same time."""
    return not before(first, second) and not before(second, first)


@dataclass(eq=False)
class Memory:
    """One allocation, from when it is seen to when it returns to the stream that it was allocated on."""

    nbytes: int
    home: Stream
    allocated: int
    allocated_clock: Clock
    accesses: list[tuple[Op, bool]] = field(default_factory=list)
    """Operators that touch it, in the order of issue, and whether they write."""
    freed: int | None = None
    freed_clock: Clock | None = None

    def written_by(self, name: str) -> bool:
        """Whether an operator of that name writes here."""
        return any(op.name == name for op, writes in self.accesses if writes)

    def races(self) -> Iterable[str]:
        """Say what need not happen in the order in which it was issued."""
        what = f"memory of {self.nbytes} bytes, allocated before #{self.allocated}"
        for position, (op, writes) in enumerate(self.accesses):
            if op.clock.get(self.home.number, 0) < self.allocated_clock.get(self.home.number, 0):
                yield f"{what}: {op} need not come behind the allocation"
            for earlier, earlier_writes in self.accesses[:position]:
                if (writes or earlier_writes) and not before(earlier, op):
                    yield f"{what}: {earlier} and then {op} touch it, one of them writing, in no order"
            if self.freed_clock is not None and self.freed_clock.get(op.stream, 0) < op.clock[op.stream]:
                yield f"{what}: freed at #{self.freed} while {op} need not have finished"


@dataclass(eq=False)
class _Place:
    """What storages point to, as seen by the views of one tensor."""

    memory: Memory | None
    num_storages: int = 0


class Timeline(TorchDispatchMode):
    """Records operators and memory of one device while it is entered.

    Args:
        device: Device type whose memory is watched; everything is issued to one queue if it is the CPU.
    """

    def __init__(self, device: str = NAME) -> None:
        super().__init__()
        self.device = device
        self.ops: list[Op] = []
        self.moments: list[str] = []
        """What :meth:`moment` was told and the collectives, in the order of issue."""
        self.labels: dict[str, str] = {}
        """Moments that are reached with an operator, by its name."""
        self.names: dict[int, str] = {}
        """Names of units by the elements of their gathered buckets."""
        self.memories: list[Memory] = []
        self._places: dict[int, _Place] = {}
        self._misuses: list[str] = []

    def __enter__(self) -> "Timeline":
        original = self._resize = torch.UntypedStorage.resize_

        def resize(storage: torch.UntypedStorage, nbytes: int) -> Any:
            result = original(storage, nbytes)
            place = self._places.get(storage._cdata)
            if place is not None:  # what it points to from now on is other memory
                self._free(place)
                place.memory = self._allocate(nbytes) if nbytes else None
            return result

        torch.UntypedStorage.resize_ = resize  # type: ignore[assignment,method-assign]
        return super().__enter__()  # type: ignore[no-any-return]

    def __exit__(self, *error: Any) -> None:
        torch.UntypedStorage.resize_ = self._resize  # type: ignore[method-assign]
        super().__exit__(*error)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        # A DTensor takes the operator apart itself; what it does to its local tensors comes by here again.
        if any(issubclass(t, DTensor) for t in types):
            return NotImplemented
        name = func._schema.name.split("::")[1]
        if name in self.labels:
            self.moment(self.labels[name])
        result = func(*args, **kwargs)
        if func.is_view:
            self._alias(args, result)
        elif func.namespace != "prim":  # those ask for a device or a layout
            self._record(name, func, args, kwargs, result)
        return result

    # ---- recording ---------------------------------------------------------------------------------------------------

    def moment(self, label: str) -> None:
        """Note that the program has reached a point."""
        self.moments.append(label)

    def _record(self, name: str, func: Any, args: Any, kwargs: Any, result: Any) -> None:
        written, read = _accesses(name, func, args, kwargs)
        mine = [t for t in tree_leaves((args, kwargs)) if self._is_mine(t)]
        for tensor in mine:
            self._memory(tensor)
        new = [t for t in tree_leaves(result) if self._is_mine(t) and _key(t) not in self._places]
        for tensor in new:
            self._memory(tensor)
        if name in _EMPTY or not (mine or new):
            return
        numel = max(tensor.numel() for tensor in (*mine, *new))
        stream = current_stream()
        op = Op(len(self.ops), name, stream.number, stream.issue(), numel)
        self.ops.append(op)
        writes = {id(self._memory(t)): self._memory(t) for t in (*written, *new) if self._is_mine(t)}
        reads = {id(self._memory(t)): self._memory(t) for t in read if self._is_mine(t)}
        for memory in {**reads, **writes}.values():
            memory.accesses.append((op, id(memory) in writes))
        if name in (GATHER, REDUCE, ALL_REDUCE):
            label = {GATHER: "gather", REDUCE: "reduce", ALL_REDUCE: "all-reduce"}[name]
            self.moments.append(f"{label} {self.names.get(numel, numel)}")

    def _alias(self, args: Any, result: Any) -> None:
        """Note that a view shares memory; fake tensors forget it and give some views a storage of their own."""
        base = next((t for t in tree_leaves(args) if self._is_mine(t)), None)
        if base is None:
            return
        place = self._place(base)
        for view in tree_leaves(result):
            if self._is_mine(view) and _key(view) not in self._places:
                self._hold(view, place)

    def _is_mine(self, value: Any) -> bool:
        return isinstance(value, torch.Tensor) and not isinstance(value, DTensor) and value.device.type == self.device

    def _place(self, tensor: torch.Tensor) -> "_Place":
        if _key(tensor) not in self._places:
            self._hold(tensor, _Place(self._allocate(tensor.untyped_storage().nbytes())))
        return self._places[_key(tensor)]

    def _memory(self, tensor: torch.Tensor) -> Memory:
        place = self._place(tensor)
        if place.memory is None:
            self._misuses.append(f"{tensor.numel()} elements are touched at #{len(self.ops)}, but were given back")
            place.memory = self._allocate(0)
        return place.memory

    def _hold(self, tensor: torch.Tensor, place: "_Place") -> None:
        place.num_storages += 1
        self._places[_key(tensor)] = place
        weakref.finalize(tensor.untyped_storage(), self._let_go, _key(tensor))

    def _let_go(self, key: int) -> None:
        place = self._places.pop(key)
        place.num_storages -= 1
        if not place.num_storages:
            self._free(place)

    def _allocate(self, nbytes: int) -> Memory:
        stream = current_stream()
        self.memories.append(Memory(nbytes, stream, len(self.ops), dict(stream.clock)))
        return self.memories[-1]

    def _free(self, place: "_Place") -> None:
        memory = place.memory
        if memory is not None:
            memory.freed, memory.freed_clock = len(self.ops), dict(memory.home.clock)
            place.memory = None

    # ---- questions ---------------------------------------------------------------------------------------------------

    def races(self) -> list[str]:
        """Return what may go wrong; see the module."""
        return [*self._misuses, *(race for memory in self.memories for race in memory.races())]

    def of(self, name: str) -> list[Op]:
        """Return the operators of a name, in the order of issue."""
        return [op for op in self.ops if op.name == name]

    def memories_where(self, wanted: Callable[[Memory], bool]) -> list[Memory]:
        """Return allocations, in the order of allocation."""
        return [memory for memory in self.memories if wanted(memory)]

    def gather_buffers(self) -> list[Memory]:
        """Return the allocations that something was gathered into."""
        return self.memories_where(lambda memory: memory.written_by(GATHER))

    def stagings(self) -> list[Memory]:
        """Return the allocations that a reduce-scatter sent."""
        return self.memories_where(
            lambda memory: any(op.name == REDUCE and not writes for op, writes in memory.accesses)
        )


def peak_nbytes(memories: Iterable[Memory]) -> int:
    """Return the most bytes of the given allocations that are live at one time."""
    changes: list[tuple[int, int, int]] = []
    for memory in memories:
        changes.append((memory.allocated, 1, memory.nbytes))
        if memory.freed is not None:
            changes.append((memory.freed, 0, -memory.nbytes))  # frees first: the next one may take the same place
    live = peak = 0
    for _, _, nbytes in sorted(changes):
        live += nbytes
        peak = max(peak, live)
    return peak


def _key(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage()._cdata


def _accesses(name: str, func: Any, args: Any, kwargs: Any) -> tuple[list[Any], list[Any]]:
    """Return what an operator writes and what it reads of its arguments."""
    if name in (GATHER, REDUCE):  # (output, input, ...); the schema does not say so
        return [args[0]], [args[1]]
    if name == ALL_REDUCE:
        return tree_leaves(args[0]), tree_leaves(args[0])
    written: list[Any] = []
    read: list[Any] = []
    for place, argument in enumerate(func._schema.arguments):
        value = kwargs.get(argument.name) if argument.kwarg_only or place >= len(args) else args[place]
        is_written = argument.alias_info is not None and argument.alias_info.is_write
        (written if is_written else read).extend(tree_leaves(value))
    return written, read
