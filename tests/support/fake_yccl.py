"""A stand-in for the ``yccl`` package: the calls that the adapter makes, over gloo, and nothing else.

Like the package it takes only memory that it handed out itself, in bf16, and adds up in 32 bits.
"""

import sys
import types
from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist


class Handle:
    """Communicates among all ranks of the job; remembers what it was asked."""

    made: list["Handle"] = []

    def __init__(self, *, inter_color: int, intra_color: int) -> None:
        self.colors = (intra_color, inter_color)
        self.calls: list[str] = []
        self.profiling = False
        self._inputs: list[torch.Tensor] = []
        self._outputs: list[torch.Tensor] = []
        self._staging: list[torch.Tensor] = []
        Handle.made.append(self)

    def enable_profiling(self) -> None:
        self.profiling = True

    def process_profiling_events(self) -> None:
        assert self.profiling
        self.calls.append("events")

    def add_all_gather_input_buffer(self, *, max_chunk_numel: int, buffer_numel: int) -> torch.Tensor:
        assert max_chunk_numel * 2 % 16 == 0, "pieces must be padded to 16 bytes"
        self._inputs.append(torch.zeros(buffer_numel, dtype=torch.bfloat16))
        return self._inputs[-1]

    def add_all_gather_output_buffer(self, source: torch.Tensor) -> torch.Tensor:
        assert any(source is known for known in self._inputs)
        self._outputs.append(torch.zeros(source.numel() * dist.get_world_size(), dtype=torch.bfloat16))
        return self._outputs[-1]

    def add_reduce_scatter_buffer(self, numel: int) -> torch.Tensor:
        self._staging.append(torch.zeros(numel, dtype=torch.bfloat16))
        return self._staging[-1]

    def all_gather(self, piece: torch.Tensor, output: torch.Tensor) -> None:
        assert _lies_in(piece, self._inputs)
        assert _lies_in(output, self._outputs)
        dist.all_gather(list(output.chunk(dist.get_world_size())), piece)
        self.calls.append("gather")

    def reduce_scatter(self, staging: torch.Tensor) -> None:
        assert _lies_in(staging, self._staging)
        total = staging.float()
        dist.all_reduce(total)
        mine = slice(*(dist.get_rank() + end for end in (0, 1)))
        staging.view(dist.get_world_size(), -1)[mine] = total.view(dist.get_world_size(), -1)[mine].bfloat16()
        self.calls.append("reduce")


def _lies_in(tensor: torch.Tensor, buffers: list[torch.Tensor]) -> bool:
    return tensor.dtype is torch.bfloat16 and any(
        tensor.data_ptr() == buffer.data_ptr() and tensor.numel() <= buffer.numel() for buffer in buffers
    )


@contextmanager
def installed() -> Iterator[list[Handle]]:
    """Let ``import yccl`` find the stand-in; yields the handles that are made meanwhile."""
    Handle.made = []
    module = types.ModuleType("yccl")
    module.Handle = Handle  # type: ignore[attr-defined]
    sys.modules["yccl"] = module
    try:
        yield Handle.made
    finally:
        del sys.modules["yccl"]
