"""Every key of ``fsdp_config`` does what its table says, or is refused with the reason: all keys, all their values."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from accelerate_plugin import rules
from accelerate_plugin.keys import KEYS, Kind, SettingsError
from accelerate_plugin.settings import Settings
from tests.huggingface import key_effects as see
from tests.huggingface.session import accelerated_steps, assert_close_to, plain_steps, session
from tests.support.models import build_model, token_batches

OnRanks = Callable[..., list[Any]]
HYBRID = {"fsdp_sharding_strategy": "HYBRID_SHARD"}
OFFLOAD = {"fsdp_offload_params": "true"}
RECOMPUTE = {"fsdp_activation_checkpointing": "true"}
BY_SIZE = {"fsdp_auto_wrap_policy": "SIZE_BASED_WRAP"}
SHARDED = ["", ".distcp", ".json"]
MLP = [f"model.layers.1.mlp.{part}_proj.weight" for part in ("down", "gate", "up")]

#: key, value, what is looked at, what is seen, and other keys that this one needs.
EFFECTS: list[tuple[str, str, Callable[..., Any], Any, dict[str, str]]] = [
    ("fsdp_ya_fsdp_enabled", "true", see.engine, "YaFSDPPlugin", {}),
    ("fsdp_ya_fsdp_enabled", "false", see.engine, "NoneType", {}),
    ("fsdp_ya_fsdp_reduce_dtype", "fp32", see.reduce_dtype, "float32", {}),
    ("fsdp_ya_fsdp_reduce_dtype", "bf16", see.reduce_dtype, "bfloat16", {}),
    ("fsdp_ya_fsdp_reduce_dtype", "fp16", see.reduce_dtype, "float16", {}),
    ("fsdp_ya_fsdp_reshard_after_forward", "true", see.gathers, (5, 3), {"fsdp_reshard_after_forward": "false"}),
    ("fsdp_ya_fsdp_reshard_after_forward", "false", see.gathers, (5, 0), {"fsdp_reshard_after_forward": "true"}),
    ("fsdp_ya_fsdp_hybrid_group_size", "1", see.copies, 2.0, HYBRID),
    ("fsdp_ya_fsdp_hybrid_group_size", "2", see.copies, 1.0, HYBRID),
    ("fsdp_ya_fsdp_pin_memory", "true", see.asked_of_the_engine, (None, "CPUOffloadPolicy", True), OFFLOAD),
    ("fsdp_ya_fsdp_pin_memory", "false", see.asked_of_the_engine, (None, "CPUOffloadPolicy", False), OFFLOAD),
    ("fsdp_ya_fsdp_shard_alignment", "8", see.aligned_to, 8, {}),
    ("fsdp_ya_fsdp_shard_alignment", "64", see.aligned_to, 64, {}),
    ("fsdp_num_layers_to_checkpoint", "0", see.recomputed, (0, 0), {}),
    ("fsdp_num_layers_to_checkpoint", "2", see.recomputed, (2, 0), {}),
    ("fsdp_version", "1", see.gathers, (5, 3), {}),
    ("fsdp_version", "2", see.gathers, (5, 3), {}),
    ("fsdp_sharding_strategy", "FULL_SHARD", see.gathers, (5, 3), {}),
    ("fsdp_sharding_strategy", "SHARD_GRAD_OP", see.gathers, (5, 0), {}),
    ("fsdp_sharding_strategy", "HYBRID_SHARD", see.copies, 2.0, {"fsdp_ya_fsdp_hybrid_group_size": "1"}),
    ("fsdp_sharding_strategy", "HYBRID_SHARD", see.gathers, (5, 3), {"fsdp_ya_fsdp_hybrid_group_size": "2"}),
    ("fsdp_sharding_strategy", "HYBRID_SHARD_ZERO2", see.gathers, (5, 0), {"fsdp_ya_fsdp_hybrid_group_size": "2"}),
    ("fsdp_reshard_after_forward", "true", see.gathers, (5, 3), {}),
    ("fsdp_reshard_after_forward", "FULL_SHARD", see.gathers, (5, 3), {}),
    ("fsdp_reshard_after_forward", "false", see.gathers, (5, 0), {}),
    ("fsdp_reshard_after_forward", "SHARD_GRAD_OP", see.gathers, (5, 0), {}),
    ("fsdp_reshard_after_forward", "2", see.asked_of_the_engine, (2, "OffloadPolicy", None), {}),
    ("fsdp_offload_params", "true", see.asked_of_the_engine, (None, "CPUOffloadPolicy", True), {}),
    ("fsdp_offload_params", "false", see.asked_of_the_engine, (None, "OffloadPolicy", None), {}),
    ("fsdp_auto_wrap_policy", "TRANSFORMER_BASED_WRAP", see.units, 5, {}),
    ("fsdp_auto_wrap_policy", "SIZE_BASED_WRAP", see.units, 5, {"fsdp_min_num_params": "5000"}),
    ("fsdp_auto_wrap_policy", "NO_WRAP", see.units, 1, {}),
    ("fsdp_transformer_layer_cls_to_wrap", "LlamaMLP, LlamaAttention", see.units, 9, {}),
    ("fsdp_min_num_params", "5000", see.units, 5, BY_SIZE),
    ("fsdp_min_num_params", "40000", see.units, 2, BY_SIZE),
    ("fsdp_backward_prefetch", "BACKWARD_PRE", see.gathered_ahead, (2, 2), {}),
    ("fsdp_forward_prefetch", "true", see.gathered_ahead, (3, 2), {}),
    ("fsdp_forward_prefetch", "false", see.gathered_ahead, (2, 2), {}),
    ("fsdp_state_dict_type", "FULL_STATE_DICT", see.checkpoint_files, ("pytorch_model_fsdp.bin", []), {}),
    ("fsdp_state_dict_type", "SHARDED_STATE_DICT", see.checkpoint_files, ("pytorch_model_fsdp_0", SHARDED), {}),
    ("fsdp_state_dict_type", "LOCAL_STATE_DICT", see.checkpoint_files, ("pytorch_model_fsdp_0_local", [".bin"]), {}),
    ("fsdp_use_orig_params", "true", see.left_whole, [], {}),
    ("fsdp_use_orig_params", "false", see.left_whole, [], {}),
    ("fsdp_cpu_ram_efficient_loading", "true", see.read_by, [0], {}),
    ("fsdp_cpu_ram_efficient_loading", "false", see.read_by, [0, 1], {}),
    ("fsdp_sync_module_states", "true", see.start, "rank 0", {}),
    ("fsdp_sync_module_states", "false", see.start, "its own", {}),
    ("fsdp_activation_checkpointing", "true", see.recomputed, (3, 0), {}),
    ("fsdp_activation_checkpointing", "false", see.recomputed, (0, 0), {}),
    ("fsdp_activation_checkpointing_offload", "true", see.recomputed, (3, 3), RECOMPUTE),
    ("fsdp_activation_checkpointing_offload", "false", see.recomputed, (3, 0), RECOMPUTE),
    ("fsdp_ignored_modules", r"model\.layers\.1\.mlp", see.left_whole, MLP, {}),
    ("fsdp_limit_all_gathers", "true", see.buffers, True, {}),
]

#: key, value, a piece of the reason, and other keys that are given too.
REFUSALS: list[tuple[str, str, str, dict[str, str]]] = [
    ("fsdp_ya_fsdp_pin_memory", "true", "needs fsdp_offload_params: true", {}),
    ("fsdp_ya_fsdp_reduce_dtype", "int8", "allowed: fp32, bf16, fp16", {}),
    ("fsdp_ya_fsdp_hybrid_group_size", "2", "needs fsdp_sharding_strategy: HYBRID_SHARD", {}),
    ("fsdp_version", "3", "allowed: 1, 2", {}),
    ("fsdp_sharding_strategy", "NO_SHARD", "this engine exists to shard", {}),
    ("fsdp_reshard_after_forward", "-1", "or a number of processes", {}),
    ("fsdp_offload_params", "perhaps", "allowed: true, false", {}),
    ("fsdp_backward_prefetch", "BACKWARD_POST", "always gathers the next unit", {}),
    ("fsdp_backward_prefetch", "NO_PREFETCH", "always gathers the next unit", {}),
    ("fsdp_limit_all_gathers", "false", "two shared buffers", {}),
    ("fsdp_transformer_layer_cls_to_wrap", "LlamaMLP", "needs fsdp_auto_wrap_policy: TRANSFORMER_BASED", BY_SIZE),
    ("fsdp_min_num_params", "10", "needs fsdp_auto_wrap_policy: SIZE_BASED_WRAP", {}),
    ("fsdp_activation_checkpointing_offload", "true", "needs fsdp_activation_checkpointing: true", {}),
    ("fsdp_cpu_ram_efficient_loading", "true", "needs fsdp_sync_module_states", {"fsdp_sync_module_states": "false"}),
]


def _variables(values: dict[str, str]) -> dict[str, str]:
    return {KEYS[name].env: value for name, value in values.items()}


@pytest.mark.parametrize(("key", "value", "what", "seen", "others"), EFFECTS)
def test_a_key_does_what_its_table_says(
    on_ranks: OnRanks, key: str, value: str, what: Callable[..., Any], seen: Any, others: dict[str, str], tmp_path: Path
) -> None:
    folder = ()
    if what in (see.read_by, see.checkpoint_files):
        build_model("llama").save_pretrained(tmp_path)  # type: ignore[operator]
        folder = (str(tmp_path),)
    assert on_ranks(2, what, _variables({**others, key: value}), *folder) == [seen, seen]


def _trains(variables: dict[str, str]) -> None:
    reference, batches = build_model("llama"), token_batches(3)
    expected = plain_steps(reference, torch.optim.AdamW(reference.parameters()), batches)
    model = build_model("llama")
    with session(**variables) as accelerator:
        model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters()))
        assert accelerated_steps(accelerator, model, optimizer, batches) == pytest.approx(expected, abs=1e-5)
        assert_close_to(model, reference, atol=1e-4)


@pytest.mark.parametrize(
    ("world", "values"),
    [(2, {"fsdp_offload_params": "true"}), (4, {"fsdp_reshard_after_forward": "2", "fsdp_offload_params": "true"})],
)
def test_offloaded_and_regrouped_shards_train_as_one_process(
    on_ranks: OnRanks, world: int, values: dict[str, str]
) -> None:
    on_ranks(world, _trains, _variables(values))


@pytest.mark.parametrize(("key", "value", "reason", "others"), REFUSALS)
def test_a_value_that_cannot_be_honoured_is_refused_with_the_reason(
    key: str, value: str, reason: str, others: dict[str, str]
) -> None:
    with pytest.raises(SettingsError) as caught:
        Settings.from_values(rules.from_environment(_variables({**others, key: value})))
    assert key in str(caught.value)
    assert reason in str(caught.value)


def test_every_key_and_every_value_of_a_list_is_looked_at() -> None:
    effects = {(key, value) for key, value, *_ in EFFECTS}
    refusals = {(key, value) for key, value, *_ in REFUSALS}
    assert {key for key, _ in effects | refusals} == set(KEYS)
    for key in KEYS.values():
        values = ("true", "false") if key.kind is Kind.BOOL else key.choices
        for value in values:
            assert (key.name, value) in (refusals if value in key.refused else effects | refusals)
