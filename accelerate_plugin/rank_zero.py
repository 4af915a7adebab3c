"""All ranks start from rank 0's weights and buffers, bit for bit, one unit at a time.

Ranks other than 0 may hold anything: other random numbers, or nothing at all (the meta device, placeholders). A unit's
tensors are put on the training device, filled from rank 0, and then sharded, so that no rank but 0 ever holds more than
one whole unit.
"""

from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

__all__ = ["RankZeroCopy", "check_same_model", "is_placeholder"]


def check_same_model(model: nn.Module) -> None:
    """Makes sure that all ranks built the same parameters and buffers before that matters. A collective.

    Raises:
        ValueError: naming the first tensor that differs, and the rank.
    """
    first_name: dict[int, str] = {}
    mine: list[tuple[object, ...]] = []
    for name, parameter in model.named_parameters(remove_duplicate=False):
        tied_to = first_name.setdefault(id(parameter), name)
        mine.append((name, tuple(parameter.shape), str(parameter.dtype), parameter.requires_grad, tied_to))
    mine += [(name, tuple(buffer.shape), str(buffer.dtype), None, name) for name, buffer in model.named_buffers()]
    everyone: list[list[tuple[object, ...]]] = [[] for _ in range(dist.get_world_size())]
    dist.all_gather_object(everyone, mine)
    for rank, theirs in enumerate(everyone):
        if theirs == everyone[0]:
            continue
        pairs = zip(everyone[0], theirs, strict=False)
        ours, other = next((pair for pair in pairs if pair[0] != pair[1]), (everyone[0][-1:], theirs[-1:]))
        raise ValueError(
            f"the model differs between ranks: rank 0 has {ours}, rank {rank} has {other} (name, shape, dtype, "
            "trainable, tied to); build the same model on every rank"
        )


class RankZeroCopy:
    """Puts a model's tensors on the training device and fills them from rank 0, module by module.

    Args:
        device: where the tensors shall be.
        sync: fill from rank 0; otherwise each rank keeps its own values, and there must be some.
    """

    def __init__(self, device: torch.device, *, sync: bool) -> None:
        self.device = device
        self.sync = sync and dist.get_world_size() > 1
        self._done: set[tuple[nn.Module, str]] = set()

    def settle(self, modules: Iterable[nn.Module], names: dict[nn.Module, str]) -> None:
        """Settles every parameter and buffer in ``modules`` that was not settled before. A collective.

        Raises:
            ValueError: for a tensor on the meta device that nobody has values for.
        """
        # Two modules may hold one tensor (tied weights); it is settled once, and both keep holding one.
        settled: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        for outer in modules:
            for module in outer.modules():
                for table in (module._parameters, module._buffers):
                    for name, tensor in list(table.items()):
                        if tensor is None or (module, name) in self._done:
                            continue
                        self._done.add((module, name))
                        full_name = f"{names[module]}.{name}" if names[module] else name
                        if id(tensor) not in settled:
                            settled[id(tensor)] = (tensor, self._settle_one(full_name, tensor))
                        new = settled[id(tensor)][1]
                        if new is not tensor:
                            table[name] = new  # type: ignore[assignment]

    @torch.no_grad()
    def _settle_one(self, name: str, tensor: torch.Tensor) -> torch.Tensor:
        rank = dist.get_rank()
        if isinstance(tensor, DTensor):
            raise ValueError(f"rank {rank}: {name} is sharded already ({tensor.placements}); prepare plain models only")
        if tensor.is_meta or is_placeholder(tensor):
            if rank == 0 or not self.sync:
                raise ValueError(
                    f"rank {rank}: {name} has no storage, so there are no weights to start from; build or load the "
                    "model on rank 0, and leave fsdp_sync_module_states on"
                )
            empty = torch.empty_like(tensor, device=self.device)
            tensor = nn.Parameter(empty, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else empty
        elif tensor.device != self.device:
            if isinstance(tensor, nn.Parameter):
                tensor.data = tensor.data.to(self.device)
            else:
                tensor = tensor.to(self.device)
        if self.sync:
            _broadcast(tensor)
        return tensor


def is_placeholder(tensor: torch.Tensor) -> bool:
    """Whether all elements of a tensor are one: it has a shape and a dtype, and no values of its own."""
    return tensor.numel() > 1 and not any(tensor.stride())


def _broadcast(tensor: torch.Tensor) -> None:
    """Overwrites a tensor with rank 0's, as bytes, so that every dtype travels and nothing is rounded."""
    data = tensor.detach()
    if data.numel() == 0:
        return
    flat = data.contiguous().view(-1)
    dist.broadcast(flat.view(torch.uint8), src=0)
    if flat.data_ptr() != data.data_ptr() or not data.is_contiguous():
        data.copy_(flat.view(data.shape))
