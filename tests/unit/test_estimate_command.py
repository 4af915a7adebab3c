"""The command line: ``ya-fsdp estimate`` and ``ya-fsdp env``, through a process of their own."""

import json
import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
import torch

from accelerate_plugin import cli
from accelerate_plugin.dry_run import build_model, measure, mixed
from accelerate_plugin.settings import Settings
from accelerate_plugin.units import find_units

ROOT = Path(__file__).resolve().parents[2]
SIZES = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 999,
}


@pytest.fixture(scope="module")
def llama(tmp_path_factory):
    """A folder as transformers saves one."""
    folder = tmp_path_factory.mktemp("llama")
    config = {"model_type": "llama", "architectures": ["LlamaForCausalLM"], "tie_word_embeddings": False, **SIZES}
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def run(*arguments, prelude="pass"):
    code = f"import sys; {prelude}; from accelerate_plugin.cli import main; main(sys.argv[1:])"
    return subprocess.run(
        [sys.executable, "-c", code, *map(str, arguments)],
        cwd=ROOT,
        env={**os.environ, "NCCL_DEBUG": "WARN", "FSDP_SECRET_TOKEN": "not-for-reports", "COLUMNS": "120"},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


def found(capsys, *arguments):
    """The JSON of a call in this process."""
    cli.main([*map(str, arguments), "--json"])
    return json.loads(capsys.readouterr().out)


def refusal(*arguments):
    """The message of a call in this process that does not succeed."""
    with pytest.raises(SystemExit) as caught:
        cli.main([*map(str, arguments)])
    return str(caught.value.code)


def test_the_console_script_is_this_command():
    scripts = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["scripts"]
    assert scripts == {"ya-fsdp": "accelerate_plugin.cli:main"}
    assert callable(cli.main)


def test_estimate_prints_tables_and_a_verdict(llama):
    result = run("estimate", llama, "--world", 8, "--gpu-memory", 80, "--sequence", 128)
    assert result.returncode == 0, result.stderr
    text = result.stdout
    assert "units on 8 rank(s), bf16 compute, fp32 master weights, 0 of 4 blocks checkpointed" in text
    for row in ("parameters", "gradients", "optimizer (adamw)", "at rest", "peak of the initialisation"):
        assert re.search(rf"{re.escape(row)}.*\d\.\d\d\d GiB", text), text
    assert "Live at the peak of a step: " in text
    assert "It fits into 80 GiB less 4 for everything else." in text


def test_estimate_counts_bytes_from_the_config(llama, capsys):
    report = found(capsys, "estimate", llama / "config.json", "--world", 4, "--dtype", "fp32", "--sequence", 32)
    block = 2 * 64 * 64 + 2 * 32 * 64 + 3 * 64 * 96 + 2 * 64
    total = 2 * 999 * 64 + 4 * block + 64
    assert report["bytes"]["num_parameters"] == total
    assert report["bytes"]["num_units"] == 6
    assert 0 <= report["bytes"]["parameters"] - total <= 6 * 8 * 4
    assert report["bytes"]["gradients"] == report["bytes"]["parameters"]
    assert report["fits"] is None
    assert report["num_blocks"] == 4


def test_the_least_number_of_checkpointed_blocks_is_the_least(llama, capsys):
    common = ("estimate", llama, "--world", 2, "--reserve", 0, "--sequence", 2048, "--loss", "lean")
    peaks = [found(capsys, *common, "--checkpoint-layers", n)["bytes"]["step_peak"] for n in range(5)]
    assert peaks == sorted(peaks, reverse=True)
    assert peaks[0] > peaks[2] > peaks[4]
    for least in (0, 2, 4):
        report = found(capsys, *common, "--gpu-memory", (peaks[least] + 1024) / 2**30)
        assert report["least"] == next(n for n in range(5) if peaks[n] <= peaks[least] + 1024)
        assert report["fits"] is (peaks[0] <= peaks[least] + 1024)
    never = found(capsys, *common, "--gpu-memory", peaks[4] / 2 / 2**30)
    assert never["least"] is None
    assert never["fits"] is False
    cli.main([*map(str, common), "--gpu-memory", f"{peaks[4] / 2 / 2**30}"])
    assert "not with all 4 blocks checkpointed either" in capsys.readouterr().out


def test_more_tokens_full_logits_and_optimizer_state_take_more(llama, capsys):
    def peak(*options):
        return found(capsys, "estimate", llama, "--world", 2, *options)["bytes"]["step_peak"]

    usual = peak("--sequence", 256)
    assert peak("--sequence", 512) > usual
    assert peak("--sequence", 256, "--batch", 2) == pytest.approx(peak("--sequence", 512), rel=0.01)
    assert peak("--sequence", 256, "--loss", "lean") < usual
    assert peak("--sequence", 256, "--no-activations") < usual
    assert peak("--sequence", 256, "--optimizer", "sgd") < usual


def test_stages_follow_the_model_and_end_where_they_began(llama):
    model = build_model(str(llama))
    units = find_units(model, Settings())
    ids = torch.zeros(1, 64, dtype=torch.long, device="meta")
    stages = measure(model, units, lambda: model(input_ids=ids, labels=ids).loss)
    assert [units[stage.unit].label for stage in stages] == [
        "model.embed_tokens",
        *(f"model.layers.{i}" for i in range(4)),
        "model.norm + lm_head",
    ]
    changes = [stage.activations.forward_delta + stage.activations.backward_delta for stage in stages]
    assert sum(changes) == 0, changes
    # Equal blocks take equal bytes, among them the input of the down projection.
    assert len({stage.activations.forward_delta for stage in stages[1:5]}) == 1
    assert stages[1].activations.forward_delta > 64 * 96 * 4
    assert mixed(stages, stages[::-1], [], 0) == stages


def test_what_cannot_be_used_is_said(llama, tmp_path):
    assert "did you mean llama-3-8b?" in refusal("estimate", "llama-3-8", "--world", 2)
    assert "9 was asked for" in refusal("estimate", llama, "--world", 2, "--checkpoint-layers", 9)
    assert "no module of class Blok" in refusal("estimate", llama, "--world", 2, "--wrap", "Blok")
    (tmp_path / "config.json").write_text('{"model_type": "nothing"}')
    assert "holds no model configuration that transformers can read" in refusal("estimate", tmp_path, "--world", 2)
    (tmp_path / "config.json").write_text('{"model_type": "vit"}')
    assert "has no causal language model" in refusal("estimate", tmp_path, "--world", 2)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--world", "0"), "expected a positive whole number, got '0'"),
        (("--world", "2", "--gpu-memory", "big"), "expected a number of GiB, got 'big'"),
        (("--world", "2", "--checkpoint-layers", "-1"), "expected a number of blocks or 'all', got '-1'"),
        ((), "the following arguments are required: --world"),
    ],
)
def test_wrong_arguments_are_refused_before_anything_is_built(arguments, message, capsys):
    with pytest.raises(SystemExit) as caught:
        cli.main(["estimate", "nowhere", *arguments])
    assert caught.value.code == 2
    assert message in capsys.readouterr().err


def test_models_that_ask_for_values_are_refused_with_the_reason(llama):
    model = build_model(str(llama))
    units = find_units(model, Settings())
    ids = torch.zeros(1, 8, dtype=torch.long, device="meta")

    def run_with_value():
        loss = model(input_ids=ids, labels=ids).loss
        return loss if loss.item() > 0 else -loss

    with pytest.raises(RuntimeError, match="activations of LlamaForCausalLM cannot be measured without data"):
        measure(model, units, run_with_value)


def test_a_mixture_of_experts_is_estimated_without_activations(tmp_path, capsys):
    config = {"model_type": "mixtral", **SIZES, "num_hidden_layers": 2, "num_local_experts": 4}
    (tmp_path / "config.json").write_text(json.dumps(config))
    common = ("estimate", tmp_path, "--world", "2", "--sequence", "32")
    report = found(capsys, *common, "--no-activations")
    assert report["bytes"]["num_units"] == 4
    assert report["bytes"]["step_peak"] > 2 * report["bytes"]["parameters"]


def test_missing_transformers_is_said():
    result = run("estimate", "llama-3-8b", "--world", 2, prelude="sys.modules['transformers'] = None")
    assert result.returncode == 1
    assert "building a model needs transformers" in result.stderr
    assert "pip install 'ya-fsdp[train]'" in result.stderr
    assert "Traceback" not in result.stderr


def test_env_reports_versions_and_settings_and_no_secret():
    result = run("env", "--json")
    assert result.returncode == 0, result.stderr
    report = json.loads(result.stdout)
    assert report["versions"]["torch"] == torch.__version__
    assert report["versions"]["ya-fsdp"]
    assert report["backends"]["gloo"] is True
    assert report["settings"]["NCCL_DEBUG"] == "WARN"
    assert "not-for-reports" not in result.stdout
    assert "PATH" not in report["settings"]


def test_env_prints_tables(capsys):
    cli.main(["env"])
    text = capsys.readouterr().out
    for title in ("versions", "devices", "backends", "settings"):
        assert title in text
