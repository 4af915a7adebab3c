"""Gathers into torch's symmetric memory, for which NCCL has faster kernels and copy engines."""

from typing import Any

import torch
import torch.distributed as dist

from ya_fsdp._torch_compat import symmetric_memory
from ya_fsdp.comm.base import Collectives
from ya_fsdp.comm.process_group import ProcessGroupCollectives

__all__ = ["SymmetricMemoryBackend", "SymmetricMemoryCollectives"]


class SymmetricMemoryCollectives(ProcessGroupCollectives):
    """The default collectives, with gather buffers that all ranks have mapped.

    Args:
        group: The process group.
        memory: torch's symmetric-memory module.
    """

    def __init__(self, group: dist.ProcessGroup, memory: Any) -> None:
        super().__init__(group)
        self._memory = memory

    def allocate(self, nbytes: int, device: torch.device) -> torch.Tensor | None:
        """See :meth:`ya_fsdp.comm.Collectives.allocate`. A collective."""
        buffer: torch.Tensor = self._memory.empty(nbytes, dtype=torch.uint8, device=device)
        self._memory.rendezvous(buffer, self.group)
        return buffer


class SymmetricMemoryBackend:
    """Lets gathers land in torch's symmetric memory, on NCCL; for ``fully_shard(backend=...)``.

    The memory is mapped once and kept, so units with a gather buffer of their own (embedding, head) hold it between
    their uses as well. Which kernels NCCL then chooses depends on the machine; its setting ``NCCL_CTA_POLICY=2`` asks
    for copy engines.
    """

    def collectives(self, group: dist.ProcessGroup) -> Collectives:
        """See :meth:`ya_fsdp.comm.Backend.collectives`.

        Raises:
            ValueError: If the group does not communicate through NCCL.
        """
        used = dist.get_backend_config(group)
        if "nccl" not in used:
            raise ValueError(
                f"SymmetricMemoryBackend: rank {dist.get_rank()}: the process group communicates through {used}, and "
                f"torch's symmetric memory for collectives needs nccl. Leave backend out, or give a "
                f"HierarchicalBackend, which runs on any process group."
            )
        if group.size() == 1:
            return ProcessGroupCollectives(group)
        symmetric_memory.set_backend("NCCL")
        dist.barrier(group=group)  # memory is mapped through the group's communicator, which its first use makes
        return SymmetricMemoryCollectives(group, symmetric_memory)
