"""Parameters with a shape and a dtype and no values, on ranks that leave reading a pretrained model to rank 0.

A placeholder is zeros that are views of a single element. So a rank other than 0 never holds a copy of the model, and
what people do between loading and preparing (resizing the embeddings, adding adapters) works there as on rank 0, which
it would not on the meta device. ``prepare`` fills them from rank 0, one unit at a time. A model that is run without
having been prepared is an error, not a run on zeros.
"""

import os
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from accelerate_plugin.rank_zero import RankZeroCopy

__all__ = ["fill_from_rank_zero", "forget_placeholders", "mark_as_read_by_rank_zero", "own_rank", "place_placeholders"]

_MARK = "_ya_fsdp_weights_on_rank_zero"


def own_rank() -> int:
    """This process's rank; known from the launch before there is a process group."""
    return dist.get_rank() if dist.is_initialized() else int(os.environ.get("RANK", "0"))


def mark_as_read_by_rank_zero(model: nn.Module) -> None:
    """Notes, on every rank, that only rank 0 has the weights of a model."""
    setattr(model, _MARK, True)


def place_placeholders(model: nn.Module) -> None:
    """Puts placeholders in place of a model's parameters on the meta device, and refuses to run it from now on."""
    made: dict[int, nn.Parameter] = {}
    for module in model.modules():
        for name, parameter in module._parameters.items():
            if parameter is None or not parameter.is_meta:
                continue
            if id(parameter) not in made:
                zeros = torch.zeros((), dtype=parameter.dtype).expand(parameter.shape)
                made[id(parameter)] = nn.Parameter(zeros, parameter.requires_grad)
                made[id(parameter)].__dict__.update(parameter.__dict__)  # transformers' marks: loaded, not to be drawn
            module._parameters[name] = made[id(parameter)]
    model.register_forward_pre_hook(_refuse_to_run)


def _refuse_to_run(module: nn.Module, args: Any) -> None:
    raise RuntimeError(
        f"rank {own_rank()}: {type(module).__name__} was loaded by rank 0 only (fsdp_cpu_ram_efficient_loading: true) "
        "and runs without having been prepared, so this rank has no weights. Pass it to accelerator.prepare, or to "
        "accelerator.prepare_model(model, evaluation_mode=True) if it is not trained; or set "
        "fsdp_cpu_ram_efficient_loading: false, so that every rank reads the weights"
    )


def forget_placeholders(model: nn.Module) -> None:
    """Lifts the refusal to run, for a model whose weights are there now."""
    for module in model.modules():
        module.__dict__.pop(_MARK, None)
        for key in [key for key, hook in module._forward_pre_hooks.items() if hook is _refuse_to_run]:
            del module._forward_pre_hooks[key]


def fill_from_rank_zero(model: nn.Module, device: torch.device) -> None:
    """Fills a model that stays whole on every rank, if only rank 0 loaded it. A collective in that case."""
    if not any(getattr(module, _MARK, False) for module in model.modules()):
        return
    names = {module: name for name, module in model.named_modules()}
    RankZeroCopy(device, sync=True).settle([model], names)
    forget_placeholders(model)
