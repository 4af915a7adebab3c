"""Bytes that a sharded model takes on this rank."""

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import nn

from ya_fsdp._torch_compat import get_module_state
from ya_fsdp.ragged import RaggedShardDTensor
from ya_fsdp.runtime.state import YaFSDPState

__all__ = ["MemoryReport", "memory_report"]


@dataclass(frozen=True)
class MemoryReport:
    """Memory of one rank. Units: bytes, except for the two counts.

    Attributes:
        parameters: Sharded master weights, padding included, and parameters that are not sharded.
        gradients: Gradients that exist at this moment.
        optimizer: Optimizer state.
        buffers: Gather buffers that are allocated at this moment.
        num_units: Units that have parameters.
        num_parameters: Elements of the full model; tied parameters count once.
    """

    parameters: int
    gradients: int
    optimizer: int
    buffers: int
    num_units: int
    num_parameters: int


def memory_report(model: nn.Module, optimizer: torch.optim.Optimizer | None = None) -> MemoryReport:
    """Adds up what a model, sharded or not, and its optimizer take on this rank.

    Args:
        model: The model.
        optimizer: Its optimizer, if the state is to be counted.
    """
    states = {id(s): s for m in model.modules() if isinstance(s := get_module_state(m), YaFSDPState)}
    groups = [group for state in states.values() for group in state.groups]
    sharded = {id(param.sharded_param): param.sharded_param for group in groups for param in group.params}
    shown = {id(param.unsharded_param) for group in groups for param in group.params}
    plain = {id(p): p for p in model.parameters() if id(p) not in sharded and id(p) not in shown}
    params = [*sharded.values(), *plain.values()]
    return MemoryReport(
        parameters=sum(group.shard.nbytes for group in groups) + _nbytes(plain.values()),
        gradients=_nbytes(param.grad for param in params if param.grad is not None),
        optimizer=_nbytes(_optimizer_tensors(optimizer)) if optimizer is not None else 0,
        buffers=sum(buffer.live_nbytes for buffer in {id(b): b for g in groups for b in g.buffers}.values()),
        num_units=sum(bool(state.groups) for state in states.values()),
        num_parameters=sum(param.numel() for param in params),
    )


def _nbytes(tensors: Iterable[torch.Tensor]) -> int:
    """Bytes of the storages behind tensors on this rank, each storage once."""
    storages = {}
    for tensor in tensors:
        local = tensor.local_data if isinstance(tensor, RaggedShardDTensor) else tensor
        storage = local.untyped_storage()
        storages[storage._cdata] = storage.nbytes()
    return sum(storages.values())


def _optimizer_tensors(optimizer: torch.optim.Optimizer) -> Iterable[torch.Tensor]:
    for state in optimizer.state.values():
        yield from (value for value in state.values() if isinstance(value, torch.Tensor))
