"""``from_pretrained`` under rank-0 loading: the other ranks read names, shapes and dtypes only.

Their parameters are then *placeholders*: plain zeros of the right shape and dtype that are views of a single element.
So a rank other than 0 never holds a copy of the model, and what people do between loading and preparing (resizing the
embeddings, adding adapters) works there as on rank 0, which it would not on the meta device. ``prepare`` fills them
from rank 0, one unit at a time. A model that is run without having been prepared is an error, not a run on zeros.
"""

import dataclasses
import functools
import os
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from accelerate_plugin.hooks import unless_asked

__all__ = ["fill_from_rank_zero", "forget_placeholders", "wrap_load_pretrained_model"]

Function = Callable[..., Any]
_MARK = "_ya_fsdp_weights_on_rank_zero"


def wrap_load_pretrained_model(original: Function) -> Function:
    """Lets ranks other than 0 load a checkpoint's outlines instead of its weights."""

    @unless_asked(original)
    def load(model: Any, state_dict: Any, checkpoint_files: Any, load_config: Any, *args: Any, **kwargs: Any) -> Any:
        from accelerate_plugin.settings import rank_zero_loads

        passed_on = functools.partial(original, model, *args, **kwargs)
        whole_model = kwargs.get("expected_keys") is None and not args  # adapters are small, and read by every rank
        usual = state_dict is None and checkpoint_files and not load_config.is_quantized and not load_config.device_map
        if not (whole_model and usual and load_config.device_mesh is None and rank_zero_loads()):
            return passed_on(state_dict=state_dict, checkpoint_files=checkpoint_files, load_config=load_config)
        setattr(model, _MARK, True)
        if _rank() == 0:
            return passed_on(state_dict=state_dict, checkpoint_files=checkpoint_files, load_config=load_config)
        from transformers.modeling_utils import load_state_dict

        outlines: dict[str, torch.Tensor] = {}
        for file in checkpoint_files:
            outlines.update(load_state_dict(file, map_location="meta", weights_only=load_config.weights_only))
        # Renaming and conversions of the checkpoint's format happen as on rank 0, on tensors without storage.
        on_meta = dataclasses.replace(load_config, device_map={"": "meta"})
        result = passed_on(state_dict=outlines, checkpoint_files=None, load_config=on_meta)
        _place_placeholders(model)
        model.register_forward_pre_hook(_refuse_to_run)
        return result

    return load


def _rank() -> int:
    return dist.get_rank() if dist.is_initialized() else int(os.environ.get("RANK", "0"))


def _place_placeholders(model: nn.Module) -> None:
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


def _refuse_to_run(module: nn.Module, args: Any) -> None:
    raise RuntimeError(
        f"rank {_rank()}: {type(module).__name__} was loaded by rank 0 only (fsdp_cpu_ram_efficient_loading: true) and "
        "runs without having been prepared, so this rank has no weights. Pass it to accelerator.prepare, or to "
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
    from accelerate_plugin.rank_zero import RankZeroCopy

    names = {module: name for name, module in model.named_modules()}
    RankZeroCopy(device, sync=True).settle([model], names)
    forget_placeholders(model)
