"""Record every collective that this thread starts, whichever torch function starts it."""

from dataclasses import dataclass, field
from typing import Any

import torch
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode

GATHER, REDUCE_SCATTER, ALL_REDUCE, BROADCAST = "gather", "reduce_scatter", "all_reduce", "broadcast"

# Names of torch's operators (c10d, and the functional ones of DTensor), without namespace and overload.
_KINDS = {
    "_allgather_base_": GATHER,
    "allgather_": GATHER,
    "allgather_coalesced_": GATHER,
    "allgather_into_tensor_coalesced_": GATHER,
    "all_gather_into_tensor": GATHER,
    "all_gather_into_tensor_out": GATHER,
    "all_gather_into_tensor_coalesced": GATHER,
    "_reduce_scatter_base_": REDUCE_SCATTER,
    "reduce_scatter_": REDUCE_SCATTER,
    "reduce_scatter_tensor_coalesced_": REDUCE_SCATTER,
    "reduce_scatter_tensor": REDUCE_SCATTER,
    "reduce_scatter_tensor_coalesced": REDUCE_SCATTER,
    "allreduce_": ALL_REDUCE,
    "allreduce_coalesced_": ALL_REDUCE,
    "all_reduce": ALL_REDUCE,
    "all_reduce_": ALL_REDUCE,
    "all_reduce_coalesced": ALL_REDUCE,
    "broadcast_": BROADCAST,
    "broadcast": BROADCAST,
}
_NAMESPACES = {"c10d", "_c10d_functional"}


@dataclass(frozen=True)
class Collective:
    """One collective.

    Attributes:
        kind: ``gather``, ``reduce_scatter``, ``all_reduce``, ``broadcast``, or the operator's own name.
        num_bytes: Bytes of its largest tensor argument list: the full-size side of a gather or a reduce-scatter.
        dtype: Dtype that travels.
        phase: Value of :attr:`CollectiveRecorder.phase` at that time.
    """

    kind: str
    num_bytes: int
    dtype: torch.dtype | None
    phase: str


@dataclass
class CollectiveRecorder(TorchDispatchMode):
    """``with CollectiveRecorder() as recorder: ...`` fills ``recorder.events``.

    Set ``recorder.phase`` to label what follows.
    """

    events: list[Collective] = field(default_factory=list)
    phase: str = ""

    def __post_init__(self) -> None:
        super().__init__()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        # A DTensor takes the operator apart itself; what it sends comes by here again.
        if any(issubclass(t, DTensor) for t in types):
            return NotImplemented
        if func.namespace in _NAMESPACES:
            self._record(func, args)
        return func(*args, **(kwargs or {}))

    def _record(self, func: Any, args: Any) -> None:
        name = func._schema.name.split("::")[1]
        if name in ("wait_tensor", "barrier", "monitored_barrier_"):
            return
        sizes = [_bytes_and_dtype(argument) for argument in args]
        num_bytes, dtype = max(sizes, key=lambda pair: pair[0])
        kind = _KINDS.get(name, name)
        if func.namespace == "_c10d_functional" and kind == GATHER:
            num_bytes *= next(value for value in args if isinstance(value, int))  # only the input is an argument
        self.events.append(Collective(kind, num_bytes, dtype, self.phase))

    def of(self, kind: str, phase: str | None = None) -> list[Collective]:
        """Return the collectives of one kind, in order, of one phase or of all."""
        return [event for event in self.events if event.kind == kind and phase in (None, event.phase)]

    def count(self, kind: str, phase: str | None = None) -> int:
        """Return how many collectives of one kind were started."""
        return len(self.of(kind, phase))

    def clear(self) -> None:
        """Forget what was seen."""
        self.events.clear()


def _bytes_and_dtype(argument: Any) -> tuple[int, torch.dtype | None]:
    if isinstance(argument, torch.Tensor):
        return argument.numel() * argument.element_size(), argument.dtype
    if isinstance(argument, list | tuple):
        parts = [_bytes_and_dtype(part) for part in argument]
        return sum(part[0] for part in parts), next((part[1] for part in parts if part[1] is not None), None)
    return 0, None
