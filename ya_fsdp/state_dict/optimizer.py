"""State dicts of an optimizer over a sharded model, by parameter name; the format of torch.distributed.checkpoint.

``{"state": {name: {key: value}}, "param_groups": [{..., "params": [names]}]}``, so that files are exchanged with
PyTorch FSDP2 and do not depend on the order of parameters.
"""

from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from ya_fsdp._torch_compat import DTensor
from ya_fsdp.ragged import RaggedShardDTensor, gather_full, slice_full
from ya_fsdp.ragged.convert import spec_like
from ya_fsdp.runtime.compiler import plain_name
from ya_fsdp.state_dict.transfer import check_local, local_header

__all__ = [
    "get_full_optimizer_state_dict",
    "get_local_optimizer_state_dict",
    "get_sharded_optimizer_state_dict",
    "load_full_optimizer_state_dict",
    "load_local_optimizer_state_dict",
    "load_sharded_optimizer_state_dict",
    "parameter_names",
    "parameters_by_name",
]

StateDict = dict[str, Any]

_SHAPED = {"exp_avg", "exp_avg_sq", "max_exp_avg_sq", "momentum_buffer", "square_avg", "grad_avg", "sum", "acc_delta"}
"""State of torch's optimizers that always has its parameter's shape."""


def parameter_names(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[list[str]]:
    """Names of the optimizer's parameters, per group.

    Raises:
        ValueError: If the optimizer holds a tensor that is not a parameter of the model.
    """
    names = {id(value): plain_name(name) for name, value in reversed(list(model.state_dict(keep_vars=True).items()))}
    result = []
    for index, group in enumerate(optimizer.param_groups):
        for place, param in enumerate(group["params"]):
            if id(param) not in names:
                raise ValueError(
                    f"parameter {place} of group {index} of {type(optimizer).__name__}, of shape {tuple(param.shape)}, "
                    f"is not a parameter of {type(model).__name__}; build the optimizer from the sharded model's "
                    f"parameters"
                )
        result.append([names[id(param)] for param in group["params"]])
    return result


def get_sharded_optimizer_state_dict(model: nn.Module, optimizer: torch.optim.Optimizer) -> StateDict:
    """State as ``RaggedShardDTensor`` where it has its parameter's shape, as it is otherwise. No communication."""
    return _collect(model, optimizer, lambda value: value)


def get_full_optimizer_state_dict(
    model: nn.Module, optimizer: torch.optim.Optimizer, *, rank0_only: bool = True, cpu_offload: bool = True
) -> StateDict:
    """State as full tensors, gathered one at a time. A collective; see ``get_full_state_dict`` for the arguments."""
    keeps = not rank0_only or not dist.is_initialized() or dist.get_rank() == 0

    def full(value: Any) -> Any:
        if isinstance(value, RaggedShardDTensor):
            value = gather_full(value.local_data, value._spec)
        if not keeps:
            return None
        return value.cpu() if cpu_offload and isinstance(value, torch.Tensor) else value

    result = _collect(model, optimizer, full)
    return result if keeps else {}


def get_local_optimizer_state_dict(model: nn.Module, optimizer: torch.optim.Optimizer) -> StateDict:
    """This rank's slices, with what is needed to refuse them elsewhere. No communication."""
    full = _collect(model, optimizer, lambda value: value)
    sharded = {
        name: [key for key, value in entry.items() if isinstance(value, RaggedShardDTensor)]
        for name, entry in full["state"].items()
    }
    local = _collect(model, optimizer, lambda v: v.local_data if isinstance(v, RaggedShardDTensor) else v)
    return {"header": local_header(parameters_by_name(model, optimizer)), "sharded": sharded, **local}


def load_full_optimizer_state_dict(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    state_dict: Mapping[str, Any],
    *,
    broadcast_from_rank0: bool = False,
) -> None:
    """Loads full state. A collective if it is broadcast, one tensor at a time.

    Args:
        model: The model.
        optimizer: Its optimizer; need not have taken a step.
        state_dict: What :func:`get_full_optimizer_state_dict` gave: on every rank, or on rank 0 only if it is
            broadcast.
        broadcast_from_rank0: Take everything from rank 0.

    Raises:
        RuntimeError: If groups or names differ from the optimizer's, or a shape from its parameter's; nothing is
            changed then.
    """
    from_rank0 = broadcast_from_rank0 and dist.is_initialized() and dist.get_world_size() > 1
    outline: list[Any] = [_outline(state_dict) if state_dict else None]
    if from_rank0:
        dist.broadcast_object_list(outline, src=0)
    _check(model, optimizer, outline[0])
    params = parameters_by_name(model, optimizer)

    def read(name: str, key: str, hint: Any) -> Any:
        source = state_dict["state"][name][key] if state_dict else None
        if not isinstance(hint, _TensorHint):
            return hint
        if from_rank0:
            source = _broadcast(source, hint, params[name].device)
        return _as_shard(key, source, params[name])

    _install(model, optimizer, outline[0], read)


def load_sharded_optimizer_state_dict(
    model: nn.Module, optimizer: torch.optim.Optimizer, state_dict: Mapping[str, Any]
) -> None:
    """Loads state whose tensors are sharded like the parameters, or plain and full. No communication then."""
    outline = _outline(state_dict)
    _check(model, optimizer, outline)
    params = parameters_by_name(model, optimizer)
    _install(model, optimizer, outline, lambda n, key, hint: _as_shard(key, state_dict["state"][n][key], params[n]))


def load_local_optimizer_state_dict(
    model: nn.Module, optimizer: torch.optim.Optimizer, state_dict: Mapping[str, Any]
) -> None:
    """Loads what :func:`get_local_optimizer_state_dict` gave on the same rank of the same number of ranks.

    Raises:
        RuntimeError: If the number of ranks, the rank, a name or a slice differs; nothing is changed then.
    """
    params = parameters_by_name(model, optimizer)
    check_local(state_dict["header"], local_header(params))

    def read(name: str, key: str, hint: Any) -> Any:
        value = state_dict["state"][name][key]
        if key not in state_dict["sharded"].get(name, ()):
            return value
        spec = params[name]._spec  # type: ignore[attr-defined]
        return RaggedShardDTensor.wrap(value.to(params[name].device), spec_like(spec, value.dtype))

    _check(model, optimizer, _outline(state_dict), is_local=True)
    _install(model, optimizer, _outline(state_dict), read)


# ---- the pieces -----------------------------------------------------------------------------------------------------


class _TensorHint:
    """Shape and dtype of a tensor that another rank has."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.shape = tuple(tensor.shape)
        self.dtype = tensor.dtype


def _collect(model: nn.Module, optimizer: torch.optim.Optimizer, convert: Callable[[Any], Any]) -> StateDict:
    names = parameter_names(model, optimizer)
    state: dict[str, Any] = {}
    groups = []
    for group, members in zip(optimizer.param_groups, names, strict=True):
        for param, name in zip(group["params"], members, strict=True):
            if param in optimizer.state:
                state[name] = {key: convert(value) for key, value in optimizer.state[param].items()}
        groups.append({**{key: value for key, value in group.items() if key != "params"}, "params": members})
    return {"state": state, "param_groups": groups}


def parameters_by_name(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, torch.Tensor]:
    """The optimizer's parameters, by name; raises as :func:`parameter_names` does."""
    names = parameter_names(model, optimizer)
    pairs = zip(optimizer.param_groups, names, strict=True)
    return {name: param for group, members in pairs for name, param in zip(members, group["params"], strict=True)}


def _outline(state_dict: Mapping[str, Any]) -> StateDict:
    """The state dict with hints in place of tensors."""

    def hint(value: Any) -> Any:
        return _TensorHint(value) if isinstance(value, torch.Tensor) else value

    state = {name: {key: hint(v) for key, v in entry.items()} for name, entry in state_dict["state"].items()}
    return {"state": state, "param_groups": state_dict["param_groups"]}


def _check(model: nn.Module, optimizer: torch.optim.Optimizer, outline: StateDict, *, is_local: bool = False) -> None:
    own, saved = parameter_names(model, optimizer), [list(group["params"]) for group in outline["param_groups"]]
    rank = dist.get_rank() if dist.is_initialized() else 0
    if [sorted(group) for group in own] != [sorted(group) for group in saved]:
        flat_own, flat_saved = {n for g in own for n in g}, {n for g in saved for n in g}
        lost, new = sorted(flat_saved - flat_own)[:5], sorted(flat_own - flat_saved)[:5]
        raise RuntimeError(
            f"rank {rank}: the state of {type(optimizer).__name__} does not fit: it has {len(saved)} groups of "
            f"{[len(group) for group in saved]} parameters, the optimizer {len(own)} of "
            f"{[len(group) for group in own]}; only saved: {lost}, only here: {new}"
        )
    params = parameters_by_name(model, optimizer)
    for name, entry in outline["state"].items():
        for key in _SHAPED & entry.keys():
            shape, expected = getattr(entry[key], "shape", None), tuple(params[name].shape)
            if shape is not None and not is_local and shape != expected:
                raise RuntimeError(
                    f"rank {rank}: {key} of {name} was saved with shape {shape}, the parameter has {expected}; "
                    f"nothing was loaded"
                )


def _broadcast(source: torch.Tensor | None, hint: _TensorHint, device: torch.device) -> torch.Tensor:
    if source is None:
        source = torch.empty(hint.shape, dtype=hint.dtype, device=device)
    source = source.to(device).contiguous()
    dist.broadcast(source, src=0)
    return source


def _as_shard(key: str, value: Any, param: torch.Tensor) -> Any:
    """This rank's slice of a full tensor of the parameter's shape; everything else as it is. Tensors are copied."""
    if not isinstance(value, torch.Tensor):
        return value
    if key == "step" or value.shape != param.shape or not isinstance(param, RaggedShardDTensor):
        return value.clone()
    if isinstance(value, RaggedShardDTensor):
        return value.clone()
    full = value.full_tensor() if isinstance(value, DTensor) else value
    local = slice_full(full, param._spec).to(param.device)
    return RaggedShardDTensor.wrap(local.clone(), spec_like(param._spec, full.dtype))


def _install(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    outline: StateDict,
    read: Callable[[str, str, Any], Any],
) -> None:
    names = [name for group in parameter_names(model, optimizer) for name in group]
    state = {
        index: {key: read(name, key, hint) for key, hint in outline["state"][name].items()}
        for index, name in enumerate(names)
        if name in outline["state"]
    }
    groups, start = [], 0
    for own, saved in zip(optimizer.param_groups, outline["param_groups"], strict=True):
        stop = start + len(own["params"])
        options = {key: value for key, value in saved.items() if key != "params"}
        groups.append({**options, "params": list(range(start, stop))})
        start = stop
    optimizer.load_state_dict({"state": state, "param_groups": groups})
