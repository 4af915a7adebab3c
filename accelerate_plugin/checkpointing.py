"""Replacements of what accelerate and transformers call to save and load a model or an optimizer.

``get_state_dict`` gives what ``save_pretrained`` and ``save_model`` write: whole tensors under the names of the
unsharded model. The parts of a training checkpoint are written and read by :mod:`accelerate_plugin.saving.forms`.
"""

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch import nn
from torch.nn.modules.module import _IncompatibleKeys

import ya_fsdp
from accelerate_plugin.optimizers import inner_optimizer
from accelerate_plugin.prepare import is_managed
from accelerate_plugin.saving import forms
from accelerate_plugin.saving.folder import check_complete
from accelerate_plugin.saving.ranks import on_rank_zero
from accelerate_plugin.startup import requested

__all__ = [
    "wrap_get_state_dict",
    "wrap_load_fsdp_model",
    "wrap_load_fsdp_optimizer",
    "wrap_save_fsdp_model",
    "wrap_save_fsdp_optimizer",
    "wrap_save_pretrained",
]

Function = Callable[..., Any]


def wrap_get_state_dict(original: Function) -> Function:
    """Gathers a managed model's tensors; rank 0 gets them, on the CPU, the others an empty dict. A collective."""

    @functools.wraps(original)
    def get_state_dict(self: Any, model: nn.Module, unwrap: bool = True) -> Any:
        if not (requested() and is_managed(model)):
            return original(self, model, unwrap=unwrap)
        return ya_fsdp.get_full_state_dict(model, rank0_only=True, cpu_offload=True)

    return get_state_dict


def wrap_save_pretrained(original: Function) -> Function:
    """Gathers the tensors of a managed model where the script passes none. A collective."""

    @functools.wraps(original)
    def save_pretrained(self: Any, save_directory: Any, *args: Any, **kwargs: Any) -> Any:
        if not (requested() and is_managed(self)) or len(args) > 1 or kwargs.get("state_dict") is not None:
            return original(self, save_directory, *args, **kwargs)
        if not args and "is_main_process" not in kwargs and dist.get_world_size() > 1:
            raise ValueError(
                "save_pretrained of a sharded model gathers its weights, so all ranks have to call it: pass "
                "is_main_process=accelerator.is_main_process on every rank, or "
                "state_dict=accelerator.get_state_dict(model), which every rank has to call"
            )
        kwargs["state_dict"] = ya_fsdp.get_full_state_dict(self, rank0_only=True, cpu_offload=True)
        return original(self, save_directory, *args, **kwargs) if dist.get_rank() == 0 else None

    return save_pretrained


def _check_complete(folder: str) -> None:
    on_rank_zero(lambda: check_complete(Path(folder)), f"loading {folder}")


def wrap_save_fsdp_model(original: Function) -> Function:
    """Writes the model in the form that the run has chosen. A collective."""

    @functools.wraps(original)
    def save_fsdp_model(
        fsdp_plugin: Any,
        accelerator: Any,
        model: nn.Module,
        output_dir: str,
        model_index: int = 0,
        adapter_only: bool = False,
        *args: Any,
        **kwargs: Any,
    ) -> None:
        if not (requested() and is_managed(model)):
            original(fsdp_plugin, accelerator, model, output_dir, model_index, adapter_only, *args, **kwargs)
            return
        forms.write_model(forms.form_of(fsdp_plugin), model, output_dir, model_index, adapter_only=adapter_only)

    return save_fsdp_model


def wrap_load_fsdp_model(original: Function) -> Function:
    """Reads the model in the form that the checkpoint has. A collective."""

    @functools.wraps(original)
    def load_fsdp_model(
        fsdp_plugin: Any,
        accelerator: Any,
        model: nn.Module,
        input_dir: str,
        model_index: int = 0,
        adapter_only: bool = False,
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        if not (requested() and is_managed(model)):
            return original(fsdp_plugin, accelerator, model, input_dir, model_index, adapter_only, *args, **kwargs)
        _check_complete(input_dir)
        form = forms.form_of(fsdp_plugin)
        missing, unexpected = forms.read_model(form, model, input_dir, model_index, adapter_only=adapter_only)
        return _IncompatibleKeys(missing, unexpected)

    return load_fsdp_model


def wrap_save_fsdp_optimizer(original: Function) -> Function:
    """Writes the optimizer's state by parameter name. A collective."""

    @functools.wraps(original)
    def save_fsdp_optimizer(
        fsdp_plugin: Any,
        accelerator: Any,
        optimizer: Any,
        model: nn.Module,
        output_dir: str,
        optimizer_index: int = 0,
        *args: Any,
        **kwargs: Any,
    ) -> None:
        if not (requested() and is_managed(model)):
            original(fsdp_plugin, accelerator, optimizer, model, output_dir, optimizer_index, *args, **kwargs)
            return
        form = forms.form_of(fsdp_plugin)
        forms.write_optimizer(form, model, inner_optimizer(optimizer), output_dir, optimizer_index)

    return save_fsdp_optimizer


def wrap_load_fsdp_optimizer(original: Function) -> Function:
    """Reads the optimizer's state. A collective."""

    @functools.wraps(original)
    def load_fsdp_optimizer(
        fsdp_plugin: Any,
        accelerator: Any,
        optimizer: Any,
        model: nn.Module,
        input_dir: str,
        optimizer_index: int = 0,
        *args: Any,
        **kwargs: Any,
    ) -> None:
        if not (requested() and is_managed(model)):
            original(fsdp_plugin, accelerator, optimizer, model, input_dir, optimizer_index, *args, **kwargs)
            return
        form = forms.form_of(fsdp_plugin)
        forms.read_optimizer(form, model, inner_optimizer(optimizer), input_dir, optimizer_index)

    return load_fsdp_optimizer
