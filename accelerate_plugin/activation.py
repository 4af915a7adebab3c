"""Activation checkpointing by the ``fsdp_*`` keys: the first so many blocks run forward again in the backward pass.

The recomputation is put inside the block's own ``forward``, below the hooks that gather and release its parameters. So
a block is gathered twice per step, as it is without checkpointing, and parameter names do not change.
"""

import functools
from typing import Any

import torch
from torch import nn
from torch.autograd.graph import save_on_cpu
from torch.utils.checkpoint import checkpoint

from accelerate_plugin.keys import SettingsError
from accelerate_plugin.settings import Settings
from accelerate_plugin.units import find_blocks

__all__ = ["apply_checkpointing"]

_MARK = "_ya_fsdp_checkpointed"


def apply_checkpointing(model: nn.Module, settings: Settings) -> int:
    """Checkpoints the blocks that the settings ask for and returns their number.

    Raises:
        SettingsError: where the model checkpoints its blocks already, or has fewer blocks than were asked for.
    """
    if not settings.activation_checkpointing:
        return 0
    if any(getattr(module, "gradient_checkpointing", False) is True for module in model.modules()):
        raise SettingsError(
            "activation checkpointing is switched on twice: by fsdp_activation_checkpointing (or "
            "fsdp_num_layers_to_checkpoint) and by the model's own gradient_checkpointing; leave one of them out"
        )
    blocks = find_blocks(model, settings.wrap_classes)
    wanted = len(blocks) if settings.num_layers_to_checkpoint is None else settings.num_layers_to_checkpoint
    if wanted > len(blocks):
        raise SettingsError(
            f"fsdp_num_layers_to_checkpoint: {wanted} was asked for, and {type(model).__name__} has "
            f"{len(blocks)} blocks"
        )
    if not blocks:
        raise SettingsError(
            f"fsdp_activation_checkpointing: no repeated block was found in {type(model).__name__}; name the class in "
            "fsdp_transformer_layer_cls_to_wrap"
        )
    for _, block in blocks[:wanted]:
        _checkpoint_block(block, offload=settings.activation_checkpointing_offload)
    return wanted


def _checkpoint_block(block: nn.Module, *, offload: bool) -> None:
    if getattr(block, _MARK, False):
        return
    forward = block.forward

    @functools.wraps(forward)
    def checkpointed(*args: Any, **kwargs: Any) -> Any:
        if not (block.training and torch.is_grad_enabled()):
            return forward(*args, **kwargs)
        kwargs = _without_cache(kwargs)

        def run() -> Any:
            return checkpoint(forward, *args, use_reentrant=False, preserve_rng_state=True, **kwargs)

        if not offload:
            return run()
        with save_on_cpu(pin_memory=torch.cuda.is_available()):
            return run()

    block.forward = checkpointed
    setattr(block, _MARK, True)


def _without_cache(kwargs: dict[str, Any]) -> dict[str, Any]:
    """A key-value cache would be extended twice, once per run; in training nobody reads it."""
    changed = dict(kwargs)
    for name in ("past_key_values", "past_key_value", "layer_past"):
        if changed.get(name) is not None:
            changed[name] = None
    if changed.get("use_cache"):
        changed["use_cache"] = False
    return changed
