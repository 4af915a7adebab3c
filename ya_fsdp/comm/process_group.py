"""The default backend: ``torch.distributed`` (NCCL on GPUs, gloo on CPU)."""

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from ya_fsdp._torch_compat import all_reduce_options, gather_options, reduce_scatter_options
from ya_fsdp.comm.base import Pending
from ya_fsdp.comm.reduction import Reduction

__all__ = ["ProcessGroupCollectives", "Then"]


class Then:
    """A collective with something to do when it has finished."""

    def __init__(self, work: Pending, then: Callable[[], None]) -> None:
        self._work = work
        self._then = then

    def wait(self) -> None:
        """See :class:`ya_fsdp.comm.Pending`."""
        self._work.wait()
        self._then()


class ProcessGroupCollectives:
    """Collectives over a process group. A group of one rank copies and does not communicate.

    Gathers and reductions call the group itself: the checks of torch's functions cost as much as the call does.

    Args:
        group: The process group of one mesh axis.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.group = group
        self.rank = group.rank()
        self.world_size = group.size()
        self._gather_options = {is_async: gather_options(is_async) for is_async in (False, True)}
        self._options: dict[tuple[Any, int, bool], Any] = {}

    def allocate(self, nbytes: int, device: torch.device) -> torch.Tensor | None:
        """See :meth:`ya_fsdp.comm.Collectives.allocate`."""
        return None

    def all_gather(self, output: torch.Tensor, piece: torch.Tensor, *, async_op: bool) -> Pending | None:
        """See :meth:`ya_fsdp.comm.Collectives.all_gather`."""
        if self.world_size == 1:
            _copy(output, piece)
            return None
        if output.is_complex():
            output, piece = torch.view_as_real(output), torch.view_as_real(piece)
        work: Any = self.group._allgather_base(output, piece, self._gather_options[async_op])
        return work if async_op else _finished(work)

    def reduce_scatter(
        self, output: torch.Tensor, staging: torch.Tensor, reduction: Reduction, *, async_op: bool
    ) -> Pending | None:
        """See :meth:`ya_fsdp.comm.Collectives.reduce_scatter`."""
        if self.world_size == 1:
            _copy(output, staging)
            return None
        if output.dtype != staging.dtype:
            return self._add_up_wider(output, staging, reduction, async_op=async_op)
        if output.is_complex():
            output, staging = torch.view_as_real(output), torch.view_as_real(staging)
        options = self._options_of(reduce_scatter_options, reduction, async_op)
        work: Any = self.group._reduce_scatter_base(output, staging, options)
        return work if async_op else _finished(work)

    def _options_of(self, make: Callable[[Any, bool], Any], reduction: Reduction, async_op: bool) -> Any:
        key = (make, reduction.op.value, async_op)
        options = self._options.get(key)
        if options is None:
            options = self._options[key] = make(reduction.op, async_op)
        return options

    def _add_up_wider(
        self, output: torch.Tensor, staging: torch.Tensor, reduction: Reduction, *, async_op: bool
    ) -> Pending | None:
        """Sends each rank its piece of everybody's gradients and adds them up there, in the dtype of ``output``.

        The bytes that travel are those of a reduce-scatter in the narrow dtype; only the sum is exact to 32 bits.
        """
        received = torch.empty_like(staging)
        work: Any = dist.all_to_all_single(received, staging, group=self.group, async_op=async_op)

        def add_up() -> None:
            torch.sum(received.view(self.world_size, -1), dim=0, dtype=output.dtype, out=output)
            if reduction.op == dist.ReduceOp.AVG:
                output.div_(self.world_size)

        if async_op:
            return Then(work, add_up)
        add_up()
        return None

    def all_reduce(self, tensor: torch.Tensor, reduction: Reduction, *, async_op: bool) -> Pending | None:
        """See :meth:`ya_fsdp.comm.Collectives.all_reduce`."""
        if self.world_size == 1:
            return None
        if tensor.is_complex():
            tensor = torch.view_as_real(tensor)
        options = self._options_of(all_reduce_options, reduction, async_op)
        work: Any = self.group.allreduce([tensor], options)
        return work if async_op else _finished(work)


def _finished(work: Any) -> Pending | None:
    if work is not None:
        work.wait()
    return None


def _copy(output: torch.Tensor, piece: torch.Tensor) -> None:
    in_place = (
        output.untyped_storage()._cdata == piece.untyped_storage()._cdata
        and output.storage_offset() == piece.storage_offset()
    )
    if not in_place:
        output.copy_(piece)
