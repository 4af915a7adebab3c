"""Runs the CPU benchmarks side by side with PyTorch FSDP2, writes their results and plots, and prints a table.

python benchmarks/bench.py            # all of them, about fifteen minutes on two cores: make bench
python benchmarks/bench.py --quick    # tiny models and few rounds, to see that everything runs
"""

import argparse
import contextlib
import datetime
import io
import json
import os
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path

from rich.console import Console
from rich.table import Table

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from accelerate_plugin import cli
from benchmarks import plots
from benchmarks.common import MODELS, versions
from ya_fsdp.layout import ParamSpec, plan_contiguous

ROOT = Path(__file__).resolve().parents[1]
console = Console(highlight=False, soft_wrap=True, width=None if sys.stdout.isatty() else 120)
GIB = 2**30
CASES = {"8b": (8, 64), "70b": (256,)}
QUICK_CASES = {"tiny": (2, 8, 64)}
PEAK_TARGETS = {("8b", 8): 0.93, ("8b", 64): 0.88, ("70b", 256): 0.90}


@dataclass
class Row:
    """One line of the table. ``value`` is what ``target`` is an upper limit of; None: no target."""

    name: str
    ours: str
    fsdp2: str
    value: float
    target: float | None

    @property
    def is_met(self):
        return self.target is None or self.value <= self.target


def run(*command):
    """Runs a program and returns its lines of JSON."""
    console.print("[dim]" + " ".join(map(str, command)) + "[/dim]")
    result = subprocess.run(
        [sys.executable, *map(str, command)], cwd=ROOT, capture_output=True, text=True, timeout=1800, check=False
    )
    if result.returncode:
        sys.exit(f"{' '.join(map(str, command))} failed:\n{result.stderr[-4000:]}")
    return [json.loads(line) for line in result.stdout.splitlines() if line.startswith("{")]


def simulate(engines, model, worlds, sequence, checkpointing=True):
    flags = [] if checkpointing else ["--no-activation-checkpointing"]
    sizes = ["--model", model, "--world", *worlds, "--seq", sequence]
    return run("benchmarks/simulate.py", "--engine", *engines, *sizes, *flags)


def estimate(model, worlds, sequence, checkpointing):
    """The command's own estimate for the model that ``simulate.py`` runs."""
    layers = "all" if checkpointing else "0"
    with tempfile.NamedTemporaryFile("w", suffix=".json") as file:
        json.dump({"model_type": "llama", "tie_word_embeddings": False, **MODELS[model]}, file)
        file.flush()
        options = ["--sequence", str(sequence), "--loss", "lean", "--checkpoint-layers", layers, "--json"]
        for world in worlds:
            printed = io.StringIO()
            with contextlib.redirect_stdout(printed):
                cli.main(["estimate", file.name, "--world", str(world), *options])
            found = json.loads(printed.getvalue())["bytes"]
            yield {"model": model, "world": world, "activation_checkpointing": checkpointing, **found}


def layout_seconds(num_params=1000, world_size=16384):
    """Time to lay out so many parameters for so many ranks, and to find one rank's slices of them."""
    specs = [ParamSpec(str(i), (4096 + i, 1024)) for i in range(num_params)]
    start = time.perf_counter()
    layout = plan_contiguous(specs, world_size, 8)
    layout.local_slices(world_size - 1)
    assert layout.partition.sizes
    return time.perf_counter() - start


def collect(quick):
    """Runs everything and returns the results."""
    cases, sequence = (QUICK_CASES, 64) if quick else (CASES, 4096)
    units, rounds, steps = ((3, 6), 4, 4) if quick else ((8, 32, 80), 40, 30)
    results = {
        "date": datetime.date.today().isoformat(),
        "quick": quick,
        "versions": versions(),
        "load": os.getloadavg(),
        "layout_seconds": layout_seconds(),
        "host": run("benchmarks/host.py", "--units", *units, "--rounds", rounds)[0],
        "step": [],
        "simulate": [],
        "estimate": [],
    }
    for dtype in ["fp32"] if quick else ["fp32", "bf16"]:
        options = ["--engines", "fsdp2", "ya_fsdp", "--dtype", dtype, "--rounds", steps]
        results["step"] += run("benchmarks/step.py", *options)
    for model, worlds in cases.items():
        results["simulate"] += simulate(("fsdp2", "ya_fsdp"), model, worlds, sequence)
        if not quick:
            results["simulate"] += simulate(("ya_fsdp",), model, worlds, sequence, checkpointing=False)
        for checkpointing in [True] if quick else [True, False]:
            results["estimate"] += estimate(model, worlds, sequence, checkpointing)
    return results


def host_rows(host):
    """Host time: at the middle number of units, and how it grows."""
    sizes = list(host["units"])
    at = host["units"][sizes[len(sizes) // 2]]
    for key, target in (("forward+backward", 0.20), ("clip", 0.4), ("adamw", 0.1)):
        ours, theirs = at["ya_fsdp"][key], at["fsdp2"][key]
        yield Row(f"host, {key}, us per unit", f"{ours:.0f}", f"{theirs:.0f}", ours / theirs, target)
    growths = {}
    for engine in ("ya_fsdp", "fsdp2"):
        costs = [host["units"][size][engine]["forward+backward"] for size in sizes]
        growths[engine] = max(costs) / min(costs)
    name = f"host, per unit at {', '.join(sizes)} units: most / least"
    yield Row(name, f"{growths['ya_fsdp']:.2f}", f"{growths['fsdp2']:.2f}", growths["ya_fsdp"], 1.15)


def collectives(report):
    """Calls per step, and how many of them are further chunks of a unit's reduction."""
    calls = {name: row[0] for name, row in report["collectives"].items() if "wait" not in name}
    reductions = sum(count for name, count in calls.items() if "reduce_scatter" in name)
    return sum(calls.values()), max(0, reductions - report["units"])


def simulate_rows(reports):
    """Bytes and collectives, and peaks."""
    found = {(r["engine"], r["model"], r["world"], r["activation_checkpointing"]): r for r in reports}
    cases = dict.fromkeys((r["model"], r["world"]) for r in reports)
    for model, world in cases:
        ours, theirs = found["ya_fsdp", model, world, True], found["fsdp2", model, world, True]
        where = f"{model} on {world}"
        for key, name, target in (
            ("step_peak", "simulated peak of a step, GiB", PEAK_TARGETS.get((model, world))),
            ("init_peak", "simulated peak of initialisation, GiB", 0.65 if (model, world) == ("8b", 64) else None),
        ):
            a, b = ours["bytes"][key] / GIB, theirs["bytes"][key] / GIB
            yield Row(f"{where}: {name}", f"{a:.2f}", f"{b:.2f}", a / b, target)
        (a, chunks), (b, _) = collectives(ours), collectives(theirs)
        yield Row(f"{where}: collectives per step", f"{a - chunks} + {chunks} chunks", str(b), (a - chunks) / b, 1.0)
        a, b = ours["copied_after_gathers_gib"], theirs["copied_after_gathers_gib"]
        yield Row(f"{where}: copied after gathers, GiB", f"{a:.2f}", f"{b:.2f}", a, 0.0)
        a, b = ours["passes_before_reductions"], theirs["passes_before_reductions"]
        yield Row(f"{where}: passes before reductions", f"{a:.2f}", f"{b:.2f}", a, 1.01)


def estimate_rows(estimates, reports):
    """How far the estimate is from the simulation. It counts in the order of the plug-in, so peaks of steps only."""
    ours = [report for report in reports if report["engine"] == "ya_fsdp"]
    found = {(r["model"], r["world"], r["activation_checkpointing"]): r["bytes"] for r in ours}
    for item in estimates:
        key = (item["model"], item["world"], item["activation_checkpointing"])
        ours, simulated = item["step_peak"] / GIB, found[key]["step_peak"] / GIB
        name = f"{key[0]} on {key[1]}, {'' if key[2] else 'no '}checkpointing: estimate / simulation, GiB"
        yield Row(name, f"{ours:.2f}", f"{simulated:.2f}", abs(ours / simulated - 1), 0.03)


def rows_of(results):
    """The lines of the table."""
    rows = [*host_rows(results["host"])]
    for report in results["step"]:
        ours, theirs = (report[engine]["ms"]["step"] for engine in ("ya_fsdp", "fsdp2"))
        rows.append(
            Row(f"two processes, {report['dtype']}, ms per step", f"{ours:.0f}", f"{theirs:.0f}", ours / theirs, 0.80)
        )
    rows += simulate_rows(results["simulate"])
    rows += estimate_rows(results["estimate"], results["simulate"])
    seconds = results["layout_seconds"]
    rows.append(Row("layout of 1,000 parameters at 16,384 ranks, s", f"{seconds:.3f}", "", seconds, 1.0))
    return rows


def print_table(rows):
    table = Table(title="Against PyTorch FSDP2, in one run", title_justify="left")
    for name in ("what", "ya-fsdp", "FSDP2", "value", "target", ""):
        table.add_column(name, justify="left" if name == "what" else "right")
    for row in rows:
        target = "" if row.target is None else f"<= {row.target:g}"
        verdict = "" if row.target is None else "[green]met[/green]" if row.is_met else "[red]missed[/red]"
        table.add_row(row.name, row.ours, row.fsdp2, f"{row.value:.3f}", target, verdict)
    console.print(table)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="tiny models and few rounds")
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks" / "results")
    args = parser.parse_args()
    results = collect(args.quick)
    rows = rows_of(results)
    results["table"] = [{**asdict(row), "is_met": row.is_met} for row in rows]
    args.out.mkdir(parents=True, exist_ok=True)
    stem = args.out / f"{results['date']}{'-quick' if args.quick else ''}"
    files = [stem.with_suffix(".json"), *plots.draw(results, stem)]
    files[0].write_text(json.dumps(results, indent=1) + "\n")
    print_table(rows)
    console.print("written: " + ", ".join(str(file) for file in files))


if __name__ == "__main__":
    main()
