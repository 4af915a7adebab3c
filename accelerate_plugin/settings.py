"""The settings of a run as one value, and the plugin object that accelerate carries them in."""

import dataclasses
import os
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from accelerate.utils.dataclasses import FullyShardedDataParallelPlugin
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FullOptimStateDictConfig,
    FullStateDictConfig,
    LocalOptimStateDictConfig,
    LocalStateDictConfig,
    OffloadPolicy,
    ShardedOptimStateDictConfig,
    ShardedStateDictConfig,
    StateDictType,
)

from accelerate_plugin import rules
from accelerate_plugin.keys import KEYS, SettingsError, parse_key

__all__ = [
    "DTYPES",
    "Settings",
    "YaFSDPPlugin",
    "build_plugin",
    "given_by_plugin",
    "rank_zero_loads",
    "remember_script_values",
]

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}

# Values that a script gave through TrainingArguments and that accelerate's plugin has no field for.
_script_values: dict[str, Any] = {}

# Fields of accelerate's plugin and the key that each one is.
_FIELDS = {
    "fsdp_version": "fsdp_version",
    "sharding_strategy": "fsdp_sharding_strategy",
    "reshard_after_forward": "fsdp_reshard_after_forward",
    "backward_prefetch": "fsdp_backward_prefetch",
    "forward_prefetch": "fsdp_forward_prefetch",
    "state_dict_type": "fsdp_state_dict_type",
    "use_orig_params": "fsdp_use_orig_params",
    "sync_module_states": "fsdp_sync_module_states",
    "activation_checkpointing": "fsdp_activation_checkpointing",
    "activation_checkpointing_offload": "fsdp_activation_checkpointing_offload",
    "cpu_ram_efficient_loading": "fsdp_cpu_ram_efficient_loading",
    "transformer_cls_names_to_wrap": "fsdp_transformer_layer_cls_to_wrap",
    "min_num_params": "fsdp_min_num_params",
}


@dataclass(frozen=True, slots=True)
class Settings:
    """Everything that decides how a model is sharded, fully resolved.

    Attributes:
        reshard_after_forward: what is passed to the engine for each unit: a number means a smaller group of so many
            processes, ``None`` lets the engine decide.
        hybrid: replicate over groups of ``hybrid_group_size`` processes (``None``: the processes of one host).
        reduce_dtype: ``None`` where nobody chose one.
        num_layers_to_checkpoint: ``None`` where the switch alone decides.
        ignored_modules: a pattern for full names, or the modules themselves.
    """

    reshard_after_forward: bool | int | None = None
    hybrid: bool = False
    hybrid_group_size: int | None = None
    reduce_dtype: str | None = None
    offload_params: bool = False
    pin_memory: bool = True
    shard_alignment: int = 8
    auto_wrap_policy: str | None = None
    wrap_classes: tuple[str, ...] = ()
    min_num_params: int = 0
    forward_prefetch: bool = False
    cpu_ram_efficient_loading: bool = True
    sync_module_states: bool = True
    activation_checkpointing: bool = False
    activation_checkpointing_offload: bool = False
    num_layers_to_checkpoint: int | None = None
    ignored_modules: Any = None
    state_dict_type: str = "FULL_STATE_DICT"

    @classmethod
    def from_values(cls, values: Mapping[str, Any]) -> "Settings":
        """Resolves given values and defaults.

        Raises:
            SettingsError: for a combination that cannot work.
        """
        rules.check(values)

        def get(name: str) -> Any:
            value = values.get(name)
            return KEYS[name].default if value is None else value

        strategy = get("fsdp_sharding_strategy")
        reshard = get("fsdp_reshard_after_forward")
        if strategy is not None:
            reshard = strategy in ("FULL_SHARD", "HYBRID_SHARD")
        if get("fsdp_ya_fsdp_reshard_after_forward") is not None:
            reshard = get("fsdp_ya_fsdp_reshard_after_forward")
        sync = get("fsdp_sync_module_states")
        count = get("fsdp_num_layers_to_checkpoint")
        return cls(
            reshard_after_forward=reshard,
            hybrid=str(strategy).startswith("HYBRID"),
            hybrid_group_size=get("fsdp_ya_fsdp_hybrid_group_size"),
            reduce_dtype=get("fsdp_ya_fsdp_reduce_dtype"),
            offload_params=get("fsdp_offload_params"),
            pin_memory=get("fsdp_ya_fsdp_pin_memory"),
            shard_alignment=get("fsdp_ya_fsdp_shard_alignment"),
            auto_wrap_policy=get("fsdp_auto_wrap_policy"),
            wrap_classes=get("fsdp_transformer_layer_cls_to_wrap") or (),
            min_num_params=get("fsdp_min_num_params") or 0,
            forward_prefetch=get("fsdp_forward_prefetch"),
            cpu_ram_efficient_loading=sync and get("fsdp_cpu_ram_efficient_loading"),
            sync_module_states=sync,
            activation_checkpointing=bool(get("fsdp_activation_checkpointing")) if count is None else count > 0,
            activation_checkpointing_offload=get("fsdp_activation_checkpointing_offload"),
            num_layers_to_checkpoint=count,
            ignored_modules=get("fsdp_ignored_modules"),
            state_dict_type=get("fsdp_state_dict_type"),
        )


class YaFSDPPlugin(FullyShardedDataParallelPlugin):  # type: ignore[misc]
    """What ``accelerator.state.fsdp_plugin`` is under this engine.

    It carries :class:`Settings` and answers the attributes that accelerate, transformers, trl and peft read from
    accelerate's own plugin; its version is 2, whose calling pattern the engine follows.
    """

    def __init__(self, settings: Settings, param_dtype: torch.dtype | None = None) -> None:
        # The base class is a dataclass whose set-up reads the environment in its own way; only its attributes are
        # wanted.
        for item in dataclasses.fields(FullyShardedDataParallelPlugin):
            setattr(self, item.name, None)
        self.settings = settings
        self.param_dtype = param_dtype
        self.fsdp_version = 2
        self.limit_all_gathers = True
        self.reshard_after_forward = settings.reshard_after_forward
        self.activation_checkpointing = settings.activation_checkpointing
        self.activation_checkpointing_offload = settings.activation_checkpointing_offload
        self.cpu_ram_efficient_loading = settings.cpu_ram_efficient_loading
        self.transformer_cls_names_to_wrap = list(settings.wrap_classes) or None
        self.min_num_params = settings.min_num_params
        self.ignored_modules = settings.ignored_modules
        self.cpu_offload = CPUOffloadPolicy(settings.pin_memory) if settings.offload_params else OffloadPolicy()
        self.set_state_dict_type(settings.state_dict_type)

    def __repr__(self) -> str:
        return f"YaFSDPPlugin({self.settings}, param_dtype={self.param_dtype})"

    def set_mixed_precision(self, mixed_precision: Any, buffer_autocast: bool = False, override: bool = False) -> None:
        """Sets the compute dtype, unless the script chose one itself."""
        del buffer_autocast  # buffers keep their dtype: rotary tables and running statistics must not be rounded
        if self.param_dtype is not None and not override:
            return
        dtype = DTYPES.get(mixed_precision, mixed_precision)
        if not isinstance(dtype, torch.dtype):
            raise SettingsError(f"mixed_precision: got {mixed_precision!r}; ya-fsdp supports no, bf16 and fp16")
        self.param_dtype = dtype

    def set_state_dict_type(self, state_dict_type: Any = None) -> None:
        """Chooses the form of checkpoints; scripts call this before a final save."""
        name = parse_key("fsdp_state_dict_type", state_dict_type or "FULL_STATE_DICT")
        self.state_dict_type = StateDictType[name]
        # Of these only libraries that look at accelerate's plugin take notice; the engine needs none.
        self.state_dict_config, self.optim_state_dict_config = {
            "FULL_STATE_DICT": (
                FullStateDictConfig(offload_to_cpu=True, rank0_only=True),
                FullOptimStateDictConfig(offload_to_cpu=True, rank0_only=True),
            ),
            "SHARDED_STATE_DICT": (
                ShardedStateDictConfig(offload_to_cpu=True),
                ShardedOptimStateDictConfig(offload_to_cpu=True),
            ),
            "LOCAL_STATE_DICT": (LocalStateDictConfig(), LocalOptimStateDictConfig()),
        }[name]

    def set_auto_wrap_policy(self, model: torch.nn.Module) -> None:
        """Units are found when the model is prepared; nothing is stored here."""


def remember_script_values(values: Mapping[str, Any]) -> None:
    """Keeps what a script's ``fsdp_config`` said for keys that accelerate's plugin has no field for."""
    _script_values.clear()
    _script_values.update(values)


def rank_zero_loads() -> bool:
    """Whether pretrained weights are to be read by rank 0 only, as far as launch and script have said so far.

    Raises:
        SettingsError: for a variable that cannot be used.
    """
    return Settings.from_values({**rules.from_environment(os.environ), **_script_values}).cpu_ram_efficient_loading


def given_by_plugin(plugin: FullyShardedDataParallelPlugin) -> dict[str, Any]:
    """The keys that a script chose by building accelerate's plugin itself.

    Raises:
        SettingsError: for a field whose value cannot be expressed here.
    """
    values: dict[str, Any] = {}
    for field_name, key in _FIELDS.items():
        value = getattr(plugin, field_name, None)
        if value is not None:
            values[key] = parse_key(key, value)
    if getattr(plugin, "limit_all_gathers", True) is False:
        parse_key("fsdp_limit_all_gathers", "false")
    if getattr(plugin, "param_init_fn", None) is not None:
        raise SettingsError("param_init_fn is not supported by ya-fsdp: all weights come from rank 0; leave it out")
    offload = getattr(plugin, "cpu_offload", None)
    if offload is not None:
        values["fsdp_offload_params"] = parse_key("fsdp_offload_params", _offloads(offload))
    policy = getattr(plugin, "auto_wrap_policy", None)
    if policy is not None:
        values.update(_policy_values(policy))
    if getattr(plugin, "ignored_modules", None) is not None:
        values["fsdp_ignored_modules"] = plugin.ignored_modules
    return values


def _offloads(policy: Any) -> bool:
    if isinstance(policy, bool):
        return policy
    if hasattr(policy, "offload_params"):  # torch's FSDP1 object
        return bool(policy.offload_params)
    return type(policy).__name__ == "CPUOffloadPolicy"


def _policy_values(policy: Any) -> dict[str, Any]:
    from torch.distributed.fsdp.wrap import size_based_auto_wrap_policy, transformer_auto_wrap_policy

    function = policy.func if isinstance(policy, partial) else policy
    arguments = policy.keywords if isinstance(policy, partial) else {}
    if isinstance(function, str):
        return {"fsdp_auto_wrap_policy": parse_key("fsdp_auto_wrap_policy", function)}
    if function is transformer_auto_wrap_policy:
        classes = tuple(cls.__name__ for cls in arguments.get("transformer_layer_cls", ()))
        values: dict[str, Any] = {"fsdp_auto_wrap_policy": "TRANSFORMER_BASED_WRAP"}
        return values | ({"fsdp_transformer_layer_cls_to_wrap": classes} if classes else {})
    if function is size_based_auto_wrap_policy:
        return {
            "fsdp_auto_wrap_policy": "SIZE_BASED_WRAP",
            "fsdp_min_num_params": int(arguments.get("min_num_params", 10**8)),
        }
    raise SettingsError(
        f"auto_wrap_policy: got {policy!r}; ya-fsdp takes TRANSFORMER_BASED_WRAP, SIZE_BASED_WRAP, NO_WRAP, or torch's "
        "policies of these kinds"
    )


def _script_dtype(plugin: FullyShardedDataParallelPlugin) -> tuple[torch.dtype | None, str | None]:
    """Compute and reduce dtype of a script's own mixed precision policy."""
    policy = getattr(plugin, "mixed_precision_policy", None)
    if policy is None:
        return None, None
    if isinstance(policy, str):
        return DTYPES[str(parse_key("fsdp_ya_fsdp_reduce_dtype", policy))], None
    fields: dict[str, Any] = policy if isinstance(policy, dict) else vars(policy)
    reduce_dtype = fields.get("reduce_dtype")
    names = {dtype: name for name, dtype in DTYPES.items()}
    if reduce_dtype is not None and reduce_dtype not in names:
        raise SettingsError(f"mixed_precision_policy: reduce_dtype {reduce_dtype} is not one of {list(names)}")
    return fields.get("param_dtype"), None if reduce_dtype is None else names[reduce_dtype]


def build_plugin(plugin: FullyShardedDataParallelPlugin | None) -> YaFSDPPlugin:
    """Joins what the launch and what the script said into one plugin.

    Raises:
        SettingsError: where both said different things about one key, or a value cannot be used.
    """
    if isinstance(plugin, YaFSDPPlugin):
        return plugin
    values = rules.from_environment(os.environ)
    script = dict(_script_values)
    param_dtype = None
    if plugin is not None:
        script.update(given_by_plugin(plugin))
        param_dtype, reduce_dtype = _script_dtype(plugin)
        if reduce_dtype is not None:
            script["fsdp_ya_fsdp_reduce_dtype"] = reduce_dtype
    for name, value in script.items():
        if values.get(name, value) != value and name not in ("fsdp_version", "fsdp_use_orig_params"):
            raise SettingsError(
                f"{name}: the launch says {values[name]!r} and the script says {value!r}; give it in one place"
            )
    return YaFSDPPlugin(Settings.from_values({**values, **script}), param_dtype)
