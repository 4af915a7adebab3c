"""Two launchers on one host act as two machines of one process each: training, saving and going on work as on one."""

import json
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.huggingface.test_launch import ROOT, SCRIPTS, environment

LIMIT = 150
pytestmark = [pytest.mark.slow, pytest.mark.timeout(3 * LIMIT)]


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def _launch_on_both(folder: Path, steps: int) -> list[dict[str, Any]]:
    """Start one launcher per machine, wait for both, and return what the two processes saw."""
    where = ["--num_machines", "2", "--num_processes", "2", "--main_process_ip", "127.0.0.1"]
    where += ["--main_process_port", str(_free_port()), "--mixed_precision", "no"]
    engine = ["--fsdp_ya_fsdp_enabled", "true", "--fsdp_state_dict_type", "SHARDED_STATE_DICT"]
    start = [sys.executable, "-m", "accelerate.commands.accelerate_cli", "launch", "--config_file"]
    script = [str(SCRIPTS / "resumable.py"), str(folder), str(steps)]
    machines = [
        subprocess.Popen(
            [*start, "configs/fsdp_config.yaml", "--machine_rank", str(machine), *where, *engine, *script],
            env=environment(),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            cwd=ROOT,
        )
        for machine in range(2)
    ]
    try:
        printed = [machine.communicate(timeout=LIMIT)[0] for machine in machines]
    finally:
        for machine in machines:
            machine.kill()
    for machine, output in zip(machines, printed, strict=True):
        assert machine.returncode == 0, "\n".join(printed)
        assert ("ya-fsdp manages LlamaForCausalLM on 2 processes" in output) == (machine is machines[0])
    return [json.loads((folder / f"facts{rank}.json").read_text()) for rank in range(2)]


def test_two_launchers_train_save_and_resume_one_sharded_run(tmp_path: Path) -> None:
    begun = _launch_on_both(tmp_path / "run", 3)
    assert [(facts["rank"], facts["local_rank"], facts["world"]) for facts in begun] == [(0, 0, 2), (1, 0, 2)]
    for facts in begun:
        assert facts["kinds"] == ["RaggedShardDTensor"]
        assert facts["local"] <= 0.6 * facts["total"]
    assert sum(facts["local"] for facts in begun) == begun[0]["total"]
    assert not any(facts["resumed"] for facts in begun)

    ended = _launch_on_both(tmp_path / "run", 6)
    assert all(facts["resumed"] for facts in ended)
    command = [sys.executable, str(SCRIPTS / "resumable.py"), str(tmp_path / "alone"), "6"]
    done = subprocess.run(command, env=environment(), capture_output=True, text=True, timeout=LIMIT, check=False)
    assert done.returncode == 0, done.stderr
    alone = json.loads((tmp_path / "alone" / "facts0.json").read_text())
    assert alone["kinds"] == ["Parameter"]
    assert len(alone["losses"]) == 6
    assert ended[0]["losses"] == pytest.approx(alone["losses"], abs=1e-5)
    _assert_same_model(tmp_path / "run" / "final", tmp_path / "alone" / "final")


def _assert_same_model(one: Path, other: Path) -> None:
    from safetensors.torch import load_file

    found, expected = load_file(one / "model.safetensors"), load_file(other / "model.safetensors")
    assert set(found) == set(expected)
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, atol=1e-4, rtol=0, msg=lambda text, n=name: f"{n}: {text}")
