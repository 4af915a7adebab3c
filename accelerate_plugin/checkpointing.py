"""Saving and loading: full files in plain formats, written by rank 0.

``get_state_dict`` gives what ``save_pretrained`` and ``save_model`` write: whole tensors under the names of the
unsharded model. A training checkpoint is two files with the names that accelerate gives them, so that its own
bookkeeping finds them: the model's tensors, and the optimizer's state by parameter name, which any number of processes
can load.
"""

import functools
import os
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.modules.module import _IncompatibleKeys

import ya_fsdp
from accelerate_plugin.optimizers import inner_optimizer
from accelerate_plugin.prepare import is_managed
from accelerate_plugin.startup import requested
from ya_fsdp import RaggedShardDTensor

__all__ = [
    "full_optimizer_state",
    "load_full_optimizer_state",
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
        state = full_optimizer_state(model, inner_optimizer(optimizer))
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
        load_full_optimizer_state(model, inner_optimizer(optimizer), state)

    return load_fsdp_optimizer


def _named_slots(model: nn.Module, optimizer: torch.optim.Optimizer) -> Iterator[tuple[int, str, nn.Parameter]]:
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    for number, group in enumerate(optimizer.param_groups):
        for parameter in group["params"]:
            if id(parameter) not in names:
                raise ValueError(
                    f"rank {dist.get_rank()}: {type(optimizer).__name__} holds a parameter of shape "
                    f"{tuple(parameter.shape)} (group {number}) that is not in {type(model).__name__}"
                )
            yield number, names[id(parameter)], parameter


def full_optimizer_state(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """The optimizer's state with full tensors, by parameter name; empty on ranks other than 0. A collective.

    Shapes:
        each state tensor that is sharded like its parameter comes back with the parameter's full shape.
    """
    keep = dist.get_rank() == 0
    groups: list[dict[str, Any]] = [
        {key: value for key, value in group.items() if key != "params"} | {"params": []}
        for group in optimizer.param_groups
    ]
    states: dict[str, dict[str, Any]] = {}
    for number, name, parameter in _named_slots(model, optimizer):
        groups[number]["params"].append(name)
        full: dict[str, Any] = {}
        for key, value in optimizer.state.get(parameter, {}).items():
            if isinstance(value, RaggedShardDTensor):
                gathered = value.full_tensor()  # every rank takes part; only rank 0 keeps it
                full[key] = gathered.cpu() if keep else None
            elif isinstance(value, torch.Tensor):
                full[key] = value.detach().cpu().clone() if keep else None
            else:
                full[key] = value
        if full:
            states[name] = full
    return {"state": states, "param_groups": groups} if keep else {}


def load_full_optimizer_state(model: nn.Module, optimizer: torch.optim.Optimizer, state: dict[str, Any] | None) -> None:
    """Puts a state from :func:`full_optimizer_state` into an optimizer over sharded parameters. A collective.

    Args:
        state: on rank 0; other ranks pass anything.

    Raises:
        ValueError: where groups or parameters of the file and of the optimizer differ.
    """
    is_source = dist.get_rank() == 0
    outline = [_outline(state) if is_source and state is not None else None]
    dist.broadcast_object_list(outline, src=0)
    assert outline[0] is not None
    groups, layouts = outline[0]
    _check_groups(model, optimizer, groups)
    for group, saved in zip(optimizer.param_groups, groups, strict=True):
        group.update({key: value for key, value in saved.items() if key != "params"})
    for _, name, parameter in _named_slots(model, optimizer):
        if name not in layouts:
            optimizer.state.pop(parameter, None)
            continue
        source = state["state"][name] if is_source and state is not None else {}
        optimizer.state[parameter] = {
            key: _receive(layout, source.get(key), parameter) for key, layout in layouts[name].items()
        }


def _outline(state: dict[str, Any]) -> tuple[list[dict[str, Any]], dict[str, dict[str, Any]]]:
    """Everything but the large tensors: groups, and per tensor its shape and dtype; small values travel as they are."""
    layouts: dict[str, dict[str, Any]] = {}
    for name, values in state["state"].items():
        layouts[name] = {
            key: ("tensor", tuple(value.shape), value.dtype)
            if isinstance(value, torch.Tensor) and value.dim() > 0
            else ("value", value, None)
            for key, value in values.items()
        }
    return state["param_groups"], layouts


def _check_groups(model: nn.Module, optimizer: torch.optim.Optimizer, saved: list[dict[str, Any]]) -> None:
    mine: list[list[str]] = [[] for _ in optimizer.param_groups]
    for number, name, _ in _named_slots(model, optimizer):
        mine[number].append(name)
    theirs = [group["params"] for group in saved]
    if mine == theirs:
        return
    if len(mine) != len(theirs):
        raise ValueError(f"the checkpoint's optimizer has {len(theirs)} parameter groups, this one has {len(mine)}")
    number = next(index for index, pair in enumerate(zip(mine, theirs, strict=True)) if pair[0] != pair[1])
    difference = sorted(set(mine[number]) ^ set(theirs[number]))
    raise ValueError(
        f"group {number} of the checkpoint's optimizer holds other parameters, among them {difference[:3]}"
    )


def _receive(layout: tuple[str, Any, Any], value: Any, parameter: nn.Parameter) -> Any:
    kind, content, dtype = layout
    if kind == "value":
        return content
    local = parameter.to_local() if isinstance(parameter, RaggedShardDTensor) else parameter
    full = torch.empty(content, dtype=dtype, device=local.device)
    if dist.get_rank() == 0:
        full.copy_(value)
    dist.broadcast(full, src=0)
    if isinstance(parameter, RaggedShardDTensor) and full.shape == parameter.shape:
        return RaggedShardDTensor.from_full(full, parameter.device_mesh, parameter.placements)
    return full
