"""The seam between the engine and a communication backend."""

from typing import Protocol

import torch
import torch.distributed as dist

from ya_fsdp.comm.reduction import Reduction

__all__ = ["Backend", "Collectives", "Pending"]


class Pending(Protocol):
    """A collective that has been issued and may not have finished."""

    def wait(self) -> object:
        """Blocks until the result may be read: the host on CPU, the current stream on an accelerator."""


class Collectives(Protocol):
    """Collectives over one axis of a mesh.

    Attributes:
        rank: This process's place along the axis.
        world_size: Number of processes along the axis.
    """

    rank: int
    world_size: int

    def allocate(self, nbytes: int, device: torch.device) -> torch.Tensor | None:
        """Memory that the backend wants gathers to land in (registered or symmetric), or None if any will do.

        It is asked for once per gather buffer, at the same place on every rank, and is kept as long as the buffer.

        Shapes:
            ``[nbytes]``, of ``torch.uint8``.
        """

    def all_gather(self, output: torch.Tensor, piece: torch.Tensor, *, async_op: bool) -> Pending | None:
        """Gathers every rank's piece into ``output``; ``piece`` may be this rank's part of ``output``.

        Shapes:
            output: ``[world_size * n]``, piece: ``[n]``.
        """

    def reduce_scatter(
        self, output: torch.Tensor, staging: torch.Tensor, reduction: Reduction, *, async_op: bool
    ) -> Pending | None:
        """Reduces ``staging`` over ranks and leaves this rank's piece in ``output``. ``staging`` may be overwritten.

        Only the operator of ``reduction`` is applied here; its scale factors are the caller's. If ``output`` has
        another dtype than ``staging``, what travels has the dtype of ``staging`` and is added up in that of ``output``.

        Shapes:
            output: ``[n]``, staging: ``[world_size * n]``.
        """

    def all_reduce(self, tensor: torch.Tensor, reduction: Reduction, *, async_op: bool) -> Pending | None:
        """Reduces ``tensor`` in place over ranks."""


class Backend(Protocol):
    """Makes the collectives of a process group; ``fully_shard(..., backend=...)`` takes one. Must be hashable."""

    def collectives(self, group: dist.ProcessGroup) -> Collectives:
        """Collectives over ``group``, along which a unit is sharded. May communicate, and is called on all its ranks.

        Raises:
            ValueError: If the backend cannot serve the group; the message says why.
        """
