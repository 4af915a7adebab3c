"""Outputs and modules that a loss leaves out, and whatever containers units pass on, train like one process."""

from collections import namedtuple

import pytest
import torch
import torch.distributed as dist
from torch import nn

from tests.support.engines import full_parameters, shard
from tests.support.guards import assert_same_values
from tests.support.models import float_batches, my_rows

WIDTH = 10
STEPS = 6
Pair = namedtuple("Pair", "x other")


class Two(nn.Module):
    """Two layers side by side, of which a loss may use one."""

    def __init__(self, use_second):
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(WIDTH, WIDTH)
        self.second = nn.Linear(WIDTH, WIDTH)
        self.use_second = use_second

    def forward(self, x):
        first, second = torch.tanh(self.first(x)), torch.tanh(self.second(x))
        return (first, second) if self.use_second else first


def train(build, units, loss_of, option):
    """Compare weights after each step of Adam; gradients are zeroed in turn to None and in place."""
    plain, model = build(), build()
    shard(model, units=units(model), reshard_after_forward=option)
    optimizers = [torch.optim.Adam(each.parameters(), lr=0.01) for each in (plain, model)]
    for step, batch in enumerate(float_batches(STEPS)):
        rows = my_rows(batch, dist.get_rank(), dist.get_world_size())
        loss_of(plain(batch), step).backward()
        loss_of(model(rows), step).backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad(set_to_none=step % 2 == 1)
        what = f"weights after step {step}, reshard_after_forward={option}"
        expected = {name: parameter.detach() for name, parameter in plain.named_parameters()}
        assert_same_values(full_parameters(model), expected, what, atol=1e-5)


def mean_square(tensor):
    return tensor.square().mean()


def loss_of_outputs(outputs, step):
    """Both outputs at first, later the first one alone."""
    first, second = outputs
    return mean_square(first * second) if step < 3 else mean_square(first)


def loss_of_one(output, step):
    return mean_square(output)


def options():
    return (True, False, 2) if dist.get_world_size() == 4 else (True, False, None)


def unused_outputs():
    for option in options():
        train(lambda: Two(use_second=True), lambda model: [model.first], loss_of_outputs, option)


def unused_modules():
    for option in options():
        train(lambda: Two(use_second=False), lambda model: [model.first, model.second], loss_of_one, option)


@pytest.mark.parametrize("world", [2, 4])
@pytest.mark.parametrize("job", [unused_outputs, unused_modules])
def test_what_the_loss_does_not_use_gets_no_gradient_and_harms_nothing(on_ranks, world, job):
    on_ranks(world, job)


class Wrap(nn.Module):
    def __init__(self, kind):
        super().__init__()
        self.kind = kind

    def forward(self, x):
        return {list: lambda: [x], tuple: lambda: (x,), dict: lambda: {"x": x}, Pair: lambda: Pair(x, x * 0)}[
            self.kind
        ]()


class Unwrap(nn.Module):
    def forward(self, value):
        return value["x"] if isinstance(value, dict) else value[0]


class Layer(nn.Module):
    """Takes a container and returns one of the same kind."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, value):
        if isinstance(value, dict):
            return {"x": torch.tanh(self.linear(value["x"]))}
        out = torch.tanh(self.linear(value[0]))
        return value._replace(x=out) if isinstance(value, Pair) else type(value)([out])


class Wrapped(nn.Sequential):
    def __init__(self, kind):
        torch.manual_seed(0)
        super().__init__(Wrap(kind), Layer(), Layer(), Layer(), Unwrap())


def containers():
    for kind in (list, tuple, dict, Pair):
        train(lambda kind=kind: Wrapped(kind), list, loss_of_one, None)


def test_units_may_pass_on_containers(on_ranks):
    on_ranks(2, containers)
