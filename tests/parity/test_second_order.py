"""Gradients of gradients equal one process, whatever the order, the units and the mesh; in fp64 to nine digits."""

from functools import partial

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.utils.checkpoint import checkpoint

from tests.support.autograd import WIDTH, Model, compare, mean_square
from tests.support.engines import ENGINE, FSDP2
from tests.support.models import Mlp

pytestmark = pytest.mark.skipif(ENGINE == FSDP2, reason="PyTorch's engine reads what it has released")

# ---- what is differentiated ----------------------------------------------------------------------------------------


def penalty(model, rows):
    """A loss with the gradient of the output with respect to the input in it."""
    rows = rows.clone().requires_grad_()
    out = model(rows)
    (slope,) = torch.autograd.grad(out.sum(), rows, create_graph=True)
    (mean_square(out) + 0.3 * mean_square(slope)).backward()


def penalty_alone(model, rows):
    rows = rows.clone().requires_grad_()
    (slope,) = torch.autograd.grad(model(rows).square().sum(), rows, create_graph=True)
    mean_square(slope).backward()


def penalty_between_units(model, rows):
    """Units called one by one, and the gradient with respect to what comes between two of them."""
    hidden = torch.tanh(model.first(rows))
    out = hidden
    for block in model.blocks:
        out = block(out)
    (slope,) = torch.autograd.grad(out.square().sum(), hidden, create_graph=True)
    mean_square(slope + model.head(out).sum(-1, keepdim=True)).backward()


def third_order(model, rows):
    rows = rows.clone().requires_grad_()
    (first,) = torch.autograd.grad(model(rows).square().sum(), rows, create_graph=True)
    (second,) = torch.autograd.grad(first.square().sum(), rows, create_graph=True)
    mean_square(second).backward()


def recorded_and_run_twice(model, rows):
    """A backward that is recorded and fills ``.grad`` itself, then another over the same graph."""
    loss = mean_square(model(rows.clone().requires_grad_()))
    loss.backward(create_graph=True)
    for parameter in model.parameters():
        parameter.grad = None if parameter.grad is None else parameter.grad.detach()
    loss.backward()


def several_backwards(model, rows):
    """Three losses over one recorded graph, one after the other."""
    rows = rows.clone().requires_grad_()
    out = model(rows)
    (slope,) = torch.autograd.grad(out.square().sum(), rows, create_graph=True)
    mean_square(slope[:, 0]).backward(retain_graph=True)
    mean_square(slope[:, 1]).backward(retain_graph=True)
    mean_square(out).backward()


def two_forwards(model, rows):
    rows = rows.clone().requires_grad_()
    one, two = model(rows), model(rows * 0.5)
    (slope,) = torch.autograd.grad((one * two).sum(), rows, create_graph=True)
    (mean_square(slope) + mean_square(one)).backward()


def accumulated(model, rows):
    """Twice, of which the first is not reduced."""
    for is_last in (False, True):
        if hasattr(model, "set_requires_gradient_sync"):
            model.set_requires_gradient_sync(is_last)
        penalty(model, rows)


WAYS = [penalty, penalty_alone, third_order, several_backwards, two_forwards, accumulated]


@pytest.mark.parametrize("backward", [*WAYS, penalty_between_units, recorded_and_run_twice])
def test_gradients_of_gradients(on_ranks, backward):
    on_ranks(2, compare, Model, backward)


# ---- units -----------------------------------------------------------------------------------------------------------


class Frozen(Model):
    """Units of two buckets, and one that is frozen whole."""

    def __init__(self):
        super().__init__()
        for block in self.blocks:
            block.up.requires_grad_(False)
        self.blocks[1].requires_grad_(False)


class Rooted(Model):
    """A root with parameters of its own, in use between its units; blocks that run twice."""

    def __init__(self):
        super().__init__()
        self.matrix = nn.Parameter(torch.eye(WIDTH) + 0.1)
        self.scale = nn.Parameter(torch.ones(WIDTH))

    def forward(self, x):
        x = torch.tanh(self.first(x @ self.matrix))
        for block in [*self.blocks, *self.blocks]:
            x = torch.tanh(block(x) * self.scale)
        return self.head(x @ self.matrix)


class Outer(nn.Module):
    """A unit with units inside of it and parameters around them."""

    def __init__(self):
        super().__init__()
        self.inner = nn.ModuleList(Mlp(WIDTH, 14) for _ in range(3))
        self.scale = nn.Parameter(torch.full((WIDTH,), 0.7))

    def forward(self, x):
        x = torch.tanh(x * self.scale)
        for block in self.inner:
            x = block(x)
        return x * self.scale


class Nested(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = Outer(), Outer()

    def units(self):
        return [*self.first.inner, *self.second.inner, self.first, self.second]

    def forward(self, x):
        return self.second(self.first(x))


class Recomputed(Mlp):
    def forward(self, x):
        return checkpoint(super().forward, x, use_reentrant=False)


def all_ways(build, **options):
    for backward in WAYS:
        compare(build, backward, reshard=(None,), **options)


@pytest.mark.parametrize("build", [Frozen, Rooted, Nested])
def test_units_of_several_buckets_with_parameters_around_and_inside(on_ranks, build):
    on_ranks(2, all_ways, build)


def test_recomputed_blocks(on_ranks):
    on_ranks(2, compare, partial(Model, Recomputed), penalty)


def on_meshes():
    for backward in (penalty, several_backwards):
        compare(Rooted, backward, reshard=(None, 2))
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
        compare(Rooted, backward, reshard=(None,), mesh=mesh)


@pytest.mark.parametrize("world", [4])
def test_four_ranks_a_smaller_group_and_replicas(on_ranks, world):
    on_ranks(world, on_meshes)
