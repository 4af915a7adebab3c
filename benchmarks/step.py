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
import time
import warnings
from itertools import pairwise

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

WORLD = 2


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


def worker(rank, args, port):
    warnings.filterwarnings("ignore")
    torch.set_num_threads(1)
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    dist.init_process_group("gloo", rank=rank, world_size=WORLD)
    from torch.distributed.device_mesh import init_device_mesh
    from transformers import LlamaConfig, LlamaForCausalLM

    mesh = init_device_mesh("cpu", (WORLD,))
    config = LlamaConfig(
        vocab_size=4096,
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
    generator = torch.Generator().manual_seed(1234)
    batches = [torch.randint(0, config.vocab_size, (2 * WORLD, 128), generator=generator) for _ in range(4)]
    times, losses = {name: [] for name in engines}, {name: [] for name in engines}
    for i in range(args.rounds):
        mine = batches[i % 4][rank * 2 : (rank + 1) * 2]
        for name in list(engines) if i % 2 == 0 else list(engines)[::-1]:
            model, optimizer = engines[name]
            dist.barrier()
            marks = [time.perf_counter()]
            loss = model(input_ids=mine, labels=mine).loss
            marks.append(time.perf_counter())
            loss.backward()
            marks.append(time.perf_counter())
            optimizer.step()
            optimizer.zero_grad()
            marks.append(time.perf_counter())
            times[name].append([b - a for a, b in pairwise(marks)] + [marks[-1] - marks[0]])
            total = loss.detach().float()
            dist.all_reduce(total)
            losses[name].append(total.item() / WORLD)
    if rank == 0:
        report = {
            name: {
                "ms": dict(
                    zip(
                        ["forward", "backward", "optimizer", "step"],
                        [round(statistics.median(c) * 1e3, 1) for c in zip(*times[name][2:], strict=False)],
                        strict=False,
                    )
                ),
                "losses": [round(v, 6) for v in losses[name][:2] + losses[name][-1:]],
            }
            for name in engines
        }
        if "fsdp2" in report and "ya_fsdp" in report:
            report["step ratio ya_fsdp/fsdp2"] = round(
                report["ya_fsdp"]["ms"]["step"] / report["fsdp2"]["ms"]["step"], 3
            )
        print(
            json.dumps(
                {
                    "benchmark": "step",
                    "dtype": args.dtype,
                    "rounds": args.rounds - 2,
                    "torch": torch.__version__,
                    **report,
                }
            )
        )
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
