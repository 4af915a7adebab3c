"""``fsdp`` and ``fsdp_config`` of TrainingArguments reach the engine, however the script is started."""

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import ya_fsdp
from accelerate_plugin.settings import remember_script_values
from tests.checkpoint.runs import launched
from tests.huggingface.stock_trainers import arguments, build, padded, rows
from tests.huggingface.test_launch import LIMIT, SCRIPTS, environment, launch
from tests.support.guards import assert_really_sharded

OnRanks = Callable[..., list[Any]]


def _trained_with(folder: str, variables: dict[str, str], given: dict[str, Any]) -> tuple[int, Any]:
    """Number of units, and the settings, of a short run of a Trainer."""
    with launched(**variables):
        try:
            from transformers import Trainer

            settings = arguments(folder, max_steps=1, **given)
            trainer = Trainer(build("llama"), settings, train_dataset=rows(), data_collator=_collate)
            trainer.train()
            assert_really_sharded(trainer.model, None, "ya_fsdp")
            found = trainer.accelerator.state.fsdp_plugin.settings
            return ya_fsdp.memory_report(trainer.model).num_units, found
        finally:
            remember_script_values({})


def _collate(examples: list[Any]) -> Any:
    return padded(examples)


GIVEN = [
    ({"fsdp": True}, 5, {}),
    ({"fsdp": True, "fsdp_config": {"reshard_after_forward": False}}, 5, {"reshard_after_forward": False}),
    (
        {"fsdp_config": {"fsdp_num_layers_to_checkpoint": 2, "ya_fsdp_shard_alignment": 64}},
        5,
        {"num_layers_to_checkpoint": 2, "shard_alignment": 64},
    ),
    (
        {
            "fsdp": "shard_grad_op auto_wrap",
            "fsdp_config": {"version": 1, "transformer_layer_cls_to_wrap": "LlamaMLP,LlamaAttention"},
        },
        9,
        {"reshard_after_forward": False, "wrap_classes": ("LlamaMLP", "LlamaAttention")},
    ),
]


@pytest.mark.parametrize(("given", "units", "expected"), GIVEN)
def test_a_scripts_settings_are_those_of_the_run(
    on_ranks: OnRanks, given: dict[str, Any], units: int, expected: dict[str, Any], tmp_path: Path
) -> None:
    for found_units, found in on_ranks(2, _trained_with, str(tmp_path), {}, given):
        assert found_units == units
        assert {name: getattr(found, name) for name in expected} == expected


def test_a_file_with_the_settings_is_read_and_keys_of_the_launch_that_it_lacks_stay(
    on_ranks: OnRanks, tmp_path: Path
) -> None:
    (tmp_path / "fsdp.json").write_text(json.dumps({"activation_checkpointing": True}))
    given = {"fsdp": True, "fsdp_config": str(tmp_path / "fsdp.json")}
    for _, found in on_ranks(2, _trained_with, str(tmp_path), {"FSDP_YA_FSDP_SHARD_ALIGNMENT": "16"}, given):
        assert found.activation_checkpointing
        assert found.shard_alignment == 16


def _contradiction(folder: str) -> None:
    with pytest.raises(ValueError, match=r"fsdp_reshard_after_forward: the launch says True and the script says False"):
        _trained_with(
            folder,
            {"FSDP_RESHARD_AFTER_FORWARD": "true"},
            {"fsdp": True, "fsdp_config": {"reshard_after_forward": False}},
        )
    with pytest.raises(ValueError, match=r"fsdp_ya_fsdp_enabled: the launch says True and the script says False"):
        _trained_with(folder, {}, {"fsdp": True, "fsdp_config": {"ya_fsdp_enabled": False}})


def test_a_launch_and_a_script_that_contradict_each_other_are_an_error(on_ranks: OnRanks, tmp_path: Path) -> None:
    on_ranks(2, _contradiction, str(tmp_path))


@pytest.mark.slow
@pytest.mark.parametrize("starter", ["torchrun", "accelerate launch"])
def test_a_script_with_its_own_settings_needs_no_configuration_of_the_launch(starter: str, tmp_path: Path) -> None:
    script = [str(SCRIPTS / "own_config.py"), str(tmp_path)]
    if starter == "torchrun":
        command = [sys.executable, "-m", "torch.distributed.run", "--nproc_per_node", "2", "--standalone", "-m"]
        result = subprocess.run(
            [*command, "accelerate_plugin", "run", *script],
            env=environment(FSDP_YA_FSDP_ENABLED="1"), capture_output=True, text=True, timeout=LIMIT, check=False,
        )  # fmt: skip
    else:
        result = launch("--fsdp_ya_fsdp_enabled", "true", "--num_processes", "2", *script)
    assert result.returncode == 0, result.stderr
    found = json.loads(next(line for line in result.stdout.splitlines() if line.startswith("FACTS "))[6:])
    expected = {"reshard": False, "checkpointed": 1, "efficient": False}
    assert found == {"kinds": ["RaggedShardDTensor"], "world": 2, **expected}
