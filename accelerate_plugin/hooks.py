"""Replacements in accelerate and transformers for processes that train. Each one is the original unless asked for."""

import atexit
import functools
import os
import socket
import sys
from collections.abc import Callable
from inspect import signature
from typing import Any

from accelerate_plugin.compat import accelerator_available
from accelerate_plugin.keys import KEYS, SettingsError, parse_bool, parse_key, unknown_key
from accelerate_plugin.startup import ENABLED, is_launcher, requested

__all__ = [
    "unless_asked",
    "wrap_accelerator",
    "wrap_accelerator_state",
    "wrap_bf16_available",
    "wrap_clip_grad_norm",
    "wrap_partial_state",
    "wrap_plugin_post_init",
    "wrap_prepare",
    "wrap_prepare_model",
    "wrap_prepare_optimizer",
    "wrap_process_fsdp_args",
]

Function = Callable[..., Any]


def unless_asked(original: Function) -> Callable[[Function], Function]:
    """Builds a replacement that calls ``original`` where the engine was not asked for."""

    def decorate(ours: Function) -> Function:
        @functools.wraps(original)
        def replacement(*args: Any, **kwargs: Any) -> Any:
            # The launcher may inherit the variable, but it only starts the processes that train.
            asked = requested() and not is_launcher()
            return ours(*args, **kwargs) if asked else original(*args, **kwargs)

        return replacement

    return decorate


def wrap_partial_state(original: Function) -> Function:
    """Gives every process its rank and world size on a machine without a GPU too."""

    @unless_asked(original)
    def init(self: Any, cpu: bool = False, **kwargs: Any) -> None:
        if not type(self)._shared_state:
            parse_bool(KEYS["fsdp_ya_fsdp_enabled"].name, os.environ[ENABLED])
            _prepare_environment()
            cpu = cpu or not accelerator_available()
            _leave_group_at_exit()
        original(self, cpu, **kwargs)

    return init


def _prepare_environment() -> None:
    os.environ["ACCELERATE_USE_FSDP"] = "true"
    launched = ("LOCAL_RANK", "PMI_SIZE", "OMPI_COMM_WORLD_SIZE", "MV2_COMM_WORLD_SIZE", "WORLD_SIZE")
    if any(name in os.environ for name in launched):
        return
    # Started without a launcher: one process, which still needs a process group.
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    alone = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "LOCAL_WORLD_SIZE": "1"}
    os.environ.update({**alone, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)})


@functools.cache
def _leave_group_at_exit() -> None:
    """Closes the process group of a script that ends without doing so; its threads may abort the process otherwise."""

    def leave() -> None:
        import torch.distributed as dist

        # After an exception peers may still be inside a collective: leave at once and let the launcher end them.
        if getattr(sys, "last_value", None) is None and dist.is_available() and dist.is_initialized():
            dist.destroy_process_group()

    atexit.register(leave)


def wrap_plugin_post_init(original: Function) -> Function:
    """Leaves a script's own plugin as the script filled it; it is read when the Accelerator is built."""

    @unless_asked(original)
    def post_init(self: Any) -> None:
        loading = self.cpu_ram_efficient_loading
        if loading is None and self.sync_module_states is False:
            loading = False
        if loading is not None:
            # read while weights are loaded
            os.environ["FSDP_CPU_RAM_EFFICIENT_LOADING"] = str(bool(loading)).lower()

    return post_init


def wrap_accelerator(original: Function) -> Function:
    """Builds the plugin from all sources, and makes sure that the state took it."""
    parameters = signature(original)

    @unless_asked(original)
    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        from accelerate.utils import DistributedType

        from accelerate_plugin.compat import check_versions
        from accelerate_plugin.settings import YaFSDPPlugin, build_plugin

        check_versions()
        bound = parameters.bind(self, *args, **kwargs)
        _refuse_other_engines(bound.arguments)
        bound.arguments["fsdp_plugin"] = build_plugin(bound.arguments.get("fsdp_plugin"))
        original(*bound.args, **bound.kwargs)
        plugin = getattr(self.state, "fsdp_plugin", None)
        if self.distributed_type != DistributedType.FSDP or not isinstance(plugin, YaFSDPPlugin):
            raise RuntimeError(
                f"ya-fsdp was asked for ({ENABLED} is set) but is not active: accelerate chose "
                f"{self.distributed_type} with {type(plugin).__name__}. An Accelerator or PartialState built before "
                "the engine was asked for is one cause."
            )

    return init


def _refuse_other_engines(arguments: dict[str, Any]) -> None:
    others = {
        "deepspeed_plugin": "USE_DEEPSPEED",
        "deepspeed_plugins": "USE_DEEPSPEED",
        "megatron_lm_plugin": "USE_MEGATRON_LM",
    }
    for name, variable in others.items():
        if arguments.get(name) is not None or os.environ.get(f"ACCELERATE_{variable}", "").lower() == "true":
            raise SettingsError(f"{name} and ya-fsdp ask for two engines; leave one out")
    if arguments.get("parallelism_config") is not None or arguments.get("torch_tp_plugin") is not None:
        raise SettingsError("parallelism_config (tensor or context parallelism) is not supported together with ya-fsdp")
    precision = str(arguments.get("mixed_precision") or os.environ.get("ACCELERATE_MIXED_PRECISION", "no")).lower()
    if precision == "fp8":
        raise SettingsError("mixed_precision: fp8 is not supported by ya-fsdp; allowed: no, bf16, fp16")
    if precision == "fp16" and (arguments.get("cpu") or not accelerator_available()):
        raise SettingsError(
            "mixed_precision: fp16 needs a GPU, since gradients are not scaled on a CPU; use bf16 or no"
        )


def wrap_accelerator_state(original: Function) -> Function:
    """Selects FSDP with our plugin, which accelerate does with a GPU only."""

    @unless_asked(original)
    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        from accelerate.state import PartialState
        from accelerate.utils import DistributedType

        from accelerate_plugin.settings import YaFSDPPlugin

        fresh = not type(self)._shared_state
        original(self, *args, **kwargs)
        plugin = kwargs.get("fsdp_plugin")
        if not fresh or not isinstance(plugin, YaFSDPPlugin):
            return
        self.distributed_type = DistributedType.FSDP
        self.fsdp_plugin = plugin
        if self._mixed_precision != "no":
            plugin.set_mixed_precision(self._mixed_precision)
        PartialState._shared_state["distributed_type"] = DistributedType.FSDP

    return init


def wrap_prepare(original: Function) -> Function:
    """Shards models and binds optimizers, given together or one by one; prepares everything else as accelerate does."""

    @unless_asked(original)
    def prepare(self: Any, *args: Any, device_placement: list[bool] | None = None) -> Any:
        import torch

        from accelerate_plugin.prepare import prepare_model

        placement = device_placement if device_placement is not None else [None] * len(args)
        optimizers = [item for item in args if isinstance(item, torch.optim.Optimizer)]
        for item in args:
            if isinstance(item, torch.nn.Module):
                _take_over(self, prepare_model(self, item, [*optimizers, *self._optimizers]))
        result = [
            item
            if isinstance(item, torch.nn.Module)
            else self._prepare_one(item, first_pass=True, device_placement=where)
            for item, where in zip(args, placement, strict=True)
        ]
        result = [item if isinstance(item, torch.nn.Module) else self._prepare_one(item) for item in result]
        for item in result:
            if any(
                item is known for group in (self._dataloaders, self._optimizers, self._schedulers) for known in group
            ):
                item._is_accelerate_prepared = True
        return tuple(result) if len(result) > 1 else result[0]

    return prepare


def _take_over(accelerator: Any, model: Any) -> None:
    if not any(model is known for known in accelerator._models):
        accelerator._models.append(model)
    model._is_accelerate_prepared = True


def wrap_prepare_model(original: Function) -> Function:
    """Shards a model that is prepared by itself; models for evaluation only stay whole, as in accelerate."""

    @unless_asked(original)
    def prepare_model(
        self: Any, model: Any, device_placement: bool | None = None, evaluation_mode: bool = False
    ) -> Any:
        from accelerate_plugin import placeholders, prepare

        if evaluation_mode:
            placeholders.fill_from_rank_zero(model, self.device)
        if evaluation_mode or prepare.is_managed(model):
            with prepare.compiled_in_place(self, model):
                return original(self, model, device_placement=device_placement, evaluation_mode=evaluation_mode)
        _take_over(self, prepare.prepare_model(self, model, self._optimizers))
        return model

    return prepare_model


def wrap_prepare_optimizer(original: Function) -> Function:
    """Binds an optimizer to the sharded parameters of the models prepared so far."""

    @unless_asked(original)
    def prepare_optimizer(self: Any, optimizer: Any, device_placement: bool | None = None) -> Any:
        from accelerate_plugin.prepare import bind_optimizer

        if not getattr(optimizer, "_is_accelerate_prepared", False):
            bind_optimizer(self, optimizer)
        return original(self, optimizer, device_placement=device_placement)

    return prepare_optimizer


def wrap_clip_grad_norm(original: Function) -> Function:
    """Clips by the norm over all shards of all parameters, and returns it as a plain tensor, the same on every rank."""

    @unless_asked(original)
    def clip_grad_norm_(self: Any, parameters: Any, max_norm: float, norm_type: float = 2) -> Any:
        import torch
        from torch.distributed.tensor import DTensor

        self.unscale_gradients()
        parameters = [parameters] if isinstance(parameters, torch.Tensor) else list(parameters)
        norm = torch.nn.utils.clip_grad_norm_(parameters, max_norm, norm_type=norm_type)
        return norm.full_tensor() if isinstance(norm, DTensor) else norm

    return clip_grad_norm_


def wrap_bf16_available(original: Function) -> Function:
    """On a machine without a GPU bf16 runs on the CPU, which the Trainer allows only to scripts that ask for CPU."""

    @unless_asked(original)
    def is_torch_bf16_gpu_available() -> bool:
        return True if not accelerator_available() else bool(original())

    return is_torch_bf16_gpu_available


# Keys of TrainingArguments' fsdp_config whose name differs from ours, and those that belong to another engine.
_CONFIG_NAMES = {"cpu_offload": "fsdp_offload_params"}
_XLA_NAMES = ("xla", "xla_fsdp_v2", "xla_fsdp_grad_ckpt", "xla_fsdp_settings")


def wrap_process_fsdp_args(original: Function) -> Function:
    """Reads ``fsdp_config`` of TrainingArguments: every key is used or refused, and only what was given counts."""

    @unless_asked(original)
    def process(self: Any) -> Any:
        from accelerate_plugin.settings import remember_script_values

        if self.fsdp_config and not self.fsdp:
            self.fsdp = True
        loading = os.environ.get("FSDP_CPU_RAM_EFFICIENT_LOADING")
        plugin_args = original(self)
        if not self.fsdp:
            return plugin_args
        values = _script_values(self.fsdp_config)
        if "fsdp_cpu_ram_efficient_loading" not in values and loading is not None:
            os.environ["FSDP_CPU_RAM_EFFICIENT_LOADING"] = loading  # the original wrote its own default there
        remember_script_values(values)
        return {}

    return process


def _script_values(config: dict[str, Any]) -> dict[str, Any]:
    values = {}
    for name, value in config.items():
        if name in _XLA_NAMES:
            if value:
                raise SettingsError(f"fsdp_config: {name} belongs to TPUs and is not supported by ya-fsdp; remove it")
            continue
        key = _CONFIG_NAMES.get(name, f"fsdp_{name}")
        if key not in KEYS:
            raise unknown_key(name, "fsdp_config", [known.removeprefix("fsdp_") for known in KEYS])
        if name == "min_num_params" and not value:
            continue  # filled in by transformers
        values[key] = parse_key(key, value)
    return values
