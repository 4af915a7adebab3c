"""``ya-fsdp``: ``estimate`` says what a model will take on each rank before anything is run, ``env`` what runs here."""

import argparse
import json
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import nn

from accelerate_plugin.activation import apply_checkpointing
from accelerate_plugin.dry_run import PRESETS, build_model, measure, mixed
from accelerate_plugin.environment import describe_environment
from accelerate_plugin.settings import DTYPES, Settings
from accelerate_plugin.units import Unit, find_units
from ya_fsdp import MemoryEstimate, MixedPrecisionPolicy, Stage, UnitSpec, describe_unit, estimate_memory

__all__ = ["main"]

GIB = 2**30


@dataclass(frozen=True)
class Fit:
    """What ``estimate`` has found.

    Attributes:
        estimate: For the number of checkpointed blocks that was asked for.
        num_blocks: Repeated blocks of the model.
        checkpointed: Blocks that are checkpointed in the estimate.
        least: Fewest blocks to checkpoint so that the step fits; None if it never does, or no limit is known.
        capacity: Bytes that the step may take.
    """

    estimate: MemoryEstimate
    num_blocks: int
    checkpointed: int
    least: int | None
    capacity: int | None

    @property
    def fits(self) -> bool | None:
        """Whether both peaks stay within the capacity."""
        return None if self.capacity is None else _peak(self.estimate) <= self.capacity


def _peak(estimate: MemoryEstimate) -> int:
    return max(estimate.step_peak, estimate.initial_peak)


def _describe(model: nn.Module, units: Sequence[Unit], reshard: bool) -> list[UnitSpec]:
    """The units that the plug-in would shard, and the root with what is left."""
    taken: set[nn.Parameter] = set()
    specs = [
        describe_unit(unit.label, unit.modules, taken, is_kept=not reshard or unit.kind in ("head", "tied"))
        for unit in units
    ]
    return [*specs, describe_unit(type(model).__name__, [model], taken, is_root=True)]


def _courses(model: nn.Module, units: Sequence[Unit], options: argparse.Namespace) -> tuple[list[Stage], list[Stage]]:
    """The stages of the model as it is, and with every block checkpointed."""
    model.to(DTYPES[options.dtype])
    ids = torch.zeros(options.batch, options.sequence, dtype=torch.long, device="meta")

    def run() -> torch.Tensor:
        if options.loss == "full":
            loss: torch.Tensor = model(input_ids=ids, labels=ids).loss
            return loss
        # What losses leave that never hold the logits of all tokens: those of one position.
        return model(input_ids=ids, logits_to_keep=1).logits.float().logsumexp(-1).sum()  # type: ignore[no-any-return]

    plain = measure(model, units, run)
    apply_checkpointing(model, Settings(activation_checkpointing=True, wrap_classes=tuple(options.wrap)))
    return plain, measure(model, units, run)


def find_fit(options: argparse.Namespace) -> Fit:
    """Builds the model, measures its activations and estimates.

    Raises:
        ValueError: For a model or a number that cannot be used.
        RuntimeError: If activations cannot be measured.
        ImportError: If transformers is not installed.
    """
    model = build_model(options.model).to(DTYPES[options.master_dtype])
    units = find_units(model, Settings(wrap_classes=tuple(options.wrap)))
    specs = _describe(model, units, options.reshard)
    blocks = [index for index, unit in enumerate(units) if unit.kind == "block"]
    wanted = len(blocks) if options.checkpoint_layers == "all" else options.checkpoint_layers
    if wanted > len(blocks):
        raise ValueError(f"--checkpoint-layers: {wanted} was asked for, and {options.model} has {len(blocks)} blocks")
    is_mixed = options.dtype != options.master_dtype
    reduce_name = options.reduce_dtype or ("fp32" if is_mixed else options.master_dtype)
    policy = MixedPrecisionPolicy(DTYPES[options.dtype] if is_mixed else None, DTYPES[reduce_name])
    stages = None if options.no_activations else _courses(model, units, options)

    def estimate(count: int) -> MemoryEstimate:
        course = None if stages is None else mixed(*stages, blocks, count)
        return estimate_memory(
            specs, options.world, policy, stages=course, optimizer=options.optimizer, alignment=options.shard_alignment
        )

    capacity = None if options.gpu_memory is None else round((options.gpu_memory - options.reserve) * GIB)
    least = None
    if capacity is not None:
        least = next((count for count in range(len(blocks) + 1) if _peak(estimate(count)) <= capacity), None)
    return Fit(estimate(wanted), len(blocks), wanted, least, capacity)


def _as_json(fit: Fit, options: argparse.Namespace) -> str:
    values = {key: value for key, value in vars(options).items() if key not in ("command", "json")}
    report = {
        **values,
        **{field: value for field, value in asdict(fit).items() if field != "estimate"},
        "fits": fit.fits,
        "bytes": asdict(fit.estimate),
        "torch": torch.__version__,
    }
    return json.dumps(report)


def _table(title: str, rows: Mapping[str, int]) -> Table:
    table = Table(title=title, title_justify="left", show_header=False)
    table.add_column()
    table.add_column(justify="right")
    for name, value in rows.items():
        table.add_row(name, f"{value / GIB:9.3f} GiB")
    return table


def _verdict(fit: Fit, options: argparse.Namespace) -> str:
    if fit.capacity is None:
        return "Give --gpu-memory to be told whether it fits."
    room = f"{options.gpu_memory:g} GiB less {options.reserve:g} for everything else"
    if fit.fits:
        verdict = f"It fits into {room}."
        if fit.least is not None and fit.least < fit.checkpointed:
            verdict += f" Checkpointing {fit.least} of {fit.num_blocks} blocks would do."
    elif fit.least is not None:
        verdict = f"It does not fit into {room}. Checkpoint at least {fit.least} of {fit.num_blocks} blocks: "
        verdict += f"fsdp_num_layers_to_checkpoint: {fit.least}."
    else:
        verdict = f"It does not fit into {room}, not with all {fit.num_blocks} blocks checkpointed either: take more "
        verdict += "ranks, a shorter sequence, or a smaller batch."
    return verdict


def _print_estimate(fit: Fit, options: argparse.Namespace) -> None:
    found, console = fit.estimate, Console(highlight=False, soft_wrap=True)
    console.print(
        f"{options.model}: {found.num_parameters / 1e9:.3f} billion parameters in {found.num_units} units on "
        f"{options.world} rank(s), {options.dtype} compute, {options.master_dtype} master weights, "
        f"{fit.checkpointed} of {fit.num_blocks} blocks checkpointed"
    )
    rows = {
        "parameters": found.parameters,
        "gradients, behind a backward": found.gradients,
        f"optimizer ({options.optimizer})": found.optimizer,
        "at rest": found.resting,
        "peak of the initialisation": found.initial_peak,
        "peak of a step": found.step_peak,
    }
    console.print(_table("Bytes per rank", rows))
    console.print(_table(f"Live at the peak of a step: {found.peak_moment}", found.peak_parts))
    if options.no_activations:
        console.print("Activations, and gradients that are not yet reduced, are left out.")
    console.print(_verdict(fit, options))


def _estimate(options: argparse.Namespace) -> None:
    fit = find_fit(options)
    if options.json:
        print(_as_json(fit, options))
    else:
        _print_estimate(fit, options)


def _environment(options: argparse.Namespace) -> None:
    report = describe_environment()
    if options.json:
        print(json.dumps(report))
        return
    console = Console(highlight=False, soft_wrap=True)
    for title, rows in report.items():
        table = Table(title=title, title_justify="left", show_header=False)
        table.add_column()
        table.add_column(overflow="fold")
        for name, value in rows.items():
            table.add_row(name, str(value))
        console.print(table)


def _positive(text: str) -> int:
    try:
        value = int(text)
    except ValueError:
        value = 0
    if value < 1:
        raise argparse.ArgumentTypeError(f"expected a positive whole number, got {text!r}")
    return value


def _gigabytes(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 <= value < 2**20:
        raise argparse.ArgumentTypeError(f"expected a number of GiB, got {text!r}")
    return value


def _layers(text: str) -> int | str:
    if text == "all":
        return text
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"expected a number of blocks or 'all', got {text!r}")
    return int(text)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="ya-fsdp", description="Sharded data parallelism: plan a run, report a bug.")
    commands = parser.add_subparsers(dest="command", required=True)
    estimate = commands.add_parser(
        "estimate",
        help="what a model will take on each rank, and whether it fits",
        description="Bytes per rank of a training run. Nothing is allocated: the model is built and run on the meta "
        "device, with attention that takes the memory of a fused kernel.",
    )
    add = estimate.add_argument
    add("model", help=f"a folder with a config.json, such a file, a model in the local cache, or {', '.join(PRESETS)}")
    add("--world", type=_positive, required=True, help="ranks that the model is sharded over")
    add("--gpu-memory", type=_gigabytes, help="memory of one device in GiB")
    add("--reserve", type=_gigabytes, default=4.0, help="GiB of it for context, communication, fragments (4)")
    add("--dtype", choices=DTYPES, default="bf16", help="dtype of compute (bf16)")
    add("--reduce-dtype", choices=DTYPES, help="dtype in which gradients are averaged (fp32 if dtypes are mixed)")
    add("--master-dtype", choices=DTYPES, default="fp32", help="dtype of weights and optimizer state (fp32)")
    add("--sequence", type=_positive, default=4096, help="tokens per sequence (4096)")
    add("--batch", type=_positive, default=1, help="sequences per rank and step (1)")
    add("--loss", choices=["full", "lean"], default="full", help="logits of all tokens at once, or never (full)")
    add("--checkpoint-layers", type=_layers, default=0, metavar="N|all", help="blocks that are recomputed (0)")
    add("--optimizer", choices=["adamw", "momentum", "sgd"], default="adamw", help="its state (adamw)")
    add("--no-reshard", dest="reshard", action="store_false", help="blocks stay gathered until the backward")
    add("--shard-alignment", type=_positive, default=8, help="fsdp_ya_fsdp_shard_alignment (8)")
    add("--wrap", type=lambda text: text.split(","), default=[], metavar="CLASS,...", help="classes of the blocks")
    add("--no-activations", action="store_true", help="leave them out; for models that cannot be run without data")
    add("--json", action="store_true", help="one line of JSON, in bytes")
    environment = commands.add_parser("env", help="versions, devices and settings, for bug reports")
    environment.add_argument("--json", action="store_true", help="one line of JSON")
    return parser


def main(arguments: Sequence[str] | None = None) -> None:
    """Entry point of the ``ya-fsdp`` command."""
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    options = _parser().parse_args(arguments)
    commands: dict[str, Any] = {"estimate": _estimate, "env": _environment}
    try:
        commands[options.command](options)
    except (ValueError, RuntimeError, ImportError) as error:
        sys.exit(f"ya-fsdp {options.command}: {error}")


if __name__ == "__main__":
    main()
