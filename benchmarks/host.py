"""Host (Python) time of a sharding engine per unit and step, against a plain model, in one process.

Torch's 'fake' process group of 8 ranks (its cost grows with world size, so larger worlds measure the fake), CPU
tensors, 32 units of 9 small parameters, almost no arithmetic. Engines take turns step by step; the plain model's time
is subtracted; medians. Prints microseconds per unit for forward, backward, clip and fused AdamW. The clock is the CPU
time of the one thread that does everything, so other processes on the machine count less.

    python benchmarks/host.py --engines fsdp2 ya_fsdp --units 8 32 80
"""

import argparse
import gc
import json
import statistics
import sys
import time
import warnings
from itertools import pairwise
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.testing._internal.distributed.fake_pg import FakeStore

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from benchmarks.common import versions

warnings.filterwarnings("ignore")
PHASES = ["forward", "backward", "clip", "adamw"]


class Scale(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x):
        return x * self.weight


class Block(nn.Module):
    """Nine parameters, shaped like a Llama block."""

    def __init__(self, width):
        super().__init__()
        self.norm1, self.norm2 = Scale(width), Scale(width)
        for name in ("q", "k", "v", "o", "gate", "up", "down"):
            setattr(self, name, nn.Linear(width, width, bias=False))

    def forward(self, x):
        y = self.norm1(x)
        x = x + self.o(self.q(y) + self.k(y) + self.v(y))
        y = self.norm2(x)
        return x + self.down(self.gate(y) + self.up(y))


class Model(nn.Module):
    def __init__(self, width, layers):
        super().__init__()
        self.inlet = Block(width)
        self.layers = nn.ModuleList(Block(width) for _ in range(layers - 2))
        self.outlet = Block(width)

    def forward(self, x):
        x = self.inlet(x)
        for layer in self.layers:
            x = layer(x)
        return self.outlet(x)


def shard(model, engine, mesh):
    if engine == "plain":
        return model
    if engine == "fsdp2":
        from torch.distributed.fsdp import fully_shard
    else:
        from ya_fsdp import fully_shard
    for unit in [model.inlet, *model.layers, model.outlet]:
        fully_shard(unit, mesh=mesh, reshard_after_forward=True)
    fully_shard(model, mesh=mesh)
    return model


def measure(engines, num_units, width, rounds, mesh):
    """Medians of each engine's phases above the plain model's, in microseconds per unit and step."""
    names = ["plain", *engines]
    models, optimizers = {}, {}
    for name in names:
        torch.manual_seed(0)
        models[name] = shard(Model(width, num_units), name, mesh)
        optimizers[name] = torch.optim.AdamW(models[name].parameters(), lr=0.0, fused=True)
    x = torch.ones(1, width)

    def step(name):
        model, marks = models[name], [time.thread_time()]
        loss = model(x).sum()
        marks.append(time.thread_time())
        loss.backward()
        marks.append(time.thread_time())
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        marks.append(time.thread_time())
        optimizers[name].step()
        marks.append(time.thread_time())
        optimizers[name].zero_grad()
        return [end - start for start, end in pairwise(marks)]

    for name in names:
        for _ in range(3):
            step(name)
    gc.collect()
    gc.disable()
    times = {name: [] for name in names}
    for i in range(rounds):
        for name in names if i % 2 == 0 else names[::-1]:
            times[name].append(step(name))
        if i % 10 == 0:
            gc.collect()
    gc.enable()
    medians = {name: [statistics.median(column) for column in zip(*rows, strict=True)] for name, rows in times.items()}
    report = {}
    for name in engines:
        extra = [(a - b) / num_units * 1e6 for a, b in zip(medians[name], medians["plain"], strict=True)]
        report[name] = {
            **{phase: round(value, 1) for phase, value in zip(PHASES, extra, strict=True)},
            "forward+backward": round(extra[0] + extra[1], 1),
        }
    return report


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--engines", nargs="+", choices=["fsdp2", "ya_fsdp"], default=["fsdp2", "ya_fsdp"])
    parser.add_argument("--units", type=int, nargs="+", default=[32])
    parser.add_argument("--width", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=40)
    args = parser.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("fake", rank=0, world_size=8, store=FakeStore())
    mesh = init_device_mesh("cpu", (8,))
    report = {str(n): measure(args.engines, n, args.width, args.rounds, mesh) for n in args.units}
    if {"fsdp2", "ya_fsdp"} <= set(args.engines):
        for phases in report.values():
            phases["ya_fsdp/fsdp2"] = {
                key: round(phases["ya_fsdp"][key] / phases["fsdp2"][key], 3) for key in phases["fsdp2"]
            }
    print(
        json.dumps(
            {
                "benchmark": "host",
                "unit": "us per unit and step above a plain model, by number of units",
                "rounds": args.rounds,
                "versions": versions(),
                "units": report,
            }
        )
    )


if __name__ == "__main__":
    main()
