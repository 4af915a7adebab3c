"""What a training run took and gave: bytes per rank, losses, throughput, as a table and as files beside the model."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from matplotlib.figure import Figure
from rich.console import Console
from rich.table import Table
from transformers import Trainer, TrainerCallback, TrainerControl, TrainerState, TrainingArguments

try:
    import ya_fsdp
except ImportError:
    ya_fsdp = None

KINDS = ("parameters", "gradients", "optimizer", "gather buffers")
Log = list[dict[str, float]]


class MemoryProbe(TrainerCallback):
    """Notes, on each rank, the most bytes that each kind of memory took at moments when it is in use.

    Gradients exist only between backward and `zero_grad`, the optimizer's state only after the first step, gather
    buffers while a layer runs; so each is looked at then, and not once at the end.

    Attributes:
        peak: Bytes on this rank for each of `KINDS`.
        engine: Who holds the model: `ya_fsdp`, or nobody that this module knows (plain PyTorch, DDP).
    """

    def __init__(self) -> None:
        """Start with nothing seen."""
        self.peak = dict.fromkeys(KINDS, 0)
        self.engine = "not started"

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Arrange for one look in the middle of a forward, while the last layer is gathered."""
        model = kwargs["model"]
        self.engine = (
            f"ya_fsdp, {ya_fsdp.memory_report(model).num_units} units" if is_sharded(model) else "plain PyTorch"
        )
        layers = [module for module in model.modules() if isinstance(module, torch.nn.ModuleList)][-1]
        inside_last_layer = next(iter(layers[-1].children()))

        def look_once(*_: Any) -> None:
            handle.remove()
            self._look(model, None)

        handle = inside_last_layer.register_forward_hook(look_once)

    def on_pre_optimizer_step(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Look while gradients are there."""
        self._look(kwargs["model"], kwargs["optimizer"])

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Look once the optimizer has made its state."""
        self._look(kwargs["model"], kwargs["optimizer"])

    def _look(self, model: torch.nn.Module, optimizer: Any) -> None:
        for kind, size in zip(KINDS, bytes_on_this_rank(model, optimizer), strict=True):
            self.peak[kind] = max(self.peak[kind], size)


def is_sharded(model: torch.nn.Module) -> bool:
    """Whether ya_fsdp holds at least one part of the model."""
    return ya_fsdp is not None and any(isinstance(module, ya_fsdp.YaFSDPModule) for module in model.modules())


def bytes_on_this_rank(model: torch.nn.Module, optimizer: Any) -> tuple[int, int, int, int]:
    """Return this rank's bytes of each of `KINDS`: as the engine counts them, or of the plain tensors without it."""
    optimizer = getattr(optimizer, "optimizer", optimizer)  # accelerate wraps it
    if is_sharded(model):
        report = ya_fsdp.memory_report(model, optimizer)
        return report.parameters, report.gradients, report.optimizer, report.buffers
    parameters = list(model.parameters())
    gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
    states = [] if optimizer is None else optimizer.state.values()
    moments = [value for state in states for value in state.values() if torch.is_tensor(value)]
    return tensor_bytes(parameters), tensor_bytes(gradients), tensor_bytes(moments), 0


def tensor_bytes(tensors: Sequence[torch.Tensor]) -> int:
    """Bytes of plain tensors."""
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


def gather_rank_bytes(trainer: Trainer, probe: MemoryProbe) -> dict[str, list[int]]:
    """Return the probe's peaks of all ranks: one list per kind, in rank order. All ranks take part."""
    mine = torch.tensor([probe.peak[kind] for kind in KINDS], device=trainer.args.device)
    everyone = trainer.accelerator.gather(mine).view(-1, len(KINDS)).tolist()
    return {kind: [rank[index] for rank in everyone] for index, kind in enumerate(KINDS)}


@dataclass(frozen=True)
class RunReport:
    """One run in numbers.

    Units: sizes are bytes on each rank, in rank order; `tokens_per_second` counts the tokens of all ranks.
    """

    engine: str
    num_parameters: int
    num_processes: int
    device: str
    num_steps: int
    first_loss: float
    last_loss: float
    seconds: float
    tokens_per_second: float
    rank_bytes: dict[str, list[int]]


def first_and_last_loss(log_history: Log) -> tuple[float, float]:
    """Return the first logged loss, and the mean of the last five, since one small batch alone is noisy."""
    losses = [entry["loss"] for entry in log_history if "loss" in entry]
    return losses[0], sum(losses[-5:]) / len(losses[-5:])


def save_report(report: RunReport, log_history: Log, folder: Path) -> None:
    """Write `summary.json` and `loss.png` into the folder and print the table."""
    (folder / "summary.json").write_text(json.dumps(asdict(report), indent=2) + "\n", encoding="utf-8")
    plot_loss(report, log_history, folder / "loss.png")
    Console().print(report_table(report, folder))


def report_table(report: RunReport, folder: Path) -> Table:
    """Return the run as a table."""
    table = Table(title=f"{report.num_parameters / 1e6:.2f} M parameters, {report.num_steps} steps", show_header=False)
    table.add_column(style="bold")
    table.add_column(justify="right")
    table.add_row("sharded by", report.engine)
    table.add_row("processes", f"{report.num_processes} ({report.device})")
    table.add_row("first loss", f"{report.first_loss:.3f}")
    table.add_row("last loss (mean of 5)", f"{report.last_loss:.3f}")
    table.add_row("training time", f"{report.seconds:.1f} s")
    table.add_row("tokens per second", f"{report.tokens_per_second:,.0f}", end_section=True)
    for kind, sizes in report.rank_bytes.items():
        table.add_row(f"bytes per rank: {kind}", bytes_cell(sizes))
    totals = [sum(sizes) for sizes in zip(*report.rank_bytes.values(), strict=True)]
    table.add_row("bytes per rank: sum", bytes_cell(totals), end_section=True)
    table.add_row("model, plot, summary", str(folder))
    return table


def bytes_cell(sizes: list[int]) -> str:
    """Write sizes once where all ranks hold the same, else as a range over the ranks."""
    low, high = min(sizes), max(sizes)
    return f"{low:,}" if low == high else f"{low:,} to {high:,}"


def plot_loss(report: RunReport, log_history: Log, file: Path) -> None:
    """Draw the loss of every logged step."""
    steps = [entry["step"] for entry in log_history if "loss" in entry]
    losses = [entry["loss"] for entry in log_history if "loss" in entry]
    figure = Figure(figsize=(7, 4), layout="constrained")
    axes = figure.subplots()
    axes.plot(steps, losses, linewidth=1.5)
    axes.set_xlabel("step")
    axes.set_ylabel("training loss (nats per token)")
    axes.set_title(f"{report.num_parameters / 1e6:.1f} M Llama, {report.num_processes} processes, {report.engine}")
    axes.grid(alpha=0.3)
    axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(file, dpi=120)
