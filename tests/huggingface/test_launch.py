"""Stock ``accelerate launch`` on unchanged scripts, for real: few runs, each looked at from several sides."""

import json
import os
import subprocess
import sys
import sysconfig
import time
from pathlib import Path
from typing import Any

import pytest

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
SCRIPTS = HERE / "scripts"
LIMIT = 150
STEPS = 8

YAML = """
compute_environment: LOCAL_MACHINE
distributed_type: FSDP
fsdp_config:
  fsdp_backward_prefetch: BACKWARD_PRE
  fsdp_cpu_ram_efficient_loading: false
  fsdp_forward_prefetch: true
  fsdp_offload_params: false
  fsdp_sharding_strategy: FULL_SHARD
  fsdp_state_dict_type: FULL_STATE_DICT
  fsdp_sync_module_states: true
  fsdp_use_orig_params: false
  fsdp_activation_checkpointing: false
  fsdp_num_layers_to_checkpoint: 0
main_training_function: main
main_process_ip: localhost
mixed_precision: 'no'
num_processes: 2
rdzv_backend: c10d
same_network: true
"""


def environment(**variables: str) -> dict[str, str]:
    kept = {
        name: value for name, value in os.environ.items() if not name.startswith(("FSDP_", "ACCELERATE_", "YA_FSDP_"))
    }
    quiet = {
        "OMP_NUM_THREADS": "1",
        "HF_HUB_OFFLINE": "1",
        "CUDA_VISIBLE_DEVICES": "",
        "TOKENIZERS_PARALLELISM": "false",
    }
    # An absent HF_HOME keeps a developer's own default configuration out.
    return {**kept, **quiet, "HF_HOME": "/nonexistent", "PYTHONPATH": str(ROOT), **variables}


def launch(*words: str | Path, **variables: str) -> subprocess.CompletedProcess[str]:
    """Run ``accelerate launch`` as a user does; through the package where its start-up files are not installed."""
    installed = (Path(sysconfig.get_path("purelib")) / "ya_fsdp_startup.pth").exists()
    stock = Path(sys.executable).with_name("accelerate")
    start = [str(stock)] if installed and stock.exists() else [sys.executable, "-m", "accelerate_plugin"]
    command = [*start, "launch", "--main_process_port", "0", *map(str, words)]
    return subprocess.run(
        command, env=environment(**variables), capture_output=True, text=True, timeout=LIMIT, check=False, cwd=ROOT
    )


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("config") / "fsdp_config.yaml"
    path.write_text(YAML)
    return path


@pytest.fixture(scope="module")
def trained(config: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    folder = tmp_path_factory.mktemp("trained")
    result = launch(
        "--config_file", config, "--fsdp_ya_fsdp_enabled", "true", "--fsdp_num_layers_to_checkpoint", "1",
        SCRIPTS / "train.py", folder, str(STEPS),
    )  # fmt: skip
    assert result.returncode == 0, result.stdout + result.stderr
    return folder, result.stdout


def facts(folder: Path, rank: int) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((folder / f"facts{rank}.json").read_text())
    return found


@pytest.mark.slow
def test_an_unchanged_trainer_script_trains_sharded_on_cpu(trained: tuple[Path, str]) -> None:
    folder, _ = trained
    ranks = [facts(folder, rank) for rank in (0, 1)]
    for found in ranks:
        assert found["world"] == 2
        assert found["distributed_type"] == "DistributedType.FSDP"
        assert found["kinds"] == ["RaggedShardDTensor"]
        assert found["local"] <= 0.6 * found["total"]
    assert sum(found["local"] for found in ranks) == ranks[0]["total"]


@pytest.mark.slow
def test_rank_zero_prints_settings_units_and_bytes_once(trained: tuple[Path, str]) -> None:
    _, output = trained
    assert output.count("ya-fsdp manages LlamaForCausalLM on 2 processes (cpu, gloo)") == 1
    assert "5: model.embed_tokens, model.norm + lm_head, 3 LlamaDecoderLayer, root without parameters" in output
    assert "bytes per rank  parameters" in output
    assert "checkpointing   1 blocks" in output  # the flag won over the file
    assert "forward_prefetch=True" in output


@pytest.mark.slow
def test_losses_and_norms_equal_those_of_a_single_process(trained: tuple[Path, str], tmp_path: Path) -> None:
    plain = (
        (SCRIPTS / "train.py").read_text().replace("per_device_train_batch_size=8", "per_device_train_batch_size=16")
    )
    script = tmp_path / "plain.py"
    script.write_text(plain)
    command = [sys.executable, str(script), str(tmp_path), str(STEPS)]
    result = subprocess.run(command, env=environment(), capture_output=True, text=True, timeout=LIMIT, check=False)
    assert result.returncode == 0, result.stderr
    mine, single = facts(trained[0], 0), facts(tmp_path, 0)
    assert single["kinds"] == ["Parameter"]
    for key in ("loss", "grad_norm"):
        expected = [float(log[key]) for log in single["logs"] if key in log]
        assert len(expected) == STEPS
        assert [float(log[key]) for log in mine["logs"] if key in log] == pytest.approx(expected, abs=1e-5)
    assert mine["eval_loss"] == pytest.approx(single["eval_loss"], abs=1e-4)
    assert facts(trained[0], 1)["logs"][0]["grad_norm"] == mine["logs"][0]["grad_norm"]


@pytest.mark.slow
def test_the_saved_folder_is_an_ordinary_model_with_the_live_models_logits(trained: tuple[Path, str]) -> None:
    folder, _ = trained
    command = [sys.executable, str(SCRIPTS / "load.py"), str(folder)]
    result = subprocess.run(command, env=environment(), capture_output=True, text=True, timeout=LIMIT, check=False)
    assert result.returncode == 0, result.stderr
    assert float(result.stdout.splitlines()[-1]) <= 1e-6
    checkpoint = {path.name for path in (folder / "checkpoint-8").iterdir()}
    assert {"pytorch_model_fsdp.bin", "optimizer.bin", "model.safetensors"} <= checkpoint


def describe(*words: str | Path, **variables: str) -> dict[str, Any]:
    result = launch(*words, SCRIPTS / "describe.py", **variables)
    assert result.returncode == 0, result.stdout + result.stderr
    line = next(line for line in result.stdout.splitlines() if line.startswith("FACTS "))
    found: dict[str, Any] = json.loads(line.removeprefix("FACTS "))
    return found


@pytest.mark.slow
def test_with_the_flag_off_accelerate_behaves_as_if_the_package_were_not_there(tmp_path: Path) -> None:
    file = tmp_path / "stock.yaml"
    section = "fsdp_config:\n  fsdp_version: 2\n  fsdp_ya_fsdp_enabled: true\n"
    file.write_text(f"compute_environment: LOCAL_MACHINE\ndistributed_type: FSDP\n{section}num_processes: 1\n")
    command = [sys.executable, "-m", "accelerate.commands.accelerate_cli", "launch", "--main_process_port", "0"]
    result = subprocess.run(
        [*command, "--config_file", str(file), str(SCRIPTS / "describe.py")],
        env=environment(YA_FSDP_DISABLE="1"), capture_output=True, text=True, timeout=LIMIT, check=False,
    )  # fmt: skip
    assert result.returncode == 0, result.stderr
    stock = json.loads(next(line for line in result.stdout.splitlines() if line.startswith("FACTS "))[6:])
    ours = describe("--config_file", file, "--fsdp_ya_fsdp_enabled", "false")
    assert {**ours, "replaced": False} == stock
    assert stock["plugin"] != "YaFSDPPlugin"


@pytest.mark.slow
def test_torchrun_with_the_variable_alone_is_sharded_too() -> None:
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc_per_node", "2", "--standalone", "-m"]
    result = subprocess.run(
        [*command, "accelerate_plugin", "run", str(SCRIPTS / "describe.py")],
        env=environment(FSDP_YA_FSDP_ENABLED="yes"), capture_output=True, text=True, timeout=LIMIT, check=False,
    )  # fmt: skip
    assert result.returncode == 0, result.stderr
    found = json.loads(next(line for line in result.stdout.splitlines() if line.startswith("FACTS "))[6:])
    assert (found["type"], found["plugin"], found["processes"]) == ("DistributedType.FSDP", "YaFSDPPlugin", 2)


FAILURES = [
    (["--config_file", "nowhere.yaml", SCRIPTS / "describe.py"], "nowhere.yaml"),
    (["--num_processes", "2", "nowhere.py"], "the training script 'nowhere.py' does not exist"),
    (["--fsdp_sharding_strategy", "HALF_SHARD", SCRIPTS / "describe.py"], "fsdp_sharding_strategy: got 'HALF_SHARD'"),
    (["--fsdp_num_layer_to_checkpoint", "1", "x.py"], "did you mean --fsdp_num_layers_to_checkpoint?"),
    (["--num_processes", "2", SCRIPTS / "plain_ddp.py"], "is not active: SGD is about to step"),
    (["--num_processes", "2", SCRIPTS / "dies.py"], "SIGKILL"),
]


@pytest.mark.slow
@pytest.mark.parametrize(("words", "message"), FAILURES, ids=[message.split()[0] for _, message in FAILURES])
def test_a_launch_that_fails_ends_within_a_minute_and_says_why(words: list[Any], message: str) -> None:
    start = time.monotonic()
    result = launch("--fsdp_ya_fsdp_enabled", "true", *words)
    assert result.returncode != 0
    assert message in result.stderr
    assert "trained on DDP" not in result.stdout
    assert time.monotonic() - start < 60
