"""Bytes of live tensors, without an accelerator's allocator to ask."""

import gc
import time
import weakref
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter


def live_tensor_bytes() -> int:
    """Return the bytes of all storages that Python objects hold at the moment."""
    gc.collect()
    sizes: dict[int, int] = {}
    for thing in gc.get_objects():
        # type() does not run code of lazy objects, as isinstance() may.
        if issubclass(type(thing), torch.Tensor):
            for tensor in _plain_parts(thing):
                storage = tensor.untyped_storage()
                nbytes = storage.nbytes()
                if isinstance(nbytes, int):  # a compiler's fake tensors have symbols, and no memory
                    sizes[storage._cdata] = nbytes
    return sum(sizes.values())


def settled_tensor_bytes(expected: int | None) -> int:
    """As :func:`live_tensor_bytes`; looks again for a second, since gloo's threads hold what they sent a little longer.

    Args:
        expected: What ends the waiting; None: nothing is waited for but the threads.
    """
    time.sleep(0.05)
    found = live_tensor_bytes()
    deadline = time.monotonic() + 1.0
    while expected is not None and found != expected and time.monotonic() < deadline:
        time.sleep(0.05)
        found = live_tensor_bytes()
    return found


class PeakBytes(TorchDispatchMode):
    """Track the largest sum of storage sizes while active, of tensors given at the start and of those made meanwhile.

    Args:
        *modules: Modules whose parameters and buffers count from the start.
    """

    def __init__(self, *modules: nn.Module) -> None:
        super().__init__()
        self._storages: dict[int, Any] = {}
        for module in modules:
            for tensor in [*module.parameters(), *module.buffers()]:
                self._add(tensor)
        self.start = self.peak = self.current()

    def current(self) -> int:
        """Return the bytes that are alive now."""
        alive = [(key, reference()) for key, reference in self._storages.items()]
        self._storages = {key: self._storages[key] for key, storage in alive if storage is not None}
        return sum(storage.nbytes() for _, storage in alive if storage is not None)

    def _add(self, tensor: torch.Tensor) -> None:
        for part in _plain_parts(tensor):
            storage = part.untyped_storage()
            known = self._storages.get(storage._cdata)
            if known is None or known() is None:
                self._storages[storage._cdata] = weakref.ref(storage)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for thing in tree_iter(result):
            if isinstance(thing, torch.Tensor):
                self._add(thing)
        self.peak = max(self.peak, self.current())
        return result


def _plain_parts(tensor: torch.Tensor) -> list[torch.Tensor]:
    """Return the tensors that hold the data of a tensor: itself, or the local part of a DTensor."""
    inner = getattr(tensor, "_local_tensor", None)
    if isinstance(inner, torch.Tensor):
        return [inner]
    return [tensor] if tensor.layout == torch.strided and tensor.device.type == "cpu" else []
