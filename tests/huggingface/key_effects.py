"""What one can see of a run under given ``fsdp_*`` settings. Each function is a job of the rank pools."""

import contextlib
import os
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import ya_fsdp
from tests.huggingface.session import session
from tests.support.models import build_model, my_rows, token_batches
from tests.support.recorder import GATHER, REDUCE_SCATTER, CollectiveRecorder
from tests.support.training import causal_loss
from ya_fsdp import RaggedShardDTensor

Variables = dict[str, str]


def _prepared(accelerator: Any, **changes: Any) -> Any:
    # Rank 0's weights are those of seed 0.
    return accelerator.prepare(build_model("llama", seed=dist.get_rank(), **changes))


def _step(accelerator: Any, model: nn.Module, recorder: CollectiveRecorder | None = None) -> None:
    if recorder is not None:
        recorder.phase = "forward"
    loss = causal_loss(model, my_rows(token_batches(1)[0], dist.get_rank(), dist.get_world_size()))
    if recorder is not None:
        recorder.phase = "backward"
    accelerator.backward(loss)


def engine(variables: Variables) -> Any:
    """The plugin that accelerate carries."""
    with _quietly_without_engine(), session(cpu=True, **variables) as accelerator:
        return type(getattr(accelerator.state, "fsdp_plugin", None)).__name__


@contextlib.contextmanager
def _quietly_without_engine() -> Iterator[None]:
    """A session that may switch the engine off must not find accelerate's own FSDP switched on."""
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("ACCELERATE_USE_FSDP", raising=False)
        yield


def reduce_dtype(variables: Variables) -> Any:
    """Dtype in which gradients travel under bf16."""
    with session("bf16", **variables) as accelerator:
        model = _prepared(accelerator)
        with CollectiveRecorder() as recorder:
            _step(accelerator, model)
    (dtype,) = {event.dtype for event in recorder.of(REDUCE_SCATTER)}
    return str(dtype).removeprefix("torch.")


def gathers(variables: Variables) -> Any:
    """Gathers in forward and in backward of the second step; of the five units the backward of one reads no weights."""
    with session(**variables) as accelerator:
        model = _prepared(accelerator)
        _step(accelerator, model)
        with CollectiveRecorder() as recorder:
            _step(accelerator, model, recorder)
    return recorder.count(GATHER, "forward"), recorder.count(GATHER, "backward")


def asked_of_the_engine(variables: Variables) -> Any:
    """How a block is sharded, after a step that works: resharding, where shards live, whether page-locked."""
    from accelerate_plugin import prepare

    asked: list[dict[str, Any]] = []

    def fully_shard(module: Any, **options: Any) -> Any:
        asked.append(options)
        return original(module, **options)

    original = prepare.fully_shard
    with session(**variables) as accelerator, pytest.MonkeyPatch.context() as patch:
        patch.setattr(prepare, "fully_shard", fully_shard)
        model = _prepared(accelerator)
        _step(accelerator, model)
        _step(accelerator, model)
    block = asked[2]
    policy = block["offload_policy"]
    return block["reshard_after_forward"], type(policy).__name__, getattr(policy, "pin_memory", None)


def copies(variables: Variables) -> Any:
    """How many copies of the model the ranks hold together."""
    with session(**variables) as accelerator:
        model = _prepared(accelerator)
        held = torch.tensor(sum(parameter.to_local().numel() for parameter in model.parameters()))
        dist.all_reduce(held)
        return held.item() / sum(parameter.numel() for parameter in model.parameters())


def aligned_to(variables: Variables) -> Any:
    """Largest power of two, up to 256, of which every parameter's start and every piece is a multiple."""
    with session(**variables) as accelerator:
        places = [parameter.placements[0] for parameter in _prepared(accelerator).parameters()]
    return max(2**i for i in range(9) if all(p.start % 2**i == p.shard_numel % 2**i == 0 for p in places))


def units(variables: Variables) -> Any:
    """Number of units with parameters."""
    with session(**variables) as accelerator:
        return ya_fsdp.memory_report(_prepared(accelerator)).num_units


def left_whole(variables: Variables) -> Any:
    """Parameters that are not sharded."""
    with session(**variables) as accelerator:
        model = _prepared(accelerator)
        return sorted(n for n, parameter in model.named_parameters() if not isinstance(parameter, RaggedShardDTensor))


def recomputed(variables: Variables) -> Any:
    """How many of the three blocks run forward twice, and how often their inputs went to host memory."""
    import accelerate_plugin.activation as activation

    runs: Counter[int] = Counter()
    stored: list[bool] = []

    def save_on_cpu(**options: Any) -> Any:
        stored.append(True)
        return original(**options)

    original = activation.save_on_cpu
    with session(**variables) as accelerator, pytest.MonkeyPatch.context() as patch:
        patch.setattr(activation, "save_on_cpu", save_on_cpu)
        model = _prepared(accelerator)
        for index, block in enumerate(model.model.layers):
            block.mlp.register_forward_pre_hook(lambda module, args, i=index: runs.update([i]))
        _step(accelerator, model)
    return sum(count == 2 for count in runs.values()), len(stored)


def gathered_ahead(variables: Variables) -> Any:
    """Units whose gather has begun when the first block computes: in the first forward, and in its backward.

    In backward the first to compute is the last of three blocks, behind the head.
    """
    seen = []
    with session(**variables) as accelerator:
        model = _prepared(accelerator)
        first, last = model.model.layers[0].mlp, model.model.layers[-1].mlp
        with CollectiveRecorder() as recorder:
            first.register_forward_pre_hook(lambda *_: seen.append(recorder.count(GATHER, "forward")))
            last.register_full_backward_hook(lambda *_: seen.append(recorder.count(GATHER, "backward")))
            _step(accelerator, model, recorder)
    return tuple(seen)


def buffers(variables: Variables) -> Any:
    """Whether the gathered bytes of a model of six blocks are those of one of three, when each block computes."""
    peaks = []
    for num_layers in (3, 6):
        with session(**variables) as accelerator:
            model = _prepared(accelerator, num_hidden_layers=num_layers)
            seen: list[int] = []
            for block in model.model.layers:
                block.register_forward_hook(lambda *_, m=model, s=seen: s.append(ya_fsdp.memory_report(m).buffers))
                block.mlp.register_full_backward_hook(
                    lambda *_, m=model, s=seen: s.append(ya_fsdp.memory_report(m).buffers)
                )
            _step(accelerator, model)
            _step(accelerator, model)
            peaks.append(max(seen))
    return peaks[0] == peaks[1]


def start(variables: Variables) -> Any:
    """What rank 1 starts from: rank 0's weights, or its own."""
    with session(**variables) as accelerator:
        parameter = _prepared(accelerator).get_input_embeddings().weight
    answer = ["neither"]
    for name, seed in (("rank 0", 0), ("its own", dist.get_rank())):
        plain: Any = build_model("llama", seed=seed)
        whole = plain.get_input_embeddings().weight.detach()
        cut = RaggedShardDTensor.from_full(whole, parameter.device_mesh, parameter.placements)
        if torch.equal(cut.to_local(), parameter.to_local()):
            answer = [name]
            break
    dist.broadcast_object_list(answer, src=1)
    return answer[0]


def read_by(variables: Variables, folder: str) -> Any:
    """Which ranks hold the weights after a pretrained model was loaded."""
    from transformers import AutoModelForCausalLM

    with session(**variables):
        model = AutoModelForCausalLM.from_pretrained(folder)
    held = sum(parameter.untyped_storage().nbytes() for parameter in model.parameters())
    everyone: list[int] = [0] * dist.get_world_size()
    dist.all_gather_object(everyone, held)
    return [rank for rank, num_bytes in enumerate(everyone) if num_bytes > 1000]


def checkpoint_files(variables: Variables, folder: str) -> Any:
    """What ``save_state`` writes for the model."""
    with session(**variables) as accelerator:
        _prepared(accelerator)
        accelerator.save_state(f"{folder}/state")
    names = sorted(path.name for path in Path(f"{folder}/state").iterdir() if "model" in path.name)
    inside = [name for name in names if os.path.isdir(f"{folder}/state/{name}")]
    return names[0], sorted(
        {os.path.splitext(file)[1] for name in inside for file in os.listdir(f"{folder}/state/{name}")}
    )
