"""The debug switch: released buffers are NaN, transitions are checked, and numbers stay the same."""

import pytest
import torch
import torch.distributed as dist
from torch import nn

from tests.support.engines import shard
from tests.support.models import MlpStack, build_model, float_batches, my_rows, token_batches
from tests.support.training import adamw, causal_loss
from ya_fsdp import fully_shard, set_debug
from ya_fsdp._common import TrainingState


class KeepsItsWeight(nn.Module):
    """A module that holds on to its gathered weight: what it reads later is not its own any more."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.kept: torch.Tensor | None = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.kept = self.linear.weight.detach()
        assert not self.kept.isnan().any()
        return self.linear(x)


def read_what_was_released(num_blocks: int) -> None:
    """Few blocks have buffers of their own, many share them."""
    set_debug(True)
    try:
        model = nn.Sequential(*[KeepsItsWeight() for _ in range(num_blocks)])
        for block in model:
            fully_shard(block, reshard_after_forward=True)
        fully_shard(model)
        loss = model(torch.ones(2, 8)).sum()
        last = model[-1].kept
        assert last.isnan().all(), "released after the forward"
        loss.backward()
        assert all(block.kept.isnan().all() for block in model), "released after the backward"
        gradients = [parameter.grad.full_tensor() for parameter in model.parameters()]
        assert not any(gradient.isnan().any() for gradient in gradients)
    finally:
        set_debug(False)


@pytest.mark.parametrize("num_blocks", [2, 5])
def test_released_parameters_read_as_nan(on_ranks, num_blocks):
    on_ranks(2, read_what_was_released, num_blocks)


def losses(name: str, debug: bool) -> list[float]:
    set_debug(debug)
    try:
        model = shard(build_model(name))
        optimizer, found = adamw(model.parameters()), []
        for batch in token_batches(4):
            rows = my_rows(batch, dist.get_rank(), dist.get_world_size())
            loss = causal_loss(model, rows) + causal_loss(model, rows.flip(0))
            loss.backward()
            with torch.no_grad():
                causal_loss(model, rows)
            found.append(loss.item())
            optimizer.step()
            optimizer.zero_grad()
        return found
    finally:
        set_debug(False)


def compare(name: str) -> None:
    assert losses(name, True) == losses(name, False)


@pytest.mark.parametrize("name", ["llama", "gpt2", "qwen2"])
def test_numbers_are_the_same_with_the_switch(on_ranks, name):
    on_ranks(2, compare, name)


def move_wrongly() -> None:
    model = MlpStack()
    shard(model, units=list(model.blocks))
    model(float_batches(1)[0])
    phase = model.blocks[1]._get_fsdp_state().phase
    phase.move_to(TrainingState.FORWARD)
    set_debug(True)
    try:
        with pytest.raises(
            AssertionError, match=r"blocks\.1 went from FORWARD to POST_BACKWARD; from there it can only"
        ):
            phase.move_to(TrainingState.POST_BACKWARD)
    finally:
        set_debug(False)


def test_a_transition_that_cannot_be_is_named(on_ranks):
    on_ranks(2, move_wrongly)
