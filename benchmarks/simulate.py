"""What one training step of a sharding engine costs in bytes, without a GPU.

Runs a Llama-shaped model on a fake accelerator under FakeTensorMode with torch's 'fake' process group and
prints one JSON line: peak and resting bytes by live storage (512-byte rounding), and per step the calls and bytes of
collectives, copies and allocations. It counts in issue order: no caching allocator, no fragmentation, no delayed
cross-stream free. A simulation, not a GPU number; good for comparing engines on the same work.

    python benchmarks/simulate.py --engine fsdp2   --model 8b --world 64
    python benchmarks/simulate.py --engine ya_fsdp --model 8b --world 64
"""

import argparse
import collections
import json
import logging
import sys
import time
import warnings
import weakref
from pathlib import Path

warnings.filterwarnings("ignore")
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from benchmarks.common import MODELS, versions  # noqa: E402
from tests.schedule import fake_accelerator as fakegpu  # noqa: E402  (the one that the tests use)

fakegpu.install()  # before anything touches a device
import torch  # noqa: E402
from torch._subclasses.fake_tensor import FakeTensorMode  # noqa: E402
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper  # noqa: E402
from torch.distributed.device_mesh import init_device_mesh  # noqa: E402
from torch.utils._python_dispatch import TorchDispatchMode  # noqa: E402
from torch.utils._pytree import tree_leaves  # noqa: E402

logging.getLogger("transformers").setLevel(logging.ERROR)
# One kernel on real devices; torch would take it apart on one that has none, and hold its intermediate results.
_KERNELS = torch.library.Library("aten", "IMPL", "PrivateUse1")
_KERNELS.impl("silu_backward", lambda grad, value: torch.empty_like(value))
GIB = 2**30
DEVICE = fakegpu.NAME
COPIES = ("copy", "cat", "split_with_sizes")


class ScorelessAttention(torch.autograd.Function):
    """Attention with the memory of a flash kernel: saves q, k, v and the output, never the score matrix."""

    @staticmethod
    def forward(ctx, query, key, value):
        output = torch.empty_like(query)
        ctx.save_for_backward(query, key, value, output)
        return output

    @staticmethod
    def backward(ctx, grad):
        query, key, value, _ = ctx.saved_tensors
        return torch.empty_like(query), torch.empty_like(key), torch.empty_like(value)


def scoreless_attention(module, query, key, value, attention_mask, **kwargs):
    return ScorelessAttention.apply(query, key, value).transpose(1, 2), None


class LiveBytes:
    """Live bytes of the fake device by untyped storage, and their peak."""

    def __init__(self):
        self.live = self.peak = self.allocations = self.allocated = 0
        self.sizes = {}
        self.forget = lambda key: None
        self.original = original = torch.UntypedStorage.resize_

        def resize(storage, nbytes):
            result = original(storage, nbytes)
            key = storage._cdata
            if key in self.sizes:
                old, self.sizes[key] = self.sizes[key], self.rounded(nbytes)
                self.add(self.sizes[key] - old)
            return result

        torch.UntypedStorage.resize_ = resize

    def close(self):
        torch.UntypedStorage.resize_ = self.original

    @staticmethod
    def rounded(nbytes):
        return (nbytes + 511) // 512 * 512

    def see(self, tensor):
        if tensor.device.type != DEVICE or hasattr(tensor, "_local_tensor"):
            return
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key in self.sizes:
            return
        self.sizes[key] = self.rounded(storage.nbytes())
        self.add(self.sizes[key])
        weakref.finalize(storage, self.free, key)

    def add(self, nbytes):
        self.live += nbytes
        if nbytes > 0:
            self.allocations += 1
            self.allocated += nbytes
        self.peak = max(self.peak, self.live)

    def free(self, key):
        self.live -= self.sizes.pop(key, 0)
        self.forget(key)  # another storage may come to the same address


class OpCounter(TorchDispatchMode):
    """Calls and bytes of every op the engine dispatches on plain tensors."""

    def __init__(self, memory):
        super().__init__()
        self.memory = memory
        memory.forget = self.forget
        self.counting = False
        self.calls = collections.Counter()
        self.nbytes = collections.Counter()
        self.gathered = set()
        self.pending = collections.Counter()
        self.copied_after_gathers = self.written_before_reductions = self.reduced = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        tensors = [t for t in tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor)]
        if any(hasattr(t, "_spec") for t in tensors):  # let wrapper subclasses unwrap first
            return NotImplemented
        result = func(*args, **kwargs)
        for tensor in tree_leaves((result, args)):
            if isinstance(tensor, torch.Tensor):
                self.memory.see(tensor)
        if self.counting:
            name = str(func).removeprefix("aten.").removesuffix(".default")
            self.calls[name] += 1
            written = args[0] if "c10d" in name else kwargs.get("out", result if result is not None else args[0])
            self.nbytes[name] += nbytes(written)
            self.follow(name, written, (args, kwargs))
        return result

    def forget(self, key):
        self.gathered.discard(key)
        self.pending.pop(key, None)

    def follow(self, name, written, inputs):
        """Copies out of what was gathered, and passes over what is then reduced, by storage."""
        if name.startswith("c10d._allgather_base_"):
            self.gathered.update(storages(written))
        elif name.startswith("c10d._reduce_scatter_base_"):
            self.reduced += nbytes(inputs[0][1])
            self.written_before_reductions += sum(self.pending.pop(key, 0) for key in storages(inputs[0][1]))
        elif any(word in name for word in COPIES) and nbytes(written) and not name.startswith("split_with_sizes"):
            targets = set(storages(written))
            if self.gathered & (set(storages(inputs)) - targets):
                self.copied_after_gathers += nbytes(written)
            for tensor in tree_leaves(written):
                if isinstance(tensor, torch.Tensor):
                    self.pending[tensor.untyped_storage()._cdata] += nbytes(tensor)


def nbytes(tree):
    return sum(t.numel() * t.element_size() for t in tree_leaves(tree) if isinstance(t, torch.Tensor))


def storages(tree):
    return [t.untyped_storage()._cdata for t in tree_leaves(tree) if isinstance(t, torch.Tensor)]


def materialise(module):
    for submodule in module.modules():
        for name, param in list(submodule._parameters.items()):
            if param is not None and param.device.type == "meta":
                fresh = torch.empty(param.shape, dtype=param.dtype, device=DEVICE)
                submodule._parameters[name] = torch.nn.Parameter(fresh)
        for name, buffer in list(submodule._buffers.items()):
            if buffer is not None:
                submodule._buffers[name] = torch.empty(buffer.shape, dtype=buffer.dtype, device=DEVICE)


def build(args, engine, mesh):
    from transformers import LlamaConfig, LlamaForCausalLM

    if engine == "fsdp2":
        from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
    else:
        from ya_fsdp import MixedPrecisionPolicy, fully_shard
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    ALL_ATTENTION_FUNCTIONS.register("scoreless_attention", scoreless_attention)
    config = LlamaConfig(
        **MODELS[args.model],
        max_position_embeddings=8192,
        use_cache=False,
        attn_implementation="scoreless_attention",
        tie_word_embeddings=False,
    )
    with torch.device("meta"):
        model = LlamaForCausalLM(config)
    policy = (
        MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
        if args.dtype == "bf16"
        else MixedPrecisionPolicy()
    )
    options = {"mesh": mesh, "mp_policy": policy}
    if args.activation_checkpointing:
        for i, layer in enumerate(model.model.layers):
            model.model.layers[i] = checkpoint_wrapper(layer, preserve_rng_state=False)
    for unit in [model.model.embed_tokens, *model.model.layers]:
        materialise(unit)
        fully_shard(unit, reshard_after_forward=True, **options)
    materialise(model)
    fully_shard([model.model.norm, model.lm_head], reshard_after_forward=False, **options)
    fully_shard(model, **options)
    return model


def parse_arguments():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--engine", choices=["fsdp2", "ya_fsdp"], nargs="+", required=True)
    parser.add_argument("--model", choices=sorted(MODELS), default="8b")
    parser.add_argument("--world", type=int, nargs="+", default=[64], help="one or several, one line each")
    parser.add_argument("--dtype", choices=["bf16", "fp32"], default="bf16")
    parser.add_argument("--seq", type=int, default=4096)
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument(
        "--loss",
        choices=["lean", "full"],
        default="lean",
        help="lean: logits of one position, as chunked or fused losses leave (default); full: all logits",
    )
    parser.add_argument("--no-activation-checkpointing", dest="activation_checkpointing", action="store_false")
    return parser.parse_args()


def train_step(model, optimizer, ids, loss_kind):
    if loss_kind == "full":
        loss = model(input_ids=ids, labels=ids).loss
    else:
        loss = model(input_ids=ids, logits_to_keep=1).logits.float().logsumexp(-1).sum()
    loss.backward()
    del loss
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()


def simulate(args, engine, world, memory, counter):
    """Builds the model and runs three steps, the last of which is counted. Returns bytes by name."""
    mesh = init_device_mesh(DEVICE, (world,))
    with FakeTensorMode(allow_non_fake_inputs=True), counter:
        model = build(args, engine, mesh)
        optimizer = torch.optim.AdamW(model.parameters(), fused=True)
        init_peak, memory.peak = memory.peak, 0
        ids = torch.zeros(args.batch, args.seq, dtype=torch.long, device=DEVICE)
        for step in range(3):
            if step == 2:
                counter.counting = True
                memory.allocations = memory.allocated = 0
                memory.peak = memory.live
            resting = memory.live
            train_step(model, optimizer, ids, args.loss)
    return {"init_peak": init_peak, "resting": resting, "step_peak": memory.peak}


def report(args, engine, world):
    """Simulates one engine on so many ranks and returns what is to be printed."""
    start = time.time()
    memory = LiveBytes()
    counter = OpCounter(memory)
    with fakegpu.fake_ranks(world):
        values = simulate(args, engine, world, memory, counter)
    memory.close()
    rows = {name: [calls, round(counter.nbytes[name] / GIB, 3)] for name, calls in sorted(counter.calls.items())}
    return {
        "benchmark": "simulate",
        **vars(args),
        "engine": engine,
        "world": world,
        "versions": versions(),
        "units": MODELS[args.model]["num_hidden_layers"] + 2,
        "bytes": values,
        "gib": {name: round(value / GIB, 3) for name, value in values.items()},
        "allocated_per_step_gib": round(memory.allocated / GIB, 1),
        "allocations_per_step": memory.allocations,
        "collectives": {name: row for name, row in rows.items() if "c10d" in name},
        "copies": {n: row for n, row in rows.items() if "c10d" not in n and any(word in n for word in COPIES)},
        "copied_after_gathers_gib": round(counter.copied_after_gathers / GIB, 3),
        "passes_before_reductions": round(counter.written_before_reductions / max(1, counter.reduced), 3),
        "ops_per_step": sum(counter.calls.values()),
        "seconds": round(time.time() - start),
    }


def main():
    args = parse_arguments()
    for world in args.world:
        for engine in args.engine:
            print(json.dumps(report(args, engine, world)), flush=True)


if __name__ == "__main__":
    main()
