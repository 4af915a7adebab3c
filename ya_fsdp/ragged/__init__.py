"""Sharded tensors: placement, type, operators, and conversion from and to full tensors."""

from ya_fsdp._torch_compat import register_foreach_type
from ya_fsdp.ragged import ops as _ops  # noqa: F401 (fills the op table)
from ya_fsdp.ragged import reductions as _reductions  # noqa: F401 (the same)
from ya_fsdp.ragged.convert import gather_full, local_range, scatter_mean, slice_full
from ya_fsdp.ragged.dtensor import RaggedShardDTensor
from ya_fsdp.ragged.inner import data_of, with_data
from ya_fsdp.ragged.placement import RaggedShard, ragged_axis

__all__ = [
    "RaggedShard",
    "RaggedShardDTensor",
    "data_of",
    "gather_full",
    "local_range",
    "ragged_axis",
    "scatter_mean",
    "slice_full",
    "with_data",
]

register_foreach_type(RaggedShardDTensor)
