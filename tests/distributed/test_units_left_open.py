"""Units of several modules of which some never run: a loss that reads the head's weight instead of calling the head."""

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from tests.support.engines import full_gradients, plain_gradients, shard
from tests.support.guards import assert_really_sharded, assert_same_values
from tests.support.models import Mlp, my_rows
from tests.support.recorder import GATHER, CollectiveRecorder
from tests.support.training import mean_over_ranks, sgd

WIDTH, VOCABULARY = 10, 23


class Reader(nn.Module):
    """A small language model whose loss is computed from the weight of the head, inside or outside of its forward."""

    def __init__(self, *, tied: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.spare = nn.Embedding(VOCABULARY, WIDTH)  # shares the weight, and never runs
        self.blocks = nn.ModuleList(Mlp(WIDTH, 14) for _ in range(3))
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.tied = tied
        if tied:
            self.head.weight = self.embed.weight
        self.spare.weight = self.head.weight
        self.calls_head = False

    def units(self):
        """Units as users wrap them: modules that share the weight are in one."""
        ends = [self.norm, self.head, self.spare]
        return [*self.blocks, [self.embed, *ends]] if self.tied else [self.embed, *self.blocks, ends]

    def hidden(self, tokens: torch.Tensor) -> torch.Tensor:
        """Everything but the head."""
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return self.norm(x)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Loss of predicting the tokens themselves."""
        hidden = self.hidden(tokens)
        if self.calls_head:
            return cross_entropy(self.head(hidden), tokens)
        return chunked(hidden, self.head.weight, tokens)


def cross_entropy(logits: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    return nn.functional.cross_entropy(logits.flatten(0, 1), tokens.flatten())


def chunked(hidden: torch.Tensor, weight: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    """The loss in two pieces."""
    pieces = zip(hidden.chunk(2, dim=1), tokens.chunk(2, dim=1), strict=True)
    return sum(cross_entropy(states @ weight.T, targets) for states, targets in pieces) / 2


def tokens_of(step: int) -> torch.Tensor:
    return torch.randint(0, VOCABULARY, (4, 6), generator=torch.Generator().manual_seed(step))


def train(tied, reshard_after_forward):
    rank, world_size = dist.get_rank(), dist.get_world_size()
    reference = Reader(tied=tied)
    model = Reader(tied=tied)
    shard(model, units=model.units(), reshard_after_forward=reshard_after_forward)
    optimizers = [sgd(reference.parameters()), sgd(model.parameters())]
    for step in range(4):
        reference.calls_head = model.calls_head = step == 2
        expected = reference(tokens_of(step))
        expected.backward()
        with CollectiveRecorder() as recorder:
            loss = model(my_rows(tokens_of(step), rank, world_size))
            recorder.phase = "backward"
            loss.backward()
        assert_really_sharded(model, recorder, "ya_fsdp")
        assert recorder.count(GATHER, "") == (4 if tied else 5), "one gather per unit in forward"
        assert abs(mean_over_ranks(loss) - expected.item()) < 1e-6, f"loss of step {step}"
        assert_same_values(full_gradients(model), plain_gradients(reference), f"gradients of step {step}", atol=1e-6)
        with torch.no_grad():
            torch.testing.assert_close(model(tokens_of(step)), reference(tokens_of(step)), atol=1e-6, rtol=0)
        assert all(isinstance(parameter, DTensor) for parameter in model.parameters()), "held after evaluation"
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("reshard_after_forward", [True, False])
def test_a_loss_may_read_the_weight_of_a_head_that_is_never_called(on_ranks, tied, reshard_after_forward):
    on_ranks(2, train, tied, reshard_after_forward)


def forwards_in_between(tied, reshard_after_forward):
    rank, world_size = dist.get_rank(), dist.get_world_size()
    reference = Reader(tied=tied)
    model = Reader(tied=tied)
    shard(model, units=model.units(), reshard_after_forward=reshard_after_forward)
    for step in range(2):
        expected = reference(tokens_of(step)) + reference(tokens_of(step + 5)).square()
        expected.backward()
        first = model(my_rows(tokens_of(step), rank, world_size))
        with torch.no_grad():  # gives back what the first forward kept
            model(tokens_of(9))
        for loss in (first, model(my_rows(tokens_of(step + 5), rank, world_size))):
            with torch.no_grad():
                model(tokens_of(9))
            mean = mean_over_ranks(loss)
            # The derivative of the square at the mean over ranks, as the reference has it.
            (loss if loss is first else loss * (2 * mean)).backward()
        assert_same_values(full_gradients(model), plain_gradients(reference), f"gradients of step {step}", atol=1e-6)
        for one in (reference, model):
            sgd(one.parameters()).step()
            one.zero_grad()


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("reshard_after_forward", [True, False])
def test_another_forward_may_come_before_the_backward(on_ranks, tied, reshard_after_forward):
    on_ranks(2, forwards_in_between, tied, reshard_after_forward)


def call_parts_by_hand(tied):
    rank, world_size = dist.get_rank(), dist.get_world_size()
    reference = Reader(tied=tied)
    model = Reader(tied=tied)
    shard(model, units=model.units(), reshard_after_forward=False)
    for step in range(3):
        expected = chunked(reference.hidden(tokens_of(step)), reference.head.weight, tokens_of(step))
        expected.backward()
        mine = my_rows(tokens_of(step), rank, world_size)
        loss = chunked(model.hidden(mine), model.head.weight, mine)
        loss.backward()
        assert abs(mean_over_ranks(loss) - expected.item()) < 1e-6, f"loss of step {step}"
        assert_same_values(full_gradients(model), plain_gradients(reference), f"gradients of step {step}", atol=1e-6)
        for one in (reference, model):
            sgd(one.parameters()).step()
            one.zero_grad()


@pytest.mark.parametrize("tied", [False, True])
def test_modules_may_be_called_one_by_one_without_the_root(on_ranks, tied):
    on_ranks(2, call_parts_by_hand, tied)
