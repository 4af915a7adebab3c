"""Parameters that get a gradient on some ranks only, or on none."""

import torch
import torch.distributed as dist
from torch import nn

from tests.support.engines import full_gradients, shard
from tests.support.guards import assert_same_values
from tests.support.models import float_batches, my_rows


class Branches(nn.Module):
    """``always`` runs everywhere, ``left`` or ``right`` by choice, ``never`` nowhere."""

    def __init__(self, width):
        super().__init__()
        self.always = nn.Linear(width, width)
        self.left = nn.Linear(width, width)
        self.right = nn.Linear(width, width)
        self.never = nn.Linear(width, width)

    def forward(self, x, choice):
        branch = {"left": self.left, "right": self.right}.get(choice)
        hidden = torch.tanh(self.always(x))
        return x + (hidden if branch is None else branch(hidden))


class Chooser(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(Branches(10) for _ in range(3))

    def forward(self, x, choices):
        for block, choice in zip(self.blocks, choices, strict=True):
            x = block(x, choice)
        return x


def mean_gradients(batches, choices_by_rank):
    """One process: gradients summed over batches, averaged over ranks; None where no rank has any."""
    model = Chooser()
    world_size = len(choices_by_rank)
    for batch in batches:
        for rank, choices in enumerate(choices_by_rank):
            (model(my_rows(batch, rank, world_size), choices).square().mean() / world_size).backward()
    return {name: parameter.grad for name, parameter in model.named_parameters()}


def sharded_chooser():
    model = Chooser()
    return shard(model, units=list(model.blocks))


def backward(model, batch, choices_by_rank):
    rank = dist.get_rank()
    model(my_rows(batch, rank, dist.get_world_size()), choices_by_rank[rank]).square().mean().backward()


def check_disagreement():
    batches = float_batches(3)
    model = sharded_chooser()
    all_left, all_right, nothing = ["left"] * 3, ["right"] * 3, [None] * 3
    for step, choices_by_rank in enumerate(
        [
            [all_left, all_right],  # a gradient on one rank only
            [["left", "right", "left"], ["left", None, "right"]],  # units differ
            [all_left, all_left],  # agreement: right has no gradient at all, though the step before left bytes
            [nothing, all_right],
            [nothing, nothing],
        ]
    ):
        expected = mean_gradients(batches[:1], choices_by_rank)
        backward(model, batches[0], choices_by_rank)
        found = full_gradients(model)
        assert_same_values(found, expected, f"step {step}, rank {dist.get_rank()}", atol=1e-6)
        assert all(found[f"blocks.{i}.never.weight"] is None for i in range(3))
        model.zero_grad()


def test_reduce_zeroes_missing_gradients_when_ranks_disagree(on_ranks):
    on_ranks(2, check_disagreement)


def check_accumulation(communicate_each):
    batches = float_batches(2)
    choices_by_rank = [["left", "right", None], ["left", "left", "right"]]
    others = [["right", "right", None], [None, "left", None]]
    first, second = mean_gradients(batches[:1], choices_by_rank), mean_gradients(batches[1:], others)
    expected = {
        name: one if two is None else two if one is None else one + two
        for (name, one), two in zip(first.items(), second.values(), strict=True)
    }
    model = sharded_chooser()
    model.set_requires_gradient_sync(communicate_each)
    backward(model, batches[0], choices_by_rank)
    model.set_requires_gradient_sync(True)
    backward(model, batches[1], others)
    what = f"communicate_each={communicate_each}, rank {dist.get_rank()}"
    assert_same_values(full_gradients(model), expected, what, atol=1e-6)


def test_a_gradient_of_an_earlier_micro_batch_is_kept(on_ranks):
    for communicate_each in (True, False):
        on_ranks(2, check_accumulation, communicate_each)


def check_optimizer_skips():
    model = sharded_chooser()
    before = {name: p.full_tensor().clone() for name, p in model.named_parameters()}
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, weight_decay=0.5)
    backward(model, float_batches(1)[0], [["left"] * 3, ["left"] * 3])
    optimizer.step()
    for name, parameter in model.named_parameters():
        used = "left" in name or "always" in name
        moved = not torch.equal(parameter.full_tensor(), before[name])
        assert moved == used, f"rank {dist.get_rank()}: {name} {'moved' if moved else 'did not move'}"


def test_a_parameter_without_gradient_is_not_decayed(on_ranks):
    on_ranks(2, check_optimizer_skips)
