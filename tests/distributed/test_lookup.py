"""Units of one embedding, whose backward reads no weights and is therefore not gathered for."""

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.tensor import DTensor
from torch.utils.checkpoint import checkpoint

from tests.support.engines import ENGINE, FSDP2, full_gradients, plain_gradients, shard
from tests.support.guards import assert_same_values
from tests.support.models import my_rows

VOCABULARY, WIDTH = 23, 6


class Model(nn.Module):
    """An embedding that is used in one of several ways, and a layer behind it.

    Args:
        way: How the embedding is used.
    """

    def __init__(self, way: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(VOCABULARY, WIDTH, padding_idx=0, max_norm=0.5 if way == "renormalised" else None)
        self.layer = nn.Linear(WIDTH, VOCABULARY)
        self.way = way
        if way == "hook":
            self.embedding.register_forward_hook(lambda module, args, x: x * module.weight.square().sum())
        if way == "frozen":
            self.embedding.requires_grad_(False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        if self.way.startswith("recomputed"):
            start = torch.zeros(1, requires_grad=True)  # else reentrant checkpoints give no gradients
            x = checkpoint(self.both, tokens, start, use_reentrant=self.way.endswith("reentrant"))
        elif self.way == "twice":
            x = self.embedding(tokens) * self.embedding(tokens.flip(1))
        else:
            x = self.embedding(tokens)
        return self.layer(x.tanh())

    def both(self, tokens: torch.Tensor, start: torch.Tensor) -> torch.Tensor:
        """Look up and compute something of which the backward needs what was looked up."""
        x = self.embedding(tokens)
        return start + x * x.sin()


def loss_of(model: nn.Module, tokens: torch.Tensor) -> torch.Tensor:
    """Return a loss; with a penalty on the gradient, so that the backward is differentiated, if the model says so."""
    logits = model(tokens)
    loss = F.cross_entropy(logits.flatten(0, 1), tokens.flatten())
    if model.way == "penalty":
        (grads,) = torch.autograd.grad(loss, logits, create_graph=True)
        loss = loss + (grads * tokens.numel()).square().sum() / tokens.numel()  # an average over tokens, as the loss
    return loss


def train(model: nn.Module, rows) -> list[dict]:
    """Return the gradients of two steps, the second with two micro-batches in flight at once."""
    grads, tokens = [], torch.arange(32).view(4, 8) % VOCABULARY
    loss_of(model, rows(tokens)).backward()
    grads.append(full_gradients(model) if dist.is_initialized() else plain_gradients(model))
    model.zero_grad()
    first, second = loss_of(model, rows(tokens)), loss_of(model, rows(tokens.flip(0)))
    second.backward()
    first.backward()
    grads.append(full_gradients(model) if dist.is_initialized() else plain_gradients(model))
    model.zero_grad()
    return grads


def check_gradients(way, expected):
    model = Model(way)
    shard(model, units=[model.embedding, model.layer], reshard_after_forward=True)
    for step, grads in enumerate(train(model, lambda tokens: my_rows(tokens, dist.get_rank(), dist.get_world_size()))):
        assert_same_values(grads, expected[step], f"{way}, step {step}", atol=1e-6)
    assert all(isinstance(parameter, DTensor) for parameter in model.parameters()), "nothing stays gathered"


WAYS = ["plain", "recomputed", "recomputed reentrant", "twice", "frozen", "hook", "penalty"]


@pytest.mark.parametrize("way", WAYS)
def test_gradients_equal_one_process_however_the_embedding_is_used(on_ranks, way):
    on_ranks(2, check_gradients, way, train(Model(way), lambda tokens: tokens))


def check_gathers(way):
    model = Model(way)
    shard(model, units=[model.embedding, model.layer], reshard_after_forward=True)
    group = model.embedding._get_fsdp_state().groups[0]
    counts = {"forward": 0, "backward": 0}
    start = group._start_gather

    def counted():
        counts["backward" if torch._C._current_graph_task_id() != -1 else "forward"] += 1
        return start()

    group._start_gather = counted
    loss_of(model, torch.arange(16).view(2, 8)).backward()
    return counts


@pytest.mark.skipif(ENGINE == FSDP2, reason="asks this engine's units")
@pytest.mark.parametrize(("way", "in_backward"), [("plain", 0), ("frozen", 0), ("recomputed", 1), ("hook", 1)])
def test_the_embedding_is_gathered_for_its_backward_only_if_that_may_read_it(on_ranks, way, in_backward):
    assert on_ranks(2, check_gathers, way) == [{"forward": 1, "backward": in_backward}] * 2
