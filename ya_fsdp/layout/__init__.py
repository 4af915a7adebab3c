"""Sharding as arithmetic: pure integers, no tensor is allocated and no process group is needed."""

from ya_fsdp.layout.flat import FlatLayout, LocalSlice, ParamSpan, ParamSpec, Partition, local_slice
from ya_fsdp.layout.planner import plan_contiguous

__all__ = ["FlatLayout", "LocalSlice", "ParamSpan", "ParamSpec", "Partition", "local_slice", "plan_contiguous"]
