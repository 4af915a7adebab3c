"""The example that launches trl's script for real, sharded and in one process, on a tiny model."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.huggingface.test_launch import ROOT, environment
from tests.huggingface.trl_scripts import write_inputs

pytest.importorskip("trl")
pytestmark = [pytest.mark.slow, pytest.mark.timeout(280)]
STEPS = 3


def _compare(folder: Path, *words: str) -> tuple[dict[str, object], str]:
    write_inputs(folder, "chat")
    command = [sys.executable, "examples/compare_sft.py", str(folder / "model"), str(folder / "data"), str(folder)]
    done = subprocess.run(
        [*command, "--steps", str(STEPS), *words],
        cwd=ROOT,
        env=environment(HF_DATASETS_CACHE=str(folder / "cache")),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=270,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-4000:]
    summary: dict[str, object] = json.loads((folder / "comparison.json").read_text())
    return summary, done.stdout


@pytest.mark.parametrize("lora", [False, True])
def test_a_launched_script_has_the_losses_of_one_process_and_saves_what_plain_transformers_loads(
    lora: bool, tmp_path: Path
) -> None:
    summary, printed = _compare(tmp_path, *(["--lora"] if lora else []))
    assert "ya-fsdp manages " in printed
    assert "on 2 processes (cpu, gloo)" in printed
    sharded, single = summary["losses"]["sharded"], summary["losses"]["single"]  # type: ignore[index]
    assert len(single) == STEPS
    assert len(set(single)) == STEPS, "every step trains"
    assert sharded == pytest.approx(single, rel=1e-5)
    assert summary["reply"], "plain transformers loads the folder and answers"
    saved = {file.name for file in (tmp_path / "sharded").iterdir()}
    assert ("adapter_model.safetensors" in saved) == lora
    assert ("model.safetensors" in saved) != lora, "with adapters the frozen base is not written"
