"""Sharded checkpoints become ordinary models: by our command, and by accelerate's."""

import gc
import json
import os
import subprocess
import sys
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file

from accelerate_plugin import merge as merging
from tests.checkpoint.runs import FULL, SHARDED, launched, model_of, trainer_of
from tests.support.models import token_batches

OnRanks = Callable[..., list[Any]]


def _trained(name: str, folder: str) -> Any:
    with launched(SHARDED):
        trainer = trainer_of(model_of(name), f"{folder}/run", max_steps=3, save_steps=3)
        trainer.train()
        trainer.save_model(f"{folder}/final")
        trainer.accelerator.state.fsdp_plugin.set_state_dict_type(FULL)
        trainer.save_model(f"{folder}/plain")
        dist.barrier()
        trainer.model.eval()
        with torch.no_grad():
            return trainer.model(input_ids=token_batches(1)[0]).logits


@pytest.fixture(scope="session")
def trained(rank_pools: Any, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Any]:
    """A model trained on two processes: its folder, and what the live one answers."""
    made: dict[str, Any] = {}

    def get(name: str) -> Any:
        if name not in made:
            folder = tmp_path_factory.mktemp(name)
            made[name] = (folder, rank_pools.run(2, _trained, name, str(folder))[0])
        return made[name]

    return get


@pytest.mark.parametrize("name", ["llama", "gpt2", "qwen2"])
def test_the_merged_file_is_the_one_that_save_pretrained_writes(
    trained: Callable[[str], Any], name: str, tmp_path: Path
) -> None:
    folder, logits = trained(name)
    expected = (folder / "plain/model.safetensors").read_bytes()
    for source in ("run/checkpoint-3", "run/checkpoint-3/pytorch_model_fsdp_0", "final"):
        (written,) = merging.merge(folder / source, tmp_path / source)
        assert written.name == "model.safetensors"
        assert written.read_bytes() == expected, source
    from transformers import AutoModelForCausalLM

    model, info = AutoModelForCausalLM.from_pretrained(tmp_path / "final", output_loading_info=True)
    assert not info["missing_keys"]
    assert not info["unexpected_keys"]
    model.eval()
    with torch.no_grad():
        torch.testing.assert_close(model(input_ids=token_batches(1)[0]).logits, logits, atol=1e-6, rtol=0)


def test_a_big_model_is_written_in_the_parts_that_save_pretrained_makes(
    trained: Callable[[str], Any], tmp_path: Path
) -> None:
    folder, _ = trained("llama")
    model = model_of("llama")
    model.load_state_dict(load_file(folder / "plain/model.safetensors"))
    model.save_pretrained(tmp_path / "plain", max_shard_size=30_000)
    merging.main([str(folder / "run/checkpoint-3"), str(tmp_path / "merged"), "--max-shard-size", "30KB"])
    names = {path.name for path in (tmp_path / "plain").glob("model*")}
    assert len(names) > 3
    assert {path.name for path in (tmp_path / "merged").glob("model*")} == names
    for file in names:
        merged, plain = tmp_path / "merged" / file, tmp_path / "plain" / file
        if file.endswith(".json"):
            assert json.loads(merged.read_text()) == json.loads(plain.read_text())
        else:
            assert merged.read_bytes() == plain.read_bytes(), file


def test_no_two_tensors_are_held_at_a_time(
    trained: Callable[[str], Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, _ = trained("llama")
    read = merging.ShardedTensors.read
    alive: list[weakref.ref[torch.Tensor]] = []
    most = [0]

    def watched(self: Any, name: str) -> torch.Tensor:
        value = read(self, name)
        gc.collect()
        most[0] = max(most[0], 1 + sum(reference() is not None for reference in alive))
        alive.append(weakref.ref(value))
        return value

    monkeypatch.setattr(merging.ShardedTensors, "read", watched)
    merging.merge(folder / "final", tmp_path)
    assert len(alive) == len(load_file(tmp_path / "model.safetensors"))
    assert most[0] <= 2, "the tensor that is written, and the next one while it is read"


def test_accelerates_own_command_reads_our_folder(trained: Callable[[str], Any], tmp_path: Path) -> None:
    folder, _ = trained("llama")
    command = [sys.executable, "-m", "accelerate.commands.accelerate_cli", "merge-weights"]
    command += [str(folder / "run/checkpoint-3/pytorch_model_fsdp_0"), str(tmp_path)]
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=120, env={**os.environ, "OMP_NUM_THREADS": "1"}
    )
    assert done.returncode == 0, done.stderr[-2000:]
    found, expected = load_file(tmp_path / "model.safetensors"), load_file(folder / "plain/model.safetensors")
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], expected[name]) for name in expected)


def test_what_cannot_be_merged_is_named(
    trained: Callable[[str], Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder, _ = trained("llama")
    with pytest.raises(ValueError, match="has ordinary weight files already"):
        merging.merge(folder / "plain", tmp_path)
    with pytest.raises(ValueError, match="has no sharded weights"):
        merging.merge(folder, tmp_path)
    with pytest.raises(SystemExit):
        merging.main([str(folder / "nowhere"), str(tmp_path)])
    assert "nowhere is not a folder" in capsys.readouterr().err
