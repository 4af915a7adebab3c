"""Training on real devices: tokens per second, model FLOPs utilisation and peak memory of one engine.

The same model, data and optimizer for every engine; run once per engine and compare the JSON lines.

    torchrun --nproc_per_node 8 benchmarks/train.py --engine ya_fsdp --model 8b
    torchrun --nproc_per_node 8 benchmarks/train.py --engine fsdp2   --model 8b
"""

import argparse
import json
import os
import statistics
import sys
import time
import warnings
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.device_mesh import init_device_mesh

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from benchmarks.common import versions

warnings.filterwarnings("ignore")
MODELS = {
    "tiny": {"hidden_size": 256, "intermediate_size": 768, "num_hidden_layers": 8, "num_attention_heads": 4},
    "1b": {"hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16, "num_attention_heads": 32},
    "3b": {"hidden_size": 3072, "intermediate_size": 8192, "num_hidden_layers": 28, "num_attention_heads": 24},
    "8b": {"hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32, "num_attention_heads": 32},
}
# Dense bf16 peak in FLOP/s by a part of the device's name, for the utilisation; others get none.
PEAKS = {"H200": 989e12, "H100": 989e12, "A100": 312e12}


def build(args, device):
    from transformers import LlamaConfig, LlamaForCausalLM

    size = MODELS[args.model]
    config = LlamaConfig(
        vocab_size=args.vocabulary,
        num_key_value_heads=max(1, size["num_attention_heads"] // 4),
        max_position_embeddings=args.sequence,
        use_cache=False,
        tie_word_embeddings=False,
        **size,
    )
    torch.manual_seed(0)
    with torch.device(device):
        return LlamaForCausalLM(config), config


def wrap(model, args, mesh, device):
    layers = model.model.layers
    if args.activation_checkpointing:
        for index, layer in enumerate(layers):
            layers[index] = checkpoint_wrapper(layer, preserve_rng_state=False)
    if args.engine == "ddp":
        ids = [device.index] if device.type == "cuda" else None
        return nn.parallel.DistributedDataParallel(model, device_ids=ids)
    if args.engine == "fsdp2":
        from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
    else:
        from ya_fsdp import MixedPrecisionPolicy, fully_shard
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    options = {"mesh": mesh, "mp_policy": policy if args.dtype == "bf16" else MixedPrecisionPolicy()}
    for unit in [model.model.embed_tokens, *layers]:
        fully_shard(unit, reshard_after_forward=True, **options)
    fully_shard([model.model.norm, model.lm_head], reshard_after_forward=False, **options)
    return fully_shard(model, **options)


def flops_per_token(model_config, num_parameters, sequence):
    """Forward and backward: six per parameter, and attention's two matrix products, causal."""
    attention = 6 * model_config.num_hidden_layers * model_config.hidden_size * sequence
    return 6 * num_parameters + attention


def train(model, args, device):
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    generator = torch.Generator(device).manual_seed(dist.get_rank())
    seconds, losses = [], []
    autocast = torch.autocast(device.type, torch.bfloat16, enabled=args.engine == "ddp" and args.dtype == "bf16")
    for _ in range(args.warmup + args.steps):
        tokens = torch.randint(0, args.vocabulary, (args.batch, args.sequence), generator=generator, device=device)
        synchronise(device)
        start = time.perf_counter()
        with autocast:
            loss = model(input_ids=tokens, labels=tokens).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        synchronise(device)
        seconds.append(time.perf_counter() - start)
        losses.append(loss.item())
    return seconds[args.warmup :], losses


def synchronise(device):
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--engine", choices=["ddp", "fsdp2", "ya_fsdp"], required=True)
    parser.add_argument("--model", choices=sorted(MODELS), default="1b")
    parser.add_argument("--dtype", choices=["bf16", "fp32"], default="bf16")
    parser.add_argument("--sequence", type=int, default=4096)
    parser.add_argument("--vocabulary", type=int, default=32000)
    parser.add_argument("--batch", type=int, default=1, help="sequences per device and step")
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--warmup", type=int, default=3)
    parser.add_argument("--no-activation-checkpointing", dest="activation_checkpointing", action="store_false")
    args = parser.parse_args()

    use_cuda = torch.cuda.is_available()
    local_rank = int(os.environ.get("LOCAL_RANK", 0)) % max(1, torch.cuda.device_count())
    device = torch.device("cuda", local_rank) if use_cuda else torch.device("cpu")
    if use_cuda:
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if use_cuda else "gloo")
    mesh = init_device_mesh(device.type, (dist.get_world_size(),))
    model, config = build(args, device)
    num_parameters = sum(parameter.numel() for parameter in model.parameters())
    model = wrap(model, args, mesh, device)
    seconds, losses = train(model, args, device)
    if dist.get_rank() == 0:
        rate = args.batch * args.sequence / statistics.median(seconds)
        name = torch.cuda.get_device_name(device) if use_cuda else "cpu"
        peak = next((value for part, value in PEAKS.items() if part in name), None)
        utilisation = rate * flops_per_token(config, num_parameters, args.sequence) / peak if peak else None
        print(
            json.dumps(
                {
                    "benchmark": "train",
                    **vars(args),
                    "device": name,
                    "world_size": dist.get_world_size(),
                    "parameters": num_parameters,
                    "versions": versions(),
                    "median_seconds": round(statistics.median(seconds), 4),
                    "tokens_per_second_per_device": round(rate, 1),
                    "mfu": None if utilisation is None else round(utilisation, 4),
                    "peak_allocated_bytes": torch.cuda.max_memory_allocated(device) if use_cuda else None,
                    "peak_reserved_bytes": torch.cuda.max_memory_reserved(device) if use_cuda else None,
                    "losses": [round(loss, 5) for loss in losses],
                }
            )
        )
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
