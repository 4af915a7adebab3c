"""State dicts of model and optimizer: full, sharded and local, in both directions."""

from ya_fsdp.state_dict.distributed import load_sharded_checkpoint, save_sharded_checkpoint
from ya_fsdp.state_dict.model import (
    get_full_state_dict,
    get_local_state_dict,
    get_sharded_state_dict,
    load_full_state_dict,
    load_local_state_dict,
    load_sharded_state_dict,
)
from ya_fsdp.state_dict.optimizer import (
    get_full_optimizer_state_dict,
    get_local_optimizer_state_dict,
    get_sharded_optimizer_state_dict,
    load_full_optimizer_state_dict,
    load_local_optimizer_state_dict,
    load_sharded_optimizer_state_dict,
    parameter_names,
)

__all__ = [
    "get_full_optimizer_state_dict",
    "get_full_state_dict",
    "get_local_optimizer_state_dict",
    "get_local_state_dict",
    "get_sharded_optimizer_state_dict",
    "get_sharded_state_dict",
    "load_full_optimizer_state_dict",
    "load_full_state_dict",
    "load_local_optimizer_state_dict",
    "load_local_state_dict",
    "load_sharded_checkpoint",
    "load_sharded_optimizer_state_dict",
    "load_sharded_state_dict",
    "parameter_names",
    "save_sharded_checkpoint",
]
