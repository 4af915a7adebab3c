"""LoRA in a loop of one's own: one unit has frozen and trained parameters, and only the trained ones cost anything."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist

import ya_fsdp
from tests.huggingface.session import accelerated_steps, plain_steps, session
from tests.huggingface.stock_trainers import trainable, with_lora
from tests.support.engines import full_parameters
from tests.support.guards import assert_really_sharded
from tests.support.models import build_model, my_rows, token_batches
from tests.support.recorder import GATHER, REDUCE_SCATTER, CollectiveRecorder
from tests.support.training import causal_loss

OnRanks = Callable[..., list[Any]]
STEPS = 8


def _model(num_layers: int) -> Any:
    return with_lora(build_model("llama", num_hidden_layers=num_layers))


def _optimizer(model: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(trainable(model).values(), lr=0.3, momentum=0.9)


def _trains(num_layers: int) -> int:
    """Train, look at what is held, and return the most bytes that were gathered at once in a backward."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    batches = token_batches(STEPS)
    reference, model = _model(num_layers), _model(num_layers)
    frozen = {name: value.clone() for name, value in model.named_parameters() if not value.requires_grad}
    names = set(trainable(model))
    elements = sum(value.numel() for value in trainable(model).values())
    expected = plain_steps(reference, _optimizer(reference), batches)
    gathered: list[int] = []
    with session() as accelerator:
        model, optimizer = accelerator.prepare(model, _optimizer(model))
        assert set(trainable(model)) == names, "what is frozen stays frozen"
        losses = accelerated_steps(accelerator, model, optimizer, batches[:-1])
        for block in model.get_base_model().model.layers:
            block.mlp.register_full_backward_hook(lambda *_: gathered.append(ya_fsdp.memory_report(model).buffers))
        with CollectiveRecorder() as recorder:
            recorder.phase = "forward"
            loss = causal_loss(model, my_rows(batches[-1], rank, world_size))
            recorder.phase = "backward"
            accelerator.backward(loss)
        assert_really_sharded(model, recorder, "ya_fsdp")
        report = ya_fsdp.memory_report(model, optimizer.optimizer)
        assert {name for name, value in model.named_parameters() if value.grad is not None} == names
        optimizer.step()
        dist.all_reduce(mean := loss.detach().clone())
        losses.append(mean.item() / world_size)
        after = full_parameters(model)
    assert losses == pytest.approx(expected, rel=1e-5)
    for name, value in frozen.items():
        assert torch.equal(after[name], value), f"{name} is frozen and changed"
    padding = num_layers * len(names) * 8 * 4
    assert elements * 4 / world_size <= report.gradients <= elements * 4 / world_size + padding
    assert report.optimizer <= report.gradients + 64, "momentum of the adapters only"
    assert recorder.count(REDUCE_SCATTER) == num_layers, "only blocks have something to reduce"
    reduced = sum(event.num_bytes for event in recorder.of(REDUCE_SCATTER))
    assert elements * 4 <= reduced <= elements * 4 + world_size * padding
    # Two buckets per block, frozen and trained. The head was kept, and no backward reaches the frozen embedding.
    assert recorder.count(GATHER, "forward") == 2 + 2 * num_layers
    assert recorder.count(GATHER, "backward") == 2 * num_layers
    return max(gathered)


def test_a_loop_with_adapters_equals_one_process_and_pays_for_adapters_only(on_ranks: OnRanks) -> None:
    three = on_ranks(2, _trains, 3)
    assert on_ranks(2, _trains, 6) == three, "what is gathered at once does not grow with the number of blocks"
