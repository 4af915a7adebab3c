"""Rounds of saves in which one rank is killed at a random moment, or cannot write, cheaply: ranks are forks of one
warm process.

Run as a process of its own, since forking one that has threads is not safe: ``python -m tests.checkpoint.kill_main
FOLDER ROUNDS FORM``. Prints one line of JSON per round.
"""

import datetime
import json
import os
import random
import resource
import signal
import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint
from torch import nn

from accelerate_plugin.saving import forms, ranks
from accelerate_plugin.saving.folder import why_incomplete
from accelerate_plugin.saving.publication import publication

RANKS = 2
#: The round in which one rank cannot write more than a part of its file.
FULL_DISK = 4


def values_of(step: int) -> dict[str, torch.Tensor]:
    """What the checkpoint of a step must hold."""
    generator = torch.Generator().manual_seed(step)
    return {"weight": torch.randn(330, 170, generator=generator), "bias": torch.randn(330, generator=generator)}


def build() -> nn.Module:
    """The model, sharded over this process's group."""
    from torch.distributed.device_mesh import init_device_mesh

    from ya_fsdp import fully_shard

    model = nn.Linear(170, 330)
    return fully_shard(model, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))


def newest(folder: Path) -> int | None:
    """The newest complete checkpoint's step, as the Trainer looks for it."""
    steps = [int(path.name.rpartition("-")[2]) for path in folder.glob("checkpoint-*") if not why_incomplete(path)]
    return max(steps, default=None)


def in_forks(work: Any, folder: Path, name: str) -> list[int]:
    """Fork one process per rank, run ``work(rank)`` in it, and return the process ids."""
    children = []
    for rank in range(RANKS):
        child = os.fork()
        if child == 0:
            code = 1
            try:
                os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank))
                store = dist.FileStore(str(folder / name), RANKS)
                dist.init_process_group("gloo", store=store, rank=rank, world_size=RANKS)
                work(rank)
                code = 0
            except BaseException as error:
                print(f"rank {rank}: {error!r}", file=sys.stderr, flush=True)
            finally:
                os._exit(code)
        children.append(child)
    return children


def wait(children: list[int], limit: float) -> list[int | None]:
    """Exit statuses; None for a process that had to be ended because it hung."""
    deadline, statuses = time.monotonic() + limit, dict.fromkeys(children)
    while None in statuses.values() and time.monotonic() < deadline:
        for child, status in statuses.items():
            if status is None:
                done, code = os.waitpid(child, os.WNOHANG)
                statuses[child] = code if done else None
        time.sleep(0.002)
    for child, status in statuses.items():
        if status is None:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
    return list(statuses.values())


def save(folder: Path, step: int, form: str, full_disk: bool = False) -> None:
    """One checkpoint, as the Trainer's hooks write it; or as much of it as the system lets this rank write."""
    model = build()
    import ya_fsdp

    ya_fsdp.load_full_state_dict(model, values_of(step))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.0, weight_decay=0.0)
    model(torch.ones(2, 170)).sum().backward()
    optimizer.step()
    (folder / "ready").touch()
    if full_disk:
        resource.setrlimit(resource.RLIMIT_FSIZE, (40_000, 40_000))
    with publication(folder / f"checkpoint-{step}", left_over="checkpoint-*") as saving:
        forms.write_model(form, model, str(saving.aside), 0, adapter_only=False)
        forms.write_optimizer(form, model, optimizer, str(saving.aside), 0)


def load(folder: Path, step: int, form: str) -> None:
    """Load the checkpoint and compare it with what was saved."""
    model = build()
    import ya_fsdp

    path = str(folder / f"checkpoint-{step}")
    forms.read_model(form, model, path, 0, adapter_only=False)
    optimizer = torch.optim.AdamW(model.parameters())
    forms.read_optimizer(form, model, optimizer, path, 0)
    found = ya_fsdp.get_full_state_dict(model, rank0_only=False)
    for name, value in values_of(step).items():
        assert torch.equal(found[name], value), name


def warm_up() -> None:
    """What torch imports at a first step, once instead of in every fork."""
    weight = nn.Parameter(torch.ones(3))
    optimizer = torch.optim.AdamW([weight])
    weight.grad = torch.ones(3)
    optimizer.step()


def main() -> None:
    """Save, kill, look, load; again and again."""
    folder, rounds, form = Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
    torch.set_num_threads(1)
    ranks.CONNECTING = datetime.timedelta(seconds=1)  # a peer that died before it connected
    warm_up()
    wait(in_forks(lambda rank: save(folder, 0, form), folder, "first"), 60)
    assert newest(folder) == 0, "the first save, which nobody disturbs"
    (folder / "ready").unlink()
    started = time.monotonic()
    chance = random.Random(form)
    duration = 0.1
    for number in range(1, rounds + 1):
        before = newest(folder)
        victim = 0 if number == FULL_DISK and form == forms.FULL else chance.randrange(RANKS)
        children = in_forks(
            lambda rank, step=number, last=victim: save(folder, step, form, step == FULL_DISK and rank == last),
            folder,
            f"save{number}",
        )
        while not (folder / "ready").exists():
            time.sleep(0.0005)
        start = time.monotonic()
        undisturbed = number % 10 == 1  # the first tells how long a save takes here and now
        if not undisturbed and number != FULL_DISK:
            time.sleep(chance.uniform(0.0, duration))
            os.kill(children[victim], signal.SIGKILL)
        statuses = wait(children, 30)
        if undisturbed:
            duration = time.monotonic() - start
        (folder / "ready").unlink()
        step = newest(folder)
        loaded = wait(in_forks(lambda rank, step=step: load(folder, step, form), folder, f"load{number}"), 60)
        kept = [path.name for path in folder.glob("checkpoint-*") if why_incomplete(path)]
        facts = {
            "round": number,
            "undisturbed": undisturbed,
            "statuses": statuses,
            "before": before,
            "newest": step,
            "loaded": loaded,
            "incomplete": kept,
        }
        print(json.dumps(facts), flush=True)
    print(json.dumps({"seconds": time.monotonic() - started}), file=sys.stderr)


if __name__ == "__main__":
    main()
