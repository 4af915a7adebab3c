"""``accelerator.prepare``: a model and its optimizers through ``fully_shard``."""

import os
import re
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from itertools import pairwise
from typing import Any

import torch
import torch.distributed as dist
from accelerate.utils import DynamoBackend
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from accelerate_plugin import guard, report
from accelerate_plugin.activation import apply_checkpointing
from accelerate_plugin.finalization import let_gloo_finish
from accelerate_plugin.keys import SettingsError
from accelerate_plugin.optimizers import KnownParameters, bind_late, detach, refuse_unsuited
from accelerate_plugin.placeholders import forget_placeholders
from accelerate_plugin.rank_zero import RankZeroCopy, check_same_model
from accelerate_plugin.resize import refuse_resize
from accelerate_plugin.settings import DTYPES, Settings, YaFSDPPlugin
from accelerate_plugin.units import Unit, find_units
from ya_fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy, YaFSDPModule, fully_shard

__all__ = ["bind_optimizer", "compiled_in_place", "is_managed", "prepare_model"]


def is_managed(model: nn.Module) -> bool:
    """Whether this engine manages the model."""
    return isinstance(model, YaFSDPModule)


def prepare_model(
    accelerator: Any, model: nn.Module, optimizers: Iterable[Any] = (), *, frozen: bool = False
) -> nn.Module:
    """Shards a model in place, from rank 0's weights, and binds optimizers to its sharded parameters. A collective.

    Args:
        optimizers: those built from this model's parameters; others are left as they are.
        frozen: the model is only run, never trained.

    Raises:
        SettingsError: where the settings do not fit the model.
        ValueError: where the model cannot be sharded as it is, or differs between ranks; for an optimizer that cannot
            work on slices.
    """
    if is_managed(model):
        return model
    plugin: YaFSDPPlugin = accelerator.state.fsdp_plugin
    settings = plugin.settings
    _refuse_wrapped(model)
    optimizers = list(optimizers)
    for optimizer in optimizers:
        refuse_unsuited(optimizer)
    if accelerator.device.type == "cuda" and hasattr(model, "hf_device_map"):
        raise ValueError("the model was loaded with a device_map; load it without one, the engine places each shard")
    check_same_model(model)
    if accelerator.device.type == "cpu":
        let_gloo_finish()
    class_name = type(model).__name__
    units = find_units(model, settings)
    if frozen:
        model.requires_grad_(False)
    checkpointed = 0 if frozen else apply_checkpointing(model, settings)
    before = KnownParameters(model)
    taken = [detach(optimizer, before.name_of) for optimizer in optimizers]
    raised = _shard(model, units, accelerator, settings, plugin.param_dtype)
    parameters = dict(model.named_parameters())
    for optimizer in taken:
        optimizer.attach(parameters)
    _finish(model, units, settings)
    blocks = [module for unit in units if unit.kind == "block" for module in unit.modules]
    _compile(accelerator, blocks if accelerator.state.dynamo_plugin.use_regional_compilation else [model])
    forget_placeholders(model)
    guard.note_managed(model, before)
    report.print_report(accelerator, model, units, report.Facts(class_name, raised, checkpointed))
    return model


def bind_optimizer(accelerator: Any, optimizer: Any) -> None:
    """Binds an optimizer that is prepared after its model, and refuses one with parameters of no prepared model."""
    known = [(guard.parameters_before(model), model) for model in accelerator._models]
    pairs = [(before, dict(model.named_parameters())) for before, model in known if before is not None]
    if pairs:
        bind_late(optimizer, pairs, rank=accelerator.process_index)


def _refuse_wrapped(model: nn.Module) -> None:
    from torch.distributed.fsdp import FullyShardedDataParallel
    from torch.nn.parallel import DataParallel, DistributedDataParallel

    for module in model.modules():
        if isinstance(module, FullyShardedDataParallel | DistributedDataParallel | DataParallel):
            raise ValueError(
                f"ya-fsdp was asked for, and the model passed to prepare contains {type(module).__name__}; pass the "
                "plain model"
            )
    if hasattr(model, "_orig_mod"):
        raise SettingsError(
            "the model passed to prepare is wrapped by torch.compile, and a wrapper cannot be sharded in place; pass "
            "the plain model, and ask for torch_compile (dynamo) in the settings or call model.compile() behind prepare"
        )


@contextmanager
def compiled_in_place(accelerator: Any, model: nn.Module) -> Iterator[None]:
    """Takes torch.compile out of accelerate's hands for a model that stays whole, and applies it in place.

    The Trainer evaluates a model that was not prepared in this way, and has the same object sharded when it trains.
    """
    plugin = accelerator.state.dynamo_plugin
    backend, plugin.backend = plugin.backend, DynamoBackend.NO
    try:
        yield
    finally:
        plugin.backend = backend
    if not is_managed(model):
        _compile(accelerator, [model])


def _compile(accelerator: Any, modules: Iterable[nn.Module]) -> None:
    """Compiles in place, as accelerate's settings say: neither names nor the model's class change."""
    plugin = accelerator.state.dynamo_plugin
    if plugin.backend is not DynamoBackend.NO:
        for module in modules:
            module.compile(**plugin.to_kwargs())


def _mesh(settings: Settings, device_type: str) -> DeviceMesh:
    world_size = dist.get_world_size()
    if not settings.hybrid:
        return init_device_mesh(device_type, (world_size,), mesh_dim_names=("dp_shard",))
    size = settings.hybrid_group_size or int(os.environ.get("LOCAL_WORLD_SIZE", world_size))
    if world_size % size:
        raise SettingsError(
            f"fsdp_ya_fsdp_hybrid_group_size: {size} does not divide the number of processes, {world_size}"
        )
    return init_device_mesh(device_type, (world_size // size, size), mesh_dim_names=("dp_replicate", "dp_shard"))


def _precision(settings: Settings, param_dtype: torch.dtype | None) -> MixedPrecisionPolicy:
    reduce_name = settings.reduce_dtype or ("fp32" if param_dtype is not None else None)
    reduce_dtype = None if reduce_name is None else DTYPES[reduce_name]
    return MixedPrecisionPolicy(param_dtype=param_dtype, reduce_dtype=reduce_dtype)


def _ignored(model: nn.Module, pattern: Any) -> set[nn.Parameter]:
    if pattern is None:
        return set()
    if not isinstance(pattern, str):
        return {parameter for module in pattern for parameter in module.parameters()}
    try:
        matcher = re.compile(pattern)
    except re.error as error:
        raise SettingsError(f"fsdp_ignored_modules: {pattern!r} is not a regular expression: {error}") from None
    matching = [module for name, module in model.named_modules() if matcher.fullmatch(name)]
    if not matching:
        raise SettingsError(f"fsdp_ignored_modules: no module of {type(model).__name__} has a name like {pattern!r}")
    return {parameter for module in matching for parameter in module.parameters()}


def _shard(
    model: nn.Module, units: list[Unit], accelerator: Any, settings: Settings, param_dtype: torch.dtype | None
) -> int:
    """Settles and shards unit by unit, then what is left; returns how many parameters were raised to fp32."""
    device = torch.device(accelerator.device)
    if device.type == "cpu":
        device = torch.device("cpu")  # accelerate says cpu:0, tensors say cpu
    offload = CPUOffloadPolicy(pin_memory=settings.pin_memory) if settings.offload_params else OffloadPolicy()
    ignored = _ignored(model, settings.ignored_modules)
    common: dict[str, Any] = {
        "mesh": _mesh(settings, device.type),
        "mp_policy": _precision(settings, param_dtype),
        "offload_policy": offload,
        "shard_alignment": settings.shard_alignment,
    }
    names = {module: name for name, module in model.named_modules()}
    copy = RankZeroCopy(device, sync=settings.sync_module_states)
    raised = 0
    for unit in units:
        ignored = _settle(copy, unit.modules, names, ignored)
        raised += _raise_precision(unit.modules, param_dtype)
        modules: Any = unit.modules[0] if len(unit.modules) == 1 else unit.modules
        fully_shard(
            modules, reshard_after_forward=_unit_reshard(unit, settings), ignored_params=ignored or None, **common
        )
    ignored = _settle(copy, [model], names, ignored)
    raised += _raise_precision([model], param_dtype)
    fully_shard(model, ignored_params=ignored or None, **common)
    return raised


def _settle(
    copy: RankZeroCopy, modules: list[nn.Module], names: dict[nn.Module, str], ignored: set[nn.Parameter]
) -> set[nn.Parameter]:
    """Settles modules, and keeps the set of ignored parameters true where the meta device made new ones necessary."""
    before = [(module, name, value) for outer in modules for module in outer.modules() for name, value in _own(module)]
    copy.settle(modules, names)
    if not ignored:
        return ignored
    for module, name, value in before:
        if value in ignored and module._parameters[name] is not value:
            ignored = (ignored - {value}) | {_existing(module, name)}
    return ignored


def _own(module: nn.Module) -> list[tuple[str, nn.Parameter]]:
    return [(name, value) for name, value in module._parameters.items() if value is not None]


def _existing(module: nn.Module, name: str) -> nn.Parameter:
    parameter = module._parameters[name]
    assert parameter is not None
    return parameter


def _unit_reshard(unit: Unit, settings: Settings) -> bool | int | None:
    """The last unit of forward is the first of backward: freeing it in between would only gather it twice."""
    if unit.kind in ("head", "tied"):
        return False
    return settings.reshard_after_forward


@torch.no_grad()
def _raise_precision(modules: Iterable[nn.Module], param_dtype: torch.dtype | None) -> int:
    """Under mixed precision trainable weights are kept and updated in fp32; small updates would vanish otherwise."""
    if param_dtype is None:
        return 0
    raised = 0
    for module in modules:
        for parameter in module.parameters():
            if parameter.requires_grad and parameter.dtype in (torch.bfloat16, torch.float16):
                parameter.data = parameter.data.float()
                raised += 1
    return raised


def _finish(model: nn.Module, units: list[Unit], settings: Settings) -> None:
    if settings.forward_prefetch:
        first = [unit.modules[0] for unit in units if unit.kind == "block"]
        for module, following in pairwise(first):
            if isinstance(module, YaFSDPModule) and isinstance(following, YaFSDPModule):
                module.set_modules_to_forward_prefetch([following])
    on_meta = [name for name, tensor in [*model.named_parameters(), *model.named_buffers()] if tensor.is_meta]
    assert not on_meta, f"left on the meta device: {on_meta}"
    refuse_resize(model)
    # transformers asks this before it generates: ranks must then run the same number of forward passes.
    model._is_fsdp_managed_module = True  # type: ignore[assignment]
