"""Parameters that are frozen and thawed while a backward is pending, as adapters are for a reference's forward."""

import pytest
import torch
import torch.distributed as dist

from tests.support.engines import full_gradients, plain_gradients, shard
from tests.support.guards import assert_same_values
from tests.support.models import MlpStack, float_batches, my_rows


def switch(module, way, trained):
    """Freeze or thaw a module's parameters."""
    if way == "module":
        module.requires_grad_(trained)
        return
    for parameter in module.parameters():
        if way == "method":
            parameter.requires_grad_(trained)
        else:
            parameter.requires_grad = trained


def run(model, way, rows, gradients):
    """Return gradients: frozen for a reference in between, frozen for good behind a forward, frozen, thawed again."""
    batches, found, block = float_batches(4), [], model.blocks[1]

    def backward(loss):
        loss.backward()
        found.append(gradients(model))
        model.zero_grad()

    loss = model(rows(batches[0])).square().mean()
    switch(block, way, False)
    with torch.no_grad():
        reference = model(rows(batches[1]))
    switch(block, way, True)
    backward(loss + (model(rows(batches[1])) - reference).square().mean())
    loss = model(rows(batches[2])).square().mean()
    switch(block, way, False)
    backward(loss)
    backward(model(rows(batches[3])).square().mean())
    switch(block, way, True)
    backward(model(rows(batches[3])).square().mean())
    return found


def compare(way):
    expected = run(MlpStack(num_blocks=3), way, lambda batch: batch, plain_gradients)
    assert [grads["blocks.1.up.weight"] is None for grads in expected] == [False, True, True, False]
    model = MlpStack(num_blocks=3)
    shard(model, units=list(model.blocks), reshard_after_forward=True)
    rank, world_size = dist.get_rank(), dist.get_world_size()
    found = run(model, way, lambda batch: my_rows(batch, rank, world_size), full_gradients)
    for step, (grads, expected_grads) in enumerate(zip(found, expected, strict=True)):
        assert_same_values(grads, expected_grads, f"{way}, step {step}", atol=1e-6)


@pytest.mark.parametrize("way", ["attribute", "method", "module"])
def test_what_is_trained_may_change_between_a_forward_and_its_backward(on_ranks, way):
    on_ranks(2, compare, way)
