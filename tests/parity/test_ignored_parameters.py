"""Ignored parameters beside sharded ones, in one optimizer and one clip, train like one process."""

import math

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from tests.support.engines import ENGINE, FSDP2, engine_module, full, full_parameters, mesh_1d
from tests.support.guards import assert_same_on_all_ranks, assert_same_values
from tests.support.models import MlpStack, float_batches, my_rows

pytestmark = pytest.mark.skipif(ENGINE == FSDP2, reason="PyTorch's lists do not mix sharded parameters with plain ones")

OPTIMIZERS = {
    "foreach AdamW": lambda parameters: torch.optim.AdamW(parameters, lr=0.01, foreach=True),
    "fused AdamW": lambda parameters: torch.optim.AdamW(parameters, lr=0.01, fused=True),
    "looping SGD": lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9, foreach=False),
}


class Model(MlpStack):
    """Parameters to ignore in a block and in the root, among others of the same module."""

    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.rand(10) + 0.5)
        self.shift = nn.Parameter(torch.randn(10))

    def ignored(self):
        return [self.scale, self.blocks[1].down.weight, self.blocks[2].up.bias]

    def forward(self, x):
        return super().forward(x * self.scale) + self.shift


def sharded():
    model = Model().double()
    mesh, ignored = mesh_1d(), model.ignored()
    for module in [*model.blocks, model]:
        engine_module().fully_shard(module, mesh=mesh, ignored_params=set(ignored))
    return model, ignored


def check(name, norm_type):
    batches = [batch.double() for batch in float_batches(4)]
    plain = Model().double()
    model, ignored = sharded()
    assert {isinstance(parameter, DTensor) for parameter in ignored} == {False}
    assert sum(isinstance(parameter, DTensor) for parameter in model.parameters()) == 14 - len(ignored)
    optimizers = [OPTIMIZERS[name](each.parameters()) for each in (plain, model)]
    for step, batch in enumerate(batches):
        plain(batch).square().mean().backward()
        model(my_rows(batch, dist.get_rank(), dist.get_world_size())).square().mean().backward()
        for parameter in ignored:  # nobody else reduces these
            dist.all_reduce(parameter.grad)
            parameter.grad.div_(dist.get_world_size())
        norms = [torch.nn.utils.clip_grad_norm_(each.parameters(), 0.5, norm_type) for each in (plain, model)]
        expected, found = full(norms[0]).item(), full(norms[1]).item()
        assert math.isclose(found, expected, rel_tol=1e-9), f"step {step}: norm {found}, expected {expected}"
        assert_same_on_all_ranks(found, f"norm of step {step}")
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        expected = {key: parameter.detach() for key, parameter in plain.named_parameters()}
        assert_same_values(full_parameters(model), expected, f"weights after step {step}", atol=1e-9)


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("norm_type", [2.0, math.inf])
def test_ignored_and_sharded_parameters_share_an_optimizer_and_a_clip(on_ranks, name, norm_type):
    on_ranks(2, check, name, norm_type)


@pytest.mark.parametrize("world", [4])
def test_ignored_parameters_on_four_ranks(on_ranks, world):
    on_ranks(world, check, "looping SGD", 2.0)
