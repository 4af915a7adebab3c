"""Gathered parameters are released as soon as they are not needed, and a deleted model leaves nothing behind."""

import gc
import time
import weakref

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from tests.support.engines import ENGINE, FSDP2, full_gradients, shard
from tests.support.guards import assert_same_values
from tests.support.memory import PeakBytes, live_tensor_bytes
from tests.support.models import Mlp, MlpStack, build_model, float_batches, my_rows, token_batches
from tests.support.training import adamw, causal_loss


class SideBranch(nn.Module):
    """``side`` takes the model's own input, runs last, and so is the first whose gradients are complete.

    It is of another class than the blocks, so that no block can push it out of a shared buffer.
    """

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.first = Mlp(10, 14)
        self.second = Mlp(10, 14)
        self.side = nn.Sequential(nn.Linear(10, 14), nn.Tanh(), nn.Linear(14, 10))

    def forward(self, x):
        hidden = self.second(self.first(x))
        return hidden + self.side(x)


def check_side():
    batch = float_batches(1)[0]
    plain = SideBranch()
    plain(batch).square().mean().backward()
    expected = {name: parameter.grad for name, parameter in plain.named_parameters()}
    model = SideBranch()
    shard(model, units=[model.first, model.second, model.side])
    seen = {}

    def look(_):
        seen["sharded"] = isinstance(model.side[0].weight, DTensor)

    model.first.up.register_forward_hook(lambda module, args, output: output.register_hook(look) and None)
    for step in range(2):
        seen.clear()
        model(my_rows(batch, dist.get_rank(), dist.get_world_size())).square().mean().backward()
        assert seen == {"sharded": True}, (
            f"step {step}: the side branch was still gathered when the first unit's turn came"
        )
        assert_same_values(full_gradients(model), expected, f"step {step}", atol=1e-6)
        model.zero_grad()


@pytest.mark.skipif(ENGINE == FSDP2, reason="PyTorch's engine releases such a unit at the end of the backward")
def test_a_unit_whose_inputs_need_no_gradient_is_released_when_its_gradients_are_complete(on_ranks):
    on_ranks(2, check_side)


def check_order():
    """In forward and backward, at most the running unit and its neighbours are gathered."""
    model = MlpStack(num_blocks=6)
    shard(model, units=list(model.blocks), reshard_after_forward=True)
    counts = []

    def count(*_):
        gathered = [index for index, block in enumerate(model.blocks) if not isinstance(block.up.weight, DTensor)]
        counts.append(gathered)

    for block in model.blocks:
        block.up.register_forward_hook(count)
        block.up.register_forward_hook(lambda module, args, output: output.register_hook(count) and None)
    batch = float_batches(1)[0]
    for _ in range(2):
        model(batch).square().mean().backward()
    assert len(counts) == 24
    assert max(map(len, counts)) <= 2, f"gathered at the same time: {counts}"
    assert all(isinstance(parameter, DTensor) for parameter in model.parameters())


def test_few_units_are_gathered_at_a_time(on_ranks):
    on_ranks(2, check_order)


def train_and_delete(backward):
    model = shard(build_model("llama"))
    optimizer = adamw(model.parameters())
    for tokens in token_batches(2):
        loss = causal_loss(model, my_rows(tokens, dist.get_rank(), dist.get_world_size()))
        if backward:
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
    watched = [model, model.model.layers[1], *model.parameters()]
    return [weakref.ref(thing) for thing in watched]


def check_deleted():
    train_and_delete(backward=True)  # what is built once per process is built now
    before = live_tensor_bytes()
    for backward in (True, False):
        references = train_and_delete(backward)
        gc.collect()
        alive = [reference() for reference in references if reference() is not None]
        assert not alive, f"rank {dist.get_rank()}: still alive: {[type(thing).__name__ for thing in alive]}"
        after = live_tensor_bytes()
        assert after <= before + 1024, f"rank {dist.get_rank()}: {after - before} bytes more than before"


def test_deleting_the_model_frees_its_memory(on_ranks):
    on_ranks(2, check_deleted)


def settled(memory):
    """Bytes left; gloo's own thread may hold the memory of its last collective for a moment longer."""
    deadline = time.monotonic() + 5
    while (left := memory.current()) > 1024 and time.monotonic() < deadline:
        time.sleep(0.02)
    return left


def count_references():
    """Reference counts alone free a model: the engine adds no cycle that would wait for the garbage collector."""
    batch = float_batches(1)[0]
    for way in ("backward", "forward", "recorded backward"):
        gc.collect()
        gc.disable()
        try:
            with PeakBytes() as memory:
                model = MlpStack()
                shard(model, units=list(model.blocks))
                for _ in range(2):
                    rows = batch.clone().requires_grad_()
                    loss = model(rows).square().mean()
                    if way == "recorded backward":
                        loss = torch.autograd.grad(loss, rows, create_graph=True)[0].square().sum()
                    if way != "forward":
                        loss.backward()
                references = [weakref.ref(thing) for thing in (model, model.blocks[1], *model.parameters())]
                assert memory.current() > 0
                del model, loss, rows
                left = settled(memory)
            assert left <= 1024, f"rank {dist.get_rank()}, {way}: {left} bytes are still alive"
            alive = [type(thing).__name__ for reference in references if (thing := reference()) is not None]
            assert not alive, f"rank {dist.get_rank()}, {way}: still alive: {alive}"
        finally:
            gc.enable()


@pytest.mark.skipif(ENGINE == FSDP2, reason="PyTorch's engine leaves cycles to the collector")
def test_a_deleted_model_leaves_no_cycle_behind(on_ranks):
    on_ranks(2, count_references)
