"""The seam between the engine and a communication backend."""

from typing import Protocol

import torch

from ya_fsdp.comm.reduction import Reduction

__all__ = ["Collectives", "Pending"]


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
