"""Ranks that run different units are told which, soon, instead of hanging or training on mixed-up weights."""

import time

import pytest
import torch
import torch.distributed as dist
from torch import nn

from tests.support.pool import JobFailedError
from ya_fsdp import fully_shard

LIMIT_SECONDS = 45.0


class Layers(nn.Module):
    """Equal layers, run in the order that is asked for."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(4))

    def forward(self, x: torch.Tensor, order: list[int]) -> torch.Tensor:
        for index in order:
            x = torch.tanh(self.layers[index](x))
        return x


ALL = [0, 1, 2, 3]


def sharded() -> Layers:
    model = Layers()
    for layer in model.layers:
        fully_shard(layer)
    return fully_shard(model)


def step(model: nn.Module, order: list[int]) -> torch.Tensor:
    x = torch.arange(16.0).view(2, 8) / 16
    loss = model(x, order).square().mean()
    loss.backward()
    model.zero_grad()
    return loss.detach()


def run_differently(orders: list[list[int]], checkpointed: bool, num_steps: int) -> None:
    model = sharded()
    if checkpointed:
        from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

        for index, layer in enumerate(model.layers):
            model.layers[index] = checkpoint_wrapper(layer)
    for _ in range(num_steps):
        step(model, ALL)
    step(model, orders[dist.get_rank()])


@pytest.mark.parametrize(
    ("orders", "checkpointed", "message"),
    [
        ([[0, 2, 3], ALL], False, r"number 2 of this forward is layers\.2 on rank 0 but layers\.1 on rank\(s\) 1"),
        ([ALL, [0, 1]], True, r"number 3 of this forward is \(the end of the forward\) on rank 1 but .*on rank\(s\) 0"),
        ([[0, 2, 1, 3], ALL], False, r"number 2 of this forward is layers\.2 on rank 0 but layers\.1 on rank\(s\) 1"),
    ],
    ids=["skipped", "ended-early", "swapped"],
)
def test_a_rank_that_leaves_the_order_names_the_unit_and_the_ranks(on_ranks, orders, checkpointed, message):
    started = time.monotonic()
    with pytest.raises(JobFailedError, match=message):
        on_ranks(2, run_differently, orders, checkpointed, 2, limit=LIMIT_SECONDS)
    assert time.monotonic() - started < LIMIT_SECONDS


def test_ranks_that_differ_in_the_first_forward_are_told_so(on_ranks):
    with pytest.raises(
        JobFailedError, match=r"number 2 of this forward is layers\.\d on rank \d but layers\.\d on rank"
    ):
        on_ranks(2, run_differently, [[0, 2, 1, 3], ALL], False, 0, limit=LIMIT_SECONDS)


def change_together() -> None:
    """All ranks change the order; one of them comes late, which is no reason to doubt it."""
    plain, model = Layers(), sharded()
    for number, order in enumerate([ALL, ALL, [0, 2], [0, 2], [3, 2, 1, 0, 1], ALL, ALL]):
        if number == 4 and dist.get_rank() == 1:
            time.sleep(5)
        torch.testing.assert_close(step(model, order), step(plain, order))
    with torch.no_grad():
        torch.testing.assert_close(model(torch.ones(1, 8), [2]), plain(torch.ones(1, 8), [2]))


def run_alone() -> None:
    """Gathered units may run on one rank alone, and do not count."""
    plain, model = Layers(), sharded()
    step(model, ALL)
    for module in (model, *model.layers):
        module.unshard()
    if dist.get_rank() == 0:
        with torch.no_grad():
            torch.testing.assert_close(model(torch.ones(1, 8), [3, 1]), plain(torch.ones(1, 8), [3, 1]))
    for module in (model, *model.layers):
        module.reshard()
    dist.barrier()
    for order in (ALL, [2, 1], ALL):
        torch.testing.assert_close(step(model, order), step(plain, order))


def test_one_rank_may_run_gathered_units_alone(on_ranks):
    on_ranks(2, run_alone)


def test_a_change_on_all_ranks_is_followed_whoever_comes_late(on_ranks):
    on_ranks(2, change_together)
