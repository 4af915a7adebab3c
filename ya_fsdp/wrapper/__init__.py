"""The older way to shard a model: one call with the list of modules, over ``fully_shard``."""

from ya_fsdp.wrapper.module import YaFSDP

__all__ = ["YaFSDP"]
