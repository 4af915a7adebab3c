"""Communication as functions of tensors: nothing here knows of parameters or policies."""

from ya_fsdp.comm.base import Backend, Collectives, Pending
from ya_fsdp.comm.hierarchical import HierarchicalBackend
from ya_fsdp.comm.process_group import ProcessGroupCollectives
from ya_fsdp.comm.reduction import Reduction, plan_reduction
from ya_fsdp.comm.symmetric import SymmetricMemoryBackend
from ya_fsdp.comm.yccl import YCCLBackend

__all__ = [
    "Backend",
    "Collectives",
    "HierarchicalBackend",
    "Pending",
    "ProcessGroupCollectives",
    "Reduction",
    "SymmetricMemoryBackend",
    "YCCLBackend",
    "plan_reduction",
]
