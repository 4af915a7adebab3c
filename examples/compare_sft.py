"""Fine-tune with trl's own script twice, sharded over processes and in one process, and compare the losses.

    python examples/compare_sft.py runs/smollm2/model runs/smollm2/chats runs/smollm2

Both runs see the same rows in the same order and compute in fp32, so their losses differ by rounding only; a difference
of more than a thousandth fails. The sharded run's model then answers a question in a process of its own.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table

EXAMPLES = Path(__file__).parent
QUESTION = "What does this Python function do?\n\ndef read(self, size=-1):"
LIMIT = 1e-3


def main() -> int:
    """Run, compare, ask; returns the exit status."""
    parser = argparse.ArgumentParser(description="Compare sharded fine-tuning with a single process.")
    parser.add_argument("model", type=Path, help="folder of a chat model")
    parser.add_argument("dataset", type=Path, help="folder with conversations as .jsonl")
    parser.add_argument("output", type=Path, help="gets the folders sharded and single, and comparison.json")
    parser.add_argument("--steps", type=int, default=20, help="optimizer steps")
    parser.add_argument("--processes", type=int, default=2, help="processes of the sharded run")
    parser.add_argument("--rows", type=int, default=4, help="rows in a step, over all processes")
    parser.add_argument("--max_length", type=int, default=96, help="tokens after which a row is cut")
    parser.add_argument("--lora", action="store_true", help="train adapters instead of the whole model")
    args = parser.parse_args()
    if args.rows % args.processes:
        parser.error(f"--rows {args.rows} cannot be split evenly over --processes {args.processes}")

    console = Console()
    on_cpu = torch.cuda.device_count() < args.processes
    seconds = {}
    for name in ("sharded", "single"):
        command = sharded(args, on_cpu) if name == "sharded" else single(args, on_cpu)
        console.print("$ " + " ".join(command), style="bold", soft_wrap=True, highlight=False)
        start = time.monotonic()
        subprocess.run(command, check=True, env=environment())
        seconds[name] = round(time.monotonic() - start, 1)
    runs = {name: losses(args.output / name / f"checkpoint-{args.steps}") for name in ("single", "sharded")}
    worst = compare(runs["single"], runs["sharded"], args.processes, console)
    reply = ask(args.output / "sharded")
    console.print(f"user: {QUESTION}\n\nassistant, in plain transformers: {reply}", highlight=False)
    summary = {"losses": runs, "largest_relative_difference": worst, "limit": LIMIT, "seconds": seconds, "reply": reply}
    (args.output / "comparison.json").write_text(json.dumps(summary, indent=2) + "\n", encoding="utf-8")
    return 0 if worst <= LIMIT else 1


def sharded(args: argparse.Namespace, on_cpu: bool) -> list[str]:
    """Return the command of the sharded run."""
    return [
        *(str(Path(sys.executable).with_name("accelerate")), "launch"),
        *("--config_file", str(EXAMPLES.parent / "configs" / "fsdp_config.yaml"), "--fsdp_ya_fsdp_enabled", "true"),
        *("--num_processes", str(args.processes), "--main_process_port", "0", "--mixed_precision", "no"),
        *(["--cpu"] if on_cpu else []),
        *script(args, "sharded", args.rows // args.processes),
    ]


def single(args: argparse.Namespace, on_cpu: bool) -> list[str]:
    """Return the command of the run in one process, on as many rows per step."""
    return [sys.executable, *script(args, "single", args.rows), *(["--use_cpu"] if on_cpu else [])]


def script(args: argparse.Namespace, name: str, rows: int) -> list[str]:
    """Return trl's script with what both runs have in common."""
    options = {
        "model_name_or_path": args.model,
        "dataset_name": args.dataset,
        "output_dir": args.output / name,
        "max_length": args.max_length,
        "per_device_train_batch_size": rows,
        "max_steps": args.steps,
        "learning_rate": 1e-3 if args.lora else 5e-5,
        "bf16": "false",
        "gradient_checkpointing": "false",
        "logging_steps": 1,
        "save_strategy": "steps",
        "save_steps": args.steps,
        "save_only_model": "true",
        "report_to": "none",
        "disable_tqdm": "true",
    }
    adapters = ["--use_peft", "--lora_r", "8", "--lora_dropout", "0"] if args.lora else []
    return [
        "-m",
        "trl.scripts.sft",
        *adapters,
        *(word for key, value in options.items() for word in (f"--{key}", str(value))),
    ]


def environment() -> dict[str, str]:
    """Return the environment of a run: quiet, offline, one thread a process unless the caller says otherwise."""
    quiet = {
        "TRANSFORMERS_VERBOSITY": "error",
        "HF_DATASETS_DISABLE_PROGRESS_BARS": "1",
        "TOKENIZERS_PARALLELISM": "false",
    }
    quiet |= {"HF_HUB_DISABLE_PROGRESS_BARS": "1", "PYTHONWARNINGS": "ignore"}
    return {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", **os.environ, **quiet}


def losses(checkpoint: Path) -> list[float]:
    """Return the loss of each step from what the Trainer saved."""
    state = json.loads((checkpoint / "trainer_state.json").read_text(encoding="utf-8"))
    return [entry["loss"] for entry in state["log_history"] if "loss" in entry]


def compare(one: list[float], many: list[float], processes: int, console: Console) -> float:
    """Print both runs side by side; return the largest relative difference."""
    table = Table(title="loss of each step, fp32")
    for column in ("step", "1 process", f"{processes} processes, sharded", "relative difference"):
        table.add_column(column, justify="right")
    differences = [abs(a - b) / abs(a) for a, b in zip(one, many, strict=True)]
    for step, row in enumerate(zip(one, many, differences, strict=True), start=1):
        table.add_row(str(step), f"{row[0]:.7f}", f"{row[1]:.7f}", f"{row[2]:.1e}")
    console.print(table)
    console.print(f"largest relative difference {max(differences):.1e}, limit {LIMIT:g}")
    return max(differences)


def ask(folder: Path) -> str:
    """Return the model's answer to a question, from a process with plain transformers."""
    command = [sys.executable, str(EXAMPLES / "chat.py"), str(folder), QUESTION]
    done = subprocess.run(command, check=True, env=environment(), stdout=subprocess.PIPE, text=True)
    return done.stdout.strip()


if __name__ == "__main__":
    sys.exit(main())
