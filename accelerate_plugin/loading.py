"""``from_pretrained`` under rank-0 loading: the other ranks read names, shapes and dtypes only."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import torch

from accelerate_plugin.hooks import unless_asked

__all__ = ["wrap_load_pretrained_model"]

Function = Callable[..., Any]


def wrap_load_pretrained_model(original: Function) -> Function:
    """Lets ranks other than 0 load a checkpoint's outlines instead of its weights."""

    @unless_asked(original)
    def load(model: Any, state_dict: Any, checkpoint_files: Any, load_config: Any, *args: Any, **kwargs: Any) -> Any:
        from accelerate_plugin import placeholders
        from accelerate_plugin.settings import rank_zero_loads

        passed_on = functools.partial(original, model, *args, **kwargs)
        whole_model = kwargs.get("expected_keys") is None and not args  # adapters are small, and read by every rank
        usual = state_dict is None and checkpoint_files and not load_config.is_quantized and not load_config.device_map
        if not (whole_model and usual and load_config.device_mesh is None and rank_zero_loads()):
            return passed_on(state_dict=state_dict, checkpoint_files=checkpoint_files, load_config=load_config)
        placeholders.mark_as_read_by_rank_zero(model)
        if placeholders.own_rank() == 0:
            return passed_on(state_dict=state_dict, checkpoint_files=checkpoint_files, load_config=load_config)
        from transformers.modeling_utils import load_state_dict

        outlines: dict[str, torch.Tensor] = {}
        for file in checkpoint_files:
            outlines.update(load_state_dict(file, map_location="meta", weights_only=load_config.weights_only))
        # Renaming and conversions of the checkpoint's format happen as on rank 0, on tensors without storage.
        on_meta = dataclasses.replace(load_config, device_map={"": "meta"})
        result = passed_on(state_dict=outlines, checkpoint_files=None, load_config=on_meta)
        placeholders.place_placeholders(model)
        return result

    return load
