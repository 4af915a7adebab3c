"""The demo script end to end, small: launched as its documentation says, with and without the engine."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
SMALL = "--vocab_size 512 --hidden_size 64 --intermediate_size 160 --num_layers 3 --num_heads 2 --block_size 64 "
SMALL += "--text_megabytes 0.3 --max_steps 16 --warmup_steps 2 --learning_rate 0.01"
SHARDED = "-m accelerate.commands.accelerate_cli launch --config_file configs/fsdp_config.yaml "
SHARDED += "--fsdp_ya_fsdp_enabled true --num_processes 2 --main_process_port 0"
STOCK = "-m torch.distributed.run --standalone --nproc_per_node 2"

pytestmark = [pytest.mark.slow, pytest.mark.timeout(170)]


def launch(launcher: str, folder: Path, extra: str) -> str:
    """Run the demo on two processes and return what it printed."""
    command = [sys.executable, *launcher.split(), "examples/train_clm.py", "--output_dir", str(folder)]
    command += [*SMALL.split(), *extra.split()]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(
        command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=150
    )
    assert done.returncode == 0, done.stdout[-4000:]
    return done.stdout


def load(folder: Path, name: str) -> dict[str, Any]:
    """Return one of the JSON files that the demo wrote."""
    content: dict[str, Any] = json.loads((folder / name).read_text(encoding="utf-8"))
    return content


@pytest.fixture(scope="module")
def sharded_run(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """A run with the engine: its folder and what it printed."""
    folder = tmp_path_factory.mktemp("sharded")
    return folder, launch(f"{SHARDED} --mixed_precision no", folder, "")


def test_each_of_two_ranks_holds_half_of_parameters_gradients_and_optimizer(sharded_run: tuple[Path, str]) -> None:
    summary = load(sharded_run[0], "summary.json")
    assert summary["engine"].startswith("ya_fsdp")
    assert summary["num_processes"] == 2
    half = summary["num_parameters"] * 4 / 2
    for kind, full in {"parameters": half, "gradients": half, "optimizer": 2 * half}.items():
        assert all(abs(size - full) < 0.02 * full for size in summary["rank_bytes"][kind]), kind
    buffers = summary["rank_bytes"]["gather buffers"]
    assert all(0 < size < 2 * half for size in buffers), "a gathered layer, but never the whole model"


def test_the_loss_falls_and_is_plotted_and_shown_in_a_table(sharded_run: tuple[Path, str]) -> None:
    folder, printed = sharded_run
    summary = load(folder, "summary.json")
    assert summary["num_steps"] == 16
    assert 5.9 < summary["first_loss"] < 6.8, "an untrained model guesses among 512 tokens: ln(512) is 6.2"
    assert summary["last_loss"] < summary["first_loss"] - 0.7
    assert (folder / "loss.png").read_bytes().startswith(b"\x89PNG\r\n\x1a\n")
    assert "16/16" in printed
    for words in ("first loss", "last loss", "tokens per second", "bytes per rank: gradients"):
        assert words in printed


def test_the_saved_folder_gives_the_live_logits_in_a_process_without_the_engine(sharded_run: tuple[Path, str]) -> None:
    check = load(sharded_run[0], "check.json")
    assert check["dtype"] == "torch.float32"
    assert check["max_abs_logit_difference"] <= 1e-6
    assert not check["engine_imported"]
    sample = (sharded_run[0] / "sample.txt").read_text(encoding="utf-8")
    assert sample.startswith("def read(self, ")
    assert len(sample) > 40


def test_without_the_flag_it_is_a_stock_run_with_the_same_losses(sharded_run: tuple[Path, str], tmp_path: Path) -> None:
    launch(STOCK, tmp_path, "--use_cpu")
    stock, sharded = load(tmp_path, "summary.json"), load(sharded_run[0], "summary.json")
    assert stock["engine"] == "plain PyTorch"
    assert stock["rank_bytes"]["parameters"] == [stock["num_parameters"] * 4] * 2
    assert stock["first_loss"] == pytest.approx(sharded["first_loss"], abs=1e-5)
    assert stock["last_loss"] == pytest.approx(sharded["last_loss"], abs=1e-3)


def test_a_second_run_into_the_same_folder_in_bf16_replaces_the_first(sharded_run: tuple[Path, str]) -> None:
    folder, _ = sharded_run
    files = sorted(file.relative_to(folder) for file in folder.rglob("*"))
    before = (folder / "model.safetensors").read_bytes()
    launch(SHARDED, folder, "--seed 7")
    assert sorted(file.relative_to(folder) for file in folder.rglob("*")) == files
    assert (folder / "model.safetensors").read_bytes() != before
    check = load(folder, "check.json")
    assert check["dtype"] == "torch.bfloat16"
    assert check["max_abs_logit_difference"] <= 1e-6
    assert load(folder, "summary.json")["last_loss"] < load(folder, "summary.json")["first_loss"] - 0.7
