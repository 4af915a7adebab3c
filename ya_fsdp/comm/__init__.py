"""Communication as functions of tensors: nothing here knows of parameters or policies."""

from ya_fsdp.comm.base import Backend, Collectives, Pending
from ya_fsdp.comm.process_group import ProcessGroupCollectives
from ya_fsdp.comm.reduction import Reduction, plan_reduction

__all__ = ["Backend", "Collectives", "Pending", "ProcessGroupCollectives", "Reduction", "plan_reduction"]
