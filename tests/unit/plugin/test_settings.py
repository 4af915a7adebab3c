"""Settings from the launch and from the script become one value, or an error that names the key."""

from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest
import torch
from accelerate.utils.dataclasses import FullyShardedDataParallelPlugin
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy, ShardingStrategy, StateDictType
from torch.distributed.fsdp.wrap import size_based_auto_wrap_policy, transformer_auto_wrap_policy

from accelerate_plugin import hooks, settings
from accelerate_plugin.keys import SettingsError
from accelerate_plugin.settings import Settings, YaFSDPPlugin, build_plugin


@pytest.fixture(autouse=True)
def asked(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A process that asks for the engine, where accelerate's own plugin keeps what the script said."""
    for name in ("FSDP_CPU_RAM_EFFICIENT_LOADING", "FSDP_STATE_DICT_TYPE"):
        monkeypatch.setenv(name, "x")  # restored after tests that set it
        monkeypatch.delenv(name)
    monkeypatch.setenv("FSDP_YA_FSDP_ENABLED", "true")
    post_init = FullyShardedDataParallelPlugin.__post_init__
    original = getattr(post_init, "__wrapped__", post_init)
    monkeypatch.setattr(FullyShardedDataParallelPlugin, "__post_init__", hooks.wrap_plugin_post_init(original))
    yield
    settings.remember_script_values({})


def script(**fields: Any) -> Settings:
    return build_plugin(FullyShardedDataParallelPlugin(**fields)).settings


@pytest.mark.parametrize(
    ("values", "reshard", "hybrid"),
    [
        ({}, None, False),
        ({"fsdp_sharding_strategy": "FULL_SHARD"}, True, False),
        ({"fsdp_sharding_strategy": "SHARD_GRAD_OP"}, False, False),
        ({"fsdp_sharding_strategy": "HYBRID_SHARD"}, True, True),
        ({"fsdp_sharding_strategy": "HYBRID_SHARD_ZERO2"}, False, True),
        ({"fsdp_reshard_after_forward": False}, False, False),
        ({"fsdp_sharding_strategy": "FULL_SHARD", "fsdp_ya_fsdp_reshard_after_forward": False}, False, False),
    ],
)
def test_strategies_become_resharding_and_replication(values: Any, reshard: Any, hybrid: bool) -> None:
    found = Settings.from_values(values)
    assert (found.reshard_after_forward, found.hybrid) == (reshard, hybrid)


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ({}, (False, None)),
        ({"fsdp_activation_checkpointing": True}, (True, None)),
        ({"fsdp_num_layers_to_checkpoint": 0}, (False, 0)),
        ({"fsdp_num_layers_to_checkpoint": 2}, (True, 2)),
        ({"fsdp_num_layers_to_checkpoint": 0, "fsdp_activation_checkpointing": False}, (False, 0)),
    ],
)
def test_a_number_of_layers_decides_over_the_switch(values: Any, expected: Any) -> None:
    found = Settings.from_values(values)
    assert (found.activation_checkpointing, found.num_layers_to_checkpoint) == expected


def test_without_synchronisation_only_rank_zero_loading_goes_too() -> None:
    assert Settings.from_values({"fsdp_sync_module_states": False}).cpu_ram_efficient_loading is False


def test_a_scripts_own_plugin_is_read_field_by_field() -> None:
    found = script(
        sharding_strategy=ShardingStrategy.SHARD_GRAD_OP,
        activation_checkpointing=True,
        transformer_cls_names_to_wrap=["A", "B"],
        auto_wrap_policy="transformer_based_wrap",
        cpu_offload=False,
        forward_prefetch=True,
    )
    assert found.reshard_after_forward is False
    assert found.activation_checkpointing
    assert found.wrap_classes == ("A", "B")
    assert found.auto_wrap_policy == "TRANSFORMER_BASED_WRAP"
    assert found.forward_prefetch


def test_offloading_and_smaller_groups_are_taken_from_a_scripts_plugin() -> None:
    plugin = build_plugin(FullyShardedDataParallelPlugin(fsdp_version=2, cpu_offload=True, reshard_after_forward=4))
    assert plugin.settings.offload_params
    assert type(plugin.cpu_offload).__name__ == "CPUOffloadPolicy"
    assert plugin.settings.reshard_after_forward == 4


def test_torchs_policies_of_the_known_kinds_are_understood() -> None:
    by_class = partial(transformer_auto_wrap_policy, transformer_layer_cls={nn.Linear})
    assert script(auto_wrap_policy=by_class).wrap_classes == ("Linear",)
    by_size = partial(size_based_auto_wrap_policy, min_num_params=12)
    assert script(auto_wrap_policy=by_size).min_num_params == 12
    with pytest.raises(SettingsError, match="auto_wrap_policy"):
        script(auto_wrap_policy=lambda module, **_: True)


@pytest.mark.parametrize(
    ("fields", "name"),
    [
        ({"param_init_fn": print}, "param_init_fn"),
        ({"limit_all_gathers": False}, "fsdp_limit_all_gathers"),
        ({"sharding_strategy": ShardingStrategy.NO_SHARD}, "fsdp_sharding_strategy"),
        ({"reshard_after_forward": "sometimes"}, "fsdp_reshard_after_forward"),
    ],
)
def test_a_field_that_cannot_be_honoured_is_refused_by_name(fields: Any, name: str) -> None:
    with pytest.raises(SettingsError, match=name):
        script(**fields)


def test_launch_and_script_may_agree_but_not_contradict(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FSDP_SHARDING_STRATEGY", "FULL_SHARD")
    assert script(sharding_strategy="FULL_SHARD").reshard_after_forward is True
    with pytest.raises(
        SettingsError, match=r"fsdp_sharding_strategy: the launch says 'FULL_SHARD' and the script says"
    ):
        script(sharding_strategy="SHARD_GRAD_OP")


def test_the_plugin_answers_what_other_libraries_ask_of_accelerates_own() -> None:
    plugin = build_plugin(None)
    assert isinstance(plugin, YaFSDPPlugin)
    assert isinstance(plugin, FullyShardedDataParallelPlugin)
    assert plugin.fsdp_version == 2
    assert "FULL_STATE_DICT" in str(plugin.state_dict_type)
    plugin.set_mixed_precision("bf16")
    assert plugin.param_dtype is torch.bfloat16
    plugin.set_mixed_precision("fp16")
    assert plugin.param_dtype is torch.bfloat16, "the first choice stands unless overridden"
    assert build_plugin(plugin) is plugin


@pytest.mark.parametrize("form", ["FULL_STATE_DICT", "SHARDED_STATE_DICT", "LOCAL_STATE_DICT"])
def test_the_form_of_checkpoints_comes_from_the_launch_a_script_or_a_later_call(
    form: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    scripted = FullyShardedDataParallelPlugin(state_dict_type=StateDictType[form])
    assert build_plugin(scripted).state_dict_type is StateDictType[form]
    plugin = build_plugin(None)
    plugin.set_state_dict_type(form.lower())
    assert plugin.state_dict_type is StateDictType[form]
    with pytest.raises(SettingsError, match="fsdp_state_dict_type: got 'HALF'; allowed: FULL_STATE_DICT"):
        plugin.set_state_dict_type("HALF")
    monkeypatch.setenv("FSDP_STATE_DICT_TYPE", form)
    assert build_plugin(None).state_dict_type is StateDictType[form]


def test_a_scripts_mixed_precision_policy_is_kept() -> None:
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.bfloat16)
    plugin = build_plugin(FullyShardedDataParallelPlugin(mixed_precision_policy=policy))
    assert (plugin.param_dtype, plugin.settings.reduce_dtype) == (torch.bfloat16, "bf16")


def _arguments(**fields: Any) -> Any:
    from transformers import TrainingArguments

    class Arguments:
        fsdp: Any = None
        fsdp_config: Any = None
        activation_checkpointing = False
        _apply_legacy_fsdp_to_config = staticmethod(TrainingArguments._apply_legacy_fsdp_to_config)

    arguments = Arguments()
    for name, value in fields.items():
        setattr(arguments, name, value)
    original = TrainingArguments._process_fsdp_args
    return hooks.wrap_process_fsdp_args(getattr(original, "__wrapped__", original))(arguments)


def test_training_arguments_reach_the_engine_and_defaults_of_transformers_do_not(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("FSDP_CPU_RAM_EFFICIENT_LOADING", "true")
    config = {"reshard_after_forward": False, "ya_fsdp_reduce_dtype": "bf16", "num_layers_to_checkpoint": 1}
    assert _arguments(fsdp=True, fsdp_config=config) == {}
    found = build_plugin(FullyShardedDataParallelPlugin()).settings
    assert found.reshard_after_forward is False
    assert found.reduce_dtype == "bf16"
    assert found.num_layers_to_checkpoint == 1
    assert found.cpu_ram_efficient_loading is True


def test_a_config_without_the_fsdp_argument_is_not_dropped() -> None:
    _arguments(fsdp_config={"activation_checkpointing": True})
    assert build_plugin(None).settings.activation_checkpointing


def test_unknown_keys_of_training_arguments_are_errors() -> None:
    with pytest.raises(
        SettingsError, match="unknown key num_layer_to_checkpoint in fsdp_config; did you mean num_layers"
    ):
        _arguments(fsdp=True, fsdp_config={"num_layer_to_checkpoint": 2})
    with pytest.raises(SettingsError, match="xla belongs to TPUs"):
        _arguments(fsdp=True, fsdp_config={"xla": True})
