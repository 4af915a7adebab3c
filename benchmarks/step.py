"""Step time of sharding engines on two real CPU processes (gloo), taking turns in the same processes.

A Llama of about 9 million parameters, random tokens, fused AdamW, one thread per process. Prints the median
milliseconds of forward, backward, optimizer and whole step, and the losses, per engine. Machines are noisy: quote the
ratio of one run, never a single time.

    python benchmarks/step.py --engines ddp fsdp2 ya_fsdp --rounds 14
"""

import argparse
import json
import os
import socket
import statistics
import sys
import time
import warnings
from itertools import pairwise
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch.distributed.device_mesh import init_device_mesh

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from benchmarks.common import versions

WORLD = 2
VOCABULARY = 4096


def wrap(engine, model, mesh, dtype):
    if engine == "ddp":
        return torch.nn.parallel.DistributedDataParallel(model)
    if engine == "fsdp2":
        from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
    else:
        from ya_fsdp import MixedPrecisionPolicy, fully_shard
    policy = (
        MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
        if dtype == "bf16"
        else MixedPrecisionPolicy()
    )
    for unit in [model.model.embed_tokens, *model.model.layers]:
        fully_shard(unit, mesh=mesh, mp_policy=policy)
    fully_shard([model.model.norm, model.lm_head], mesh=mesh, mp_policy=policy)
    return fully_shard(model, mesh=mesh, mp_policy=policy)


PHASES = ["forward", "backward", "optimizer"]


def build(args, mesh):
    """A Llama of about 9 million parameters and its optimizer, once per engine, from the same weights."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=256,
        intermediate_size=768,
        num_hidden_layers=8,
        num_attention_heads=4,
        num_key_value_heads=4,
        max_position_embeddings=512,
        use_cache=False,
        attn_implementation="eager",
        tie_word_embeddings=False,
    )
    engines = {}
    for name in args.engines:
        torch.manual_seed(0)
        model = wrap(name, LlamaForCausalLM(config), mesh, args.dtype)
        engines[name] = (model, torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True))
    return engines


def timed_step(model, optimizer, tokens):
    """One step; returns the loss and the times at which its phases began and ended."""
    dist.barrier()
    marks = [time.perf_counter()]
    loss = model(input_ids=tokens, labels=tokens).loss
    marks.append(time.perf_counter())
    loss.backward()
    marks.append(time.perf_counter())
    optimizer.step()
    optimizer.zero_grad()
    marks.append(time.perf_counter())
    return loss.detach().float(), marks


def summary(seconds, losses):
    """Medians in milliseconds without the first two rounds, and the first and last losses."""
    columns = [*zip(*seconds[2:], strict=True)]
    medians = {phase: statistics.median(column) for phase, column in zip(PHASES, columns, strict=True)}
    medians["step"] = statistics.median(map(sum, seconds[2:]))
    return {
        "ms": {phase: round(value * 1e3, 1) for phase, value in medians.items()},
        "losses": [round(value, 6) for value in losses[:2] + losses[-1:]],
    }


def worker(rank, args, port):
    warnings.filterwarnings("ignore")
    torch.set_num_threads(1)
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    dist.init_process_group("gloo", rank=rank, world_size=WORLD)
    engines = build(args, init_device_mesh("cpu", (WORLD,)))
    generator = torch.Generator().manual_seed(1234)
    batches = [torch.randint(0, VOCABULARY, (2 * WORLD, 128), generator=generator) for _ in range(4)]
    seconds, losses = {name: [] for name in engines}, {name: [] for name in engines}
    for i in range(args.rounds):
        for name in list(engines) if i % 2 == 0 else list(engines)[::-1]:
            loss, marks = timed_step(*engines[name], batches[i % 4][rank * 2 : (rank + 1) * 2])
            seconds[name].append([end - start for start, end in pairwise(marks)])
            dist.all_reduce(loss)
            losses[name].append(loss.item() / WORLD)
    if rank == 0:
        report = {name: summary(seconds[name], losses[name]) for name in engines}
        if {"fsdp2", "ya_fsdp"} <= report.keys():
            ratio = report["ya_fsdp"]["ms"]["step"] / report["fsdp2"]["ms"]["step"]
            report["step ratio ya_fsdp/fsdp2"] = round(ratio, 3)
        head = {"benchmark": "step", "dtype": args.dtype, "rounds": args.rounds - 2, "versions": versions()}
        print(json.dumps({**head, **report}))
    dist.barrier()
    dist.destroy_process_group()


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--engines", nargs="+", choices=["ddp", "fsdp2", "ya_fsdp"], default=["ddp", "fsdp2", "ya_fsdp"]
    )
    parser.add_argument("--dtype", choices=["fp32", "bf16"], default="fp32")
    parser.add_argument("--rounds", type=int, default=14)
    args = parser.parse_args()
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    mp.spawn(worker, args=(args, port), nprocs=WORLD)


if __name__ == "__main__":
    main()
