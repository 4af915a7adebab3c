"""Rules over several keys, and the environment as a source of keys. Standard library only."""

from collections.abc import Mapping
from typing import Any

from accelerate_plugin.keys import KEYS, SettingsError, parse_key, unknown_key

__all__ = ["check", "from_environment", "override"]

_BY_VARIABLE = {key.env: key.name for key in KEYS.values()}
_PREFIX = "FSDP_"
_RESHARDS = {"FULL_SHARD": True, "SHARD_GRAD_OP": False, "HYBRID_SHARD": True, "HYBRID_SHARD_ZERO2": False}


def from_environment(environment: Mapping[str, str]) -> dict[str, Any]:
    """The keys that ``FSDP_*`` variables set.

    Raises:
        SettingsError: for a variable of that prefix that no key has, or a value that its key cannot take.
    """
    values = {}
    for variable, text in environment.items():
        if not variable.startswith(_PREFIX):
            continue
        if variable not in _BY_VARIABLE:
            raise unknown_key(variable, "the environment", _BY_VARIABLE)
        name = _BY_VARIABLE[variable]
        try:
            values[name] = parse_key(name, text)
        except SettingsError as error:
            raise SettingsError(f"{error} (environment variable {variable})") from None
    return values


def override(lower: Mapping[str, Any], higher: Mapping[str, Any]) -> dict[str, Any]:
    """Joins two sources of which the second has the last word, over keys that say the same thing too.

    ``fsdp_num_layers_to_checkpoint`` on the command line beats ``fsdp_activation_checkpointing`` of a file, and so on:
    otherwise a flag could not change what the file says without a contradiction.
    """
    values = dict(lower)
    for one, other in (
        ("fsdp_num_layers_to_checkpoint", "fsdp_activation_checkpointing"),
        ("fsdp_reshard_after_forward", "fsdp_sharding_strategy"),
    ):
        if one in higher and other not in higher:
            values.pop(other, None)
        elif other in higher and one not in higher:
            values.pop(one, None)
    strategy, reshard = lower.get("fsdp_sharding_strategy"), higher.get("fsdp_reshard_after_forward")
    if str(strategy).startswith("HYBRID") and "fsdp_sharding_strategy" not in values:
        values["fsdp_sharding_strategy"] = "HYBRID_SHARD" if reshard else "HYBRID_SHARD_ZERO2"
    return {**values, **higher}


def check(values: Mapping[str, Any]) -> None:
    """Refuses combinations that contradict each other or would have no effect.

    Args:
        values: what somebody gave, by key; keys that nobody gave are absent.

    Raises:
        SettingsError: naming both keys.
    """
    _check_resharding(values)
    _check_wrapping(values)
    _check_checkpointing(values)
    if values.get("fsdp_ya_fsdp_pin_memory") is not None and not values.get("fsdp_offload_params"):
        raise SettingsError("fsdp_ya_fsdp_pin_memory needs fsdp_offload_params: true; without it nothing is offloaded")
    if values.get("fsdp_sync_module_states") is False and values.get("fsdp_cpu_ram_efficient_loading"):
        raise SettingsError(
            "fsdp_cpu_ram_efficient_loading: true needs fsdp_sync_module_states: true, because only rank 0 has the "
            "weights; got fsdp_sync_module_states: false"
        )


def _check_resharding(values: Mapping[str, Any]) -> None:
    strategy = values.get("fsdp_sharding_strategy")
    reshard = values.get("fsdp_reshard_after_forward")
    if strategy is not None and reshard is not None and _RESHARDS[strategy] is not bool(reshard):
        raise SettingsError(
            f"fsdp_sharding_strategy: {strategy} and fsdp_reshard_after_forward: {str(reshard).lower()} contradict "
            "each other; give one of them"
        )
    size = values.get("fsdp_ya_fsdp_hybrid_group_size")
    if size is not None and not str(strategy).startswith("HYBRID"):
        raise SettingsError(
            f"fsdp_ya_fsdp_hybrid_group_size: {size} needs fsdp_sharding_strategy: HYBRID_SHARD or HYBRID_SHARD_ZERO2; "
            f"got {strategy}"
        )


def _check_wrapping(values: Mapping[str, Any]) -> None:
    policy = values.get("fsdp_auto_wrap_policy")
    if values.get("fsdp_min_num_params") and policy != "SIZE_BASED_WRAP":
        raise SettingsError(f"fsdp_min_num_params needs fsdp_auto_wrap_policy: SIZE_BASED_WRAP; got {policy}")
    if values.get("fsdp_transformer_layer_cls_to_wrap") and policy in ("SIZE_BASED_WRAP", "NO_WRAP"):
        raise SettingsError(
            f"fsdp_transformer_layer_cls_to_wrap needs fsdp_auto_wrap_policy: TRANSFORMER_BASED_WRAP; got {policy}"
        )


def _check_checkpointing(values: Mapping[str, Any]) -> None:
    switch, count = values.get("fsdp_activation_checkpointing"), values.get("fsdp_num_layers_to_checkpoint")
    if switch is False and count:
        raise SettingsError(
            f"fsdp_activation_checkpointing: false and fsdp_num_layers_to_checkpoint: {count} contradict each other; "
            "leave the first out, or set the second to 0"
        )
    if values.get("fsdp_activation_checkpointing_offload") and not (switch if count is None else count):
        raise SettingsError(
            "fsdp_activation_checkpointing_offload: true needs fsdp_activation_checkpointing: true (or "
            "fsdp_num_layers_to_checkpoint of 1 or more)"
        )
