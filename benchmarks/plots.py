"""Plots of the results of ``bench.py``."""

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot as plt

COLORS = {"fsdp2": "#9aa5b1", "ya_fsdp": "#1f6feb"}
LABELS = {"fsdp2": "FSDP2", "ya_fsdp": "ya-fsdp"}


def draw(results, stem):
    """Writes the plots beside ``stem`` and returns their paths."""
    return [
        save(host(results["host"]), stem, "host"),
        save(memory(results["simulate"]), stem, "memory"),
        save(steps(results["step"]), stem, "step"),
    ]


def save(figure, stem, name):
    path = stem.with_name(f"{stem.name}-{name}.png")
    figure.tight_layout()
    figure.savefig(path, dpi=110)
    plt.close(figure)
    return path


def bars(axes, groups, values, unit):
    """Two bars per group, one per engine."""
    for offset, engine in ((-0.2, "fsdp2"), (0.2, "ya_fsdp")):
        places = [place + offset for place in range(len(groups))]
        drawn = axes.bar(places, values[engine], 0.38, color=COLORS[engine], label=LABELS[engine])
        axes.bar_label(drawn, fmt="%.3g", fontsize=8)
    axes.set_xticks(range(len(groups)), groups)
    axes.set_ylabel(unit)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False)


def host(report):
    figure, axes = plt.subplots(figsize=(6, 3.4))
    sizes = list(report["units"])
    values = {engine: [report["units"][size][engine]["forward+backward"] for size in sizes] for engine in COLORS}
    bars(axes, [f"{size} units" for size in sizes], values, "us per unit and step")
    axes.set_title("Host time, forward and backward", fontsize=10)
    return figure


def memory(reports):
    figure, (left, right) = plt.subplots(1, 2, figsize=(9, 3.4))
    chosen = [report for report in reports if report["activation_checkpointing"]]
    cases = list(dict.fromkeys((report["model"], report["world"]) for report in chosen))
    for axes, key, title in ((left, "step_peak", "a step"), (right, "init_peak", "initialisation")):
        values = {engine: [r["gib"][key] for r in chosen if r["engine"] == engine] for engine in COLORS}
        bars(axes, [f"{model} on {world}" for model, world in cases], values, "GiB per rank")
        axes.set_title(f"Simulated peak of {title}", fontsize=10)
    return figure


def steps(reports):
    figure, axes = plt.subplots(figsize=(5, 3.4))
    values = {engine: [report[engine]["ms"]["step"] for report in reports] for engine in COLORS}
    bars(axes, [report["dtype"] for report in reports], values, "ms per step")
    axes.set_title("Two CPU processes over gloo", fontsize=10)
    return figure
