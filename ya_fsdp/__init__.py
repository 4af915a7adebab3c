"""ya-fsdp: sharded data parallelism for transformer-like models.

``fully_shard`` shards a module in place; everything else here configures it or describes what it yields.
"""

from ya_fsdp.comm import HierarchicalBackend, SymmetricMemoryBackend, YCCLBackend
from ya_fsdp.estimate import Activations, MemoryEstimate, Stage, UnitSpec, describe_unit, estimate_memory
from ya_fsdp.fully_shard import UnshardHandle, YaFSDPModule, fully_shard
from ya_fsdp.module import share_comm_ctx
from ya_fsdp.policy import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy
from ya_fsdp.ragged import RaggedShard, RaggedShardDTensor
from ya_fsdp.report import MemoryReport, memory_report
from ya_fsdp.runtime.debug import set_debug
from ya_fsdp.state_dict import (
    get_full_optimizer_state_dict,
    get_full_state_dict,
    get_local_optimizer_state_dict,
    get_local_state_dict,
    get_sharded_optimizer_state_dict,
    get_sharded_state_dict,
    load_full_optimizer_state_dict,
    load_full_state_dict,
    load_local_optimizer_state_dict,
    load_local_state_dict,
    load_sharded_checkpoint,
    load_sharded_optimizer_state_dict,
    load_sharded_state_dict,
    parameter_names,
    save_sharded_checkpoint,
)
from ya_fsdp.wrapper import YaFSDP

__all__ = [
    "Activations",
    "CPUOffloadPolicy",
    "HierarchicalBackend",
    "MemoryEstimate",
    "MemoryReport",
    "MixedPrecisionPolicy",
    "OffloadPolicy",
    "RaggedShard",
    "RaggedShardDTensor",
    "Stage",
    "SymmetricMemoryBackend",
    "UnitSpec",
    "UnshardHandle",
    "YCCLBackend",
    "YaFSDP",
    "YaFSDPModule",
    "describe_unit",
    "estimate_memory",
    "fully_shard",
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
    "memory_report",
    "parameter_names",
    "save_sharded_checkpoint",
    "set_debug",
    "share_comm_ctx",
]
