"""trl's own sft and dpo scripts, unchanged, on two processes: every step equals the same script in one process."""

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.huggingface.trl_scripts import Run, run_script, write_inputs
from tests.support.guards import assert_same_values

pytest.importorskip("trl")
OnRanks = Callable[..., list[Any]]
LORA = ("--use_peft", "--lora_r", "4", "--lora_target_modules", "q_proj", "v_proj", "--lora_dropout", "0")
LORA += ("--learning_rate", "1.0")
# trl's default loss and the model's own recomputation of activations are on, unless an option says otherwise.
SFT = {
    "full": ("text", ()),
    "LoRA": ("text", LORA),
    "packing": ("text", ("--packing", "--max_length", "16", "--dataloader_drop_last", "true")),
    "completion only": ("completion", ("--gradient_checkpointing", "false")),
    "chat": ("chat", ("--loss_type", "nll")),
    "chat with LoRA": ("chat", LORA),
}
SEPARATE = ("--beta", "0.5", "--max_length", "64")
DPO = {
    "separate reference": SEPARATE,
    "reference that follows": (*SEPARATE, "--sync_ref_model", "--ref_model_sync_steps", "1"),
    "LoRA": (*SEPARATE, *LORA),
}


def _compare(on_ranks: OnRanks, script: str, folder: Path, words: tuple[str, ...]) -> Run:
    alone: Run = on_ranks(1, run_script, script, str(folder), *words, sharded=False)[0]
    both: list[Run] = on_ranks(2, run_script, script, str(folder), *words, sharded=True)
    assert alone.units == 0, "the reference is a plain model"
    assert len(alone.losses) == 4
    assert len(set(alone.losses)) == 4, "every step trains"
    for run in both:
        assert run.units == 5
        assert run.losses == pytest.approx(alone.losses, rel=1e-5)
        assert run.norms == pytest.approx(alone.norms, rel=1e-4)
        assert_same_values(run.weights, alone.weights, "weights after training", atol=1e-5)
        assert run.gradient_bytes < 0.6 * 4 * run.trainable + 2048, "only what is trained has gradients, shared by two"
    return alone


@pytest.mark.parametrize("variant", SFT)
def test_the_sft_script_trains_as_in_one_process(on_ranks: OnRanks, variant: str, tmp_path: Path) -> None:
    kind, words = SFT[variant]
    write_inputs(tmp_path, kind)
    _compare(on_ranks, "sft", tmp_path, words)
    saved = {file.name for file in (tmp_path / "out2").iterdir()}
    assert ("adapter_model.safetensors" if "LoRA" in variant else "model.safetensors") in saved


@pytest.mark.parametrize("variant", DPO)
def test_the_dpo_script_trains_as_in_one_process(on_ranks: OnRanks, variant: str, tmp_path: Path) -> None:
    write_inputs(tmp_path, "preference")
    run = _compare(on_ranks, "dpo", tmp_path, DPO[variant])
    assert run.losses[0] == pytest.approx(math.log(2), abs=1e-4), "policy and reference are the same at first"
    assert run.losses[-1] < run.losses[0] - 1e-4
