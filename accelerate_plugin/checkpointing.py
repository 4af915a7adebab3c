"""Saving and loading: full files in plain formats, written by rank 0.

``get_state_dict`` gives what ``save_pretrained`` and ``save_model`` write: whole tensors under the names of the
unsharded model. A training checkpoint is two files with the names that accelerate gives them, so that its own
bookkeeping finds them: the model's tensors, and the optimizer's state by parameter name, which any number of processes
can load.
"""

import functools
import os
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.modules.module import _IncompatibleKeys

import ya_fsdp
from accelerate_plugin.optimizers import inner_optimizer
from accelerate_plugin.prepare import is_managed
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
_MODEL, _OPTIMIZER = "pytorch_model_fsdp", "optimizer"


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


def _file(folder: str | os.PathLike[str], stem: str, index: int) -> str:
    return os.path.join(os.fspath(folder), f"{stem}.bin" if index == 0 else f"{stem}_{index}.bin")


def _write(value: Any, path: str) -> None:
    """Writes beside the target and renames, so that a failed save never leaves half a file under the real name."""
    unfinished = f"{path}.unfinished"
    torch.save(value, unfinished)
    os.replace(unfinished, path)


def _on_rank_zero(action: Callable[[], Any], what: str) -> Any:
    """Runs an action on rank 0 and lets every rank fail if it failed there, instead of waiting for it for ever."""
    result, problem = None, [None]
    if dist.get_rank() == 0:
        try:
            result = action()
        except Exception as error:
            problem = [f"{type(error).__name__}: {error}"]  # type: ignore[list-item]
    dist.broadcast_object_list(problem, src=0)
    if problem[0] is not None:
        raise RuntimeError(f"rank {dist.get_rank()}: {what} failed on rank 0: {problem[0]}")
    return result


def wrap_save_fsdp_model(original: Function) -> Function:
    """Writes the model's full tensors. A collective."""

    @functools.wraps(original)
    def save_fsdp_model(
        fsdp_plugin: Any,
        accelerator: Any,
        model: nn.Module,
        output_dir: str,
        model_index: int = 0,
        *args: Any,
        **kwargs: Any,
    ) -> None:
        if not (requested() and is_managed(model)):
            original(fsdp_plugin, accelerator, model, output_dir, model_index, *args, **kwargs)
            return
        state = ya_fsdp.get_full_state_dict(model, rank0_only=True, cpu_offload=True)
        path = _file(output_dir, _MODEL, model_index)

        def write() -> None:
            os.makedirs(output_dir, exist_ok=True)
            _write(state, path)

        _on_rank_zero(write, f"writing {path}")

    return save_fsdp_model


def wrap_load_fsdp_model(original: Function) -> Function:
    """Reads the model's full tensors on rank 0 and hands each rank its shards. A collective."""

    @functools.wraps(original)
    def load_fsdp_model(
        fsdp_plugin: Any,
        accelerator: Any,
        model: nn.Module,
        input_dir: str,
        model_index: int = 0,
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        if not (requested() and is_managed(model)):
            return original(fsdp_plugin, accelerator, model, input_dir, model_index, *args, **kwargs)
        path = _file(input_dir, _MODEL, model_index)
        state = _on_rank_zero(lambda: torch.load(path, map_location="cpu", weights_only=True), f"reading {path}")
        missing, unexpected = ya_fsdp.load_full_state_dict(model, state or {}, broadcast_from_rank0=True, strict=True)
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
        state = ya_fsdp.get_full_optimizer_state_dict(model, inner_optimizer(optimizer))
        path = _file(output_dir, _OPTIMIZER, optimizer_index)

        def write() -> None:
            os.makedirs(output_dir, exist_ok=True)
            _write(state, path)

        _on_rank_zero(write, f"writing {path}")

    return save_fsdp_optimizer


def wrap_load_fsdp_optimizer(original: Function) -> Function:
    """Reads the optimizer's state on rank 0 and hands each rank its shards. A collective."""

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
        path = _file(input_dir, _OPTIMIZER, optimizer_index)
        state = _on_rank_zero(lambda: torch.load(path, map_location="cpu", weights_only=True), f"reading {path}")
        inner = inner_optimizer(optimizer)
        ya_fsdp.load_full_optimizer_state_dict(model, inner, state or {}, broadcast_from_rank0=True)

    return load_fsdp_optimizer
