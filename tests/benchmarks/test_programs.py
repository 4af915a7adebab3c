"""The benchmarks run, say what they ran on, and agree with the estimate."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from accelerate_plugin import cli

ROOT = Path(__file__).resolve().parents[2]


def run(*command, limit=150):
    """Run a program and return the JSON lines that it prints."""
    result = subprocess.run(
        [sys.executable, *map(str, command)],
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"},
        capture_output=True,
        text=True,
        timeout=limit,
        check=False,
    )
    assert result.returncode == 0, result.stderr[-3000:]
    return [json.loads(line) for line in result.stdout.splitlines() if line.startswith("{")]


@pytest.fixture(scope="module")
def quick_bench(tmp_path_factory):
    """What a quick run of all benchmarks writes."""
    out = tmp_path_factory.mktemp("bench")
    run("benchmarks/bench.py", "--quick", "--out", out)
    (results,) = out.glob("*-quick.json")
    return out, json.loads(results.read_text())


@pytest.mark.slow
def test_a_quick_run_writes_results_and_plots(quick_bench):
    out, results = quick_bench
    assert results["versions"]["torch"] == torch.__version__
    for report in (results["host"], *results["step"], *results["simulate"]):
        assert report["versions"]["torch"] == torch.__version__
    plots = sorted(path.name.rsplit("-", 1)[1] for path in out.glob("*.png"))
    assert plots == ["host.png", "memory.png", "step.png"]
    assert all(path.read_bytes().startswith(b"\x89PNG") for path in out.glob("*.png"))
    names = [row["name"] for row in results["table"]]
    assert len(set(names)) == len(names) >= 12


@pytest.mark.slow
def test_what_is_counted_and_not_timed_meets_its_target(quick_bench):
    _, results = quick_bench
    counted = {row["name"]: row for row in results["table"] if "us per unit" not in row["name"]}
    for part in ("copied after gathers", "passes before reductions", "estimate / simulation", "layout of"):
        rows = [row for name, row in counted.items() if part in name]
        assert rows, part
        assert all(row["is_met"] for row in rows), rows


@pytest.fixture(scope="module")
def simulated(quick_bench):
    """Simulated bytes by number of ranks, of a model of which parameters take most."""
    _, results = quick_bench
    return {report["world"]: report["bytes"] for report in results["simulate"] if report["engine"] == "ya_fsdp"}


@pytest.mark.slow
def test_what_a_simulated_rank_holds_falls_with_the_ranks(simulated):
    shards = {world: report["resting"] for world, report in simulated.items()}
    buffers = shards[64] - (shards[2] - shards[64]) * (1 / 64) / (1 / 2 - 1 / 64)
    for world, resting in shards.items():
        assert (resting - buffers) * world == pytest.approx((shards[2] - buffers) * 2, rel=0.02), world
    peaks = [simulated[world]["step_peak"] for world in (2, 8, 64)]
    assert peaks == sorted(peaks, reverse=True)
    # Of weights, two moments and gradients three quarters of what two ranks hold is gone on eight.
    states = shards[2] - buffers
    assert peaks[0] - peaks[1] == pytest.approx(states * 4 / 3 * 3 / 4, rel=0.1)


@pytest.mark.slow
def test_estimate_and_simulation_agree(quick_bench, simulated):
    _, results = quick_bench
    found = {item["world"]: item for item in results["estimate"]}
    assert found.keys() == simulated.keys() == {2, 8, 64}
    for world, report in simulated.items():
        for name in ("resting", "step_peak"):
            assert found[world][name] == pytest.approx(report[name], rel=0.03), (world, name)


def recorded():
    """Simulated peaks of large models in the results that lie in the repository; the newest of each."""
    found = {}
    for path in sorted((ROOT / "benchmarks" / "results").glob("*.json")):
        for report in json.loads(path.read_text()).get("simulate", []):
            if report["engine"] == "ya_fsdp":
                found[report["model"], report["world"], report["activation_checkpointing"]] = report["bytes"]
    return found


@pytest.mark.parametrize(("model", "worlds"), [("8b", (8, 64)), ("70b", (256,))])
def test_estimate_agrees_with_the_recorded_simulations_of_large_models(model, worlds, capsys):
    for checkpointed in (True, False):
        for world in worlds:
            layers = "all" if checkpointed else "0"
            options = ["--world", str(world), "--loss", "lean", "--checkpoint-layers", layers, "--json"]
            cli.main(["estimate", f"llama-3-{model}", *options])
            found = json.loads(capsys.readouterr().out)["bytes"]
            expected = recorded()[model, world, checkpointed]
            for name in ("resting", "step_peak"):
                assert found[name] == pytest.approx(expected[name], rel=0.03), (world, checkpointed, name)
