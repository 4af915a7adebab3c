"""Adapter of the ``yccl`` package: 16-bit gathers and reductions by all-to-all, from registered memory.

Of the package it uses one class, ``Handle(inter_color=, intra_color=)``, and of that:

- ``add_all_gather_input_buffer(max_chunk_numel=, buffer_numel=)``: registered bf16 memory for a rank's pieces,
- ``add_all_gather_output_buffer(input)``: registered bf16 memory for ``world_size`` pieces of such an input,
- ``all_gather(piece, output)``: prefixes of the two,
- ``add_reduce_scatter_buffer(numel)``: registered bf16 memory for a reduction,
- ``reduce_scatter(staging)``: sums a prefix of it, in 32 bits, and leaves each rank's piece in its place,
- ``enable_profiling()`` and ``process_profiling_events()``.

Everything else (other dtypes, flags, replicas) goes through ``torch.distributed``.
"""

import importlib
from typing import Any

import torch
import torch.distributed as dist

from ya_fsdp.comm.base import Collectives, Pending
from ya_fsdp.comm.process_group import ProcessGroupCollectives
from ya_fsdp.comm.reduction import Reduction
from ya_fsdp.comm.topology import group_colors, parse_colors

__all__ = ["YCCLBackend", "YCCLCollectives"]

_WIRE = torch.bfloat16


class YCCLCollectives(ProcessGroupCollectives):
    """Gathers and reductions of 16-bit tensors through a yccl handle.

    Args:
        group: The process group, for everything else.
        handle: The handle.
        reduces: Reduce through the handle too.
    """

    def __init__(self, group: dist.ProcessGroup, handle: Any, *, reduces: bool) -> None:
        super().__init__(group)
        self._handle = handle
        self._reduces = reduces
        self._inputs: dict[int, torch.Tensor] = {}
        self._staging: torch.Tensor | None = None

    def allocate(self, nbytes: int, device: torch.device) -> torch.Tensor | None:
        """See :meth:`ya_fsdp.comm.Collectives.allocate`."""
        piece_numel = nbytes // (_WIRE.itemsize * self.world_size)
        source = self._handle.add_all_gather_input_buffer(max_chunk_numel=piece_numel, buffer_numel=piece_numel)
        output: torch.Tensor = self._handle.add_all_gather_output_buffer(source)
        self._inputs[output.data_ptr()] = source
        return output.view(torch.uint8)[:nbytes]

    def all_gather(self, output: torch.Tensor, piece: torch.Tensor, *, async_op: bool) -> Pending | None:
        """See :meth:`ya_fsdp.comm.Collectives.all_gather`."""
        source = self._inputs.get(output.data_ptr())
        if source is None or output.dtype.itemsize != _WIRE.itemsize:
            return super().all_gather(output, piece, async_op=async_op)
        registered = source[: piece.numel()]
        registered.copy_(piece.view(_WIRE))  # bits: a gather does not compute
        self._handle.all_gather(registered, output.view(_WIRE))
        return None

    def reduce_scatter(
        self, output: torch.Tensor, staging: torch.Tensor, reduction: Reduction, *, async_op: bool
    ) -> Pending | None:
        """See :meth:`ya_fsdp.comm.Collectives.reduce_scatter`. Sums are 32 bits wide and come back in 16."""
        if not self._reduces or staging.dtype != _WIRE:
            return super().reduce_scatter(output, staging, reduction, async_op=async_op)
        numel = staging.numel()
        if self._staging is None or self._staging.numel() < numel:
            self._staging = self._handle.add_reduce_scatter_buffer(numel)
        registered = self._staging[:numel]
        registered.copy_(staging)
        self._handle.reduce_scatter(registered)
        output.copy_(registered[self.rank * output.numel() : (self.rank + 1) * output.numel()])
        if reduction.op == dist.ReduceOp.AVG:
            output.div_(self.world_size)
        return None


class YCCLBackend:
    """Communicates through the ``yccl`` package, where it is installed; for ``fully_shard(backend=...)``.

    Args:
        colors: Which ranks share a node; see :class:`HierarchicalBackend`.
        reduces: Reduce bf16 gradients through it too; gathers always go through it if they are 16 bits wide.
        profile: Turn on the package's own events.

    Raises:
        ModuleNotFoundError: If ``yccl`` is not installed; the message names the alternatives.
    """

    def __init__(
        self, colors: str | tuple[int, int] | None = None, *, reduces: bool = True, profile: bool = False
    ) -> None:
        self._colors = parse_colors(colors)
        self._module = _import_yccl()
        self._reduces = reduces
        self._profile = profile
        self._handles: list[Any] = []
        self._made: dict[dist.ProcessGroup, Collectives] = {}

    def collectives(self, group: dist.ProcessGroup) -> Collectives:
        """See :meth:`ya_fsdp.comm.Backend.collectives`. One handle per group."""
        if group not in self._made:
            if group.size() == 1:
                self._made[group] = ProcessGroupCollectives(group)
                return self._made[group]
            intra, inter = group_colors(self._colors, group)[group.rank()]
            handle = self._module.Handle(inter_color=inter, intra_color=intra)
            if self._profile:
                handle.enable_profiling()
            self._handles.append(handle)
            self._made[group] = YCCLCollectives(group, handle, reduces=self._reduces)
        return self._made[group]

    def process_profiling_events(self) -> None:
        """Hands the package's events to the profiler; call it at the end of an iteration."""
        for handle in self._handles:
            handle.process_profiling_events()


def _import_yccl() -> Any:
    try:
        return importlib.import_module("yccl")
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(
            "yccl is not installed. Without it: leave use_yccl out to communicate through torch.distributed, or give "
            "backend=HierarchicalBackend('rank // 8, rank % 8') (with 8 ranks per node), which needs no package."
        ) from error
