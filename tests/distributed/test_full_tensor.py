"""``full_tensor()`` of a sharded parameter or gradient: a plain tensor on every rank, differentiable."""

import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from tests.support.engines import ENGINE, FSDP2, full_gradients, shard
from tests.support.guards import assert_same_values
from tests.support.models import OddModel, float_batches, my_rows

pytestmark = pytest.mark.skipif(ENGINE == FSDP2, reason="on gloo PyTorch returns asynchronous wrappers and sums")


def check_values():
    rank, world_size = dist.get_rank(), dist.get_world_size()
    for dtype in (torch.float32, torch.bfloat16, torch.float64):
        original = OddModel().to(dtype)
        model = OddModel().to(dtype)
        shard(model, units=list(model.blocks))
        for (name, parameter), expected in zip(model.named_parameters(), original.parameters(), strict=True):
            assert isinstance(parameter, DTensor), f"{name} is not a DTensor"
            value = parameter.full_tensor()
            assert type(value) in (torch.Tensor, torch.nn.Parameter), f"rank {rank}: {name} gave {type(value)}"
            assert value.shape == expected.shape
            assert value.dtype == dtype
            assert torch.equal(value, expected), f"rank {rank} of {world_size}: {name}"
    batch = float_batches(1, width=5)[0]
    model, plain = OddModel(), OddModel()
    shard(model, units=list(model.blocks))
    model(my_rows(batch, rank, world_size)).square().mean().backward()
    plain(batch).square().mean().backward()
    for (name, parameter), expected in zip(model.named_parameters(), plain.parameters(), strict=True):
        gradient = parameter.grad.full_tensor()
        assert type(gradient) is torch.Tensor, f"gradient of {name}"
        torch.testing.assert_close(gradient, expected.grad, atol=1e-6, rtol=0)


@pytest.mark.parametrize("world", [1, 2, 3])
def test_full_tensor_is_plain_and_exact_on_every_rank(on_ranks, world):
    on_ranks(world, check_values)


def check_backward():
    rank, world_size = dist.get_rank(), dist.get_world_size()
    model = OddModel()
    shard(model, units=list(model.blocks))
    expected = {}
    total = torch.zeros(())
    for index, (name, parameter) in enumerate(model.named_parameters()):
        weight = torch.randn(parameter.shape, generator=torch.Generator().manual_seed(index))
        total = total + (parameter.full_tensor() * weight * (rank + 1)).sum()
        expected[name] = weight * sum(range(1, world_size + 1)) / world_size
    total.backward()
    assert_same_values(full_gradients(model), expected, f"rank {rank} of {world_size}", atol=1e-6)


@pytest.mark.parametrize("world", [1, 2, 3])
def test_gradient_through_full_tensor_is_averaged_over_ranks(on_ranks, world):
    on_ranks(world, check_backward)


def detached_copy_is_independent():
    model = OddModel()
    shard(model, units=list(model.blocks))
    parameter = model.shift
    with torch.no_grad():
        value = parameter.full_tensor()
        before = value.clone()
        parameter.mul_(2)
        assert torch.equal(value, before), "a full tensor taken earlier changed"
        assert torch.equal(parameter.full_tensor(), 2 * before)


def test_full_tensor_is_a_copy(on_ranks):
    on_ranks(2, detached_copy_is_independent)
