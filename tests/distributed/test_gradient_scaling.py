"""Gradient divide factors, also below one, and reductions by sum only."""

import pytest
import torch
import torch.distributed as dist

from tests.support.engines import full_gradients, shard
from tests.support.guards import assert_same_values
from tests.support.models import MlpStack, Weights, float_batches, my_rows


def sum_of_gradients(batch, dtype=torch.float32):
    """Return the gradients of all ranks, added up in one process."""
    model = MlpStack()
    world_size = dist.get_world_size()
    for rank in range(world_size):
        model(my_rows(batch, rank, world_size)).square().mean().backward()
    return {name: parameter.grad for name, parameter in model.named_parameters()}


def check_factors(options):
    batch = float_batches(1)[0]
    total = sum_of_gradients(batch)
    for factor in (0.25, 0.5, 1.0, 3.0, 8.0, None):
        model = MlpStack()
        shard(model, units=list(model.blocks), **options)
        for module in [model, *model.blocks]:
            if factor is not None:
                module.set_gradient_divide_factor(factor)
        model(my_rows(batch, dist.get_rank(), dist.get_world_size())).square().mean().backward()
        divide_by = dist.get_world_size() if factor is None else factor
        expected = {name: gradient / divide_by for name, gradient in total.items()}
        assert_same_values(full_gradients(model), expected, f"factor {factor}", atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("world", [1, 2, 3])
def test_divide_factor_is_honoured(on_ranks, world):
    on_ranks(world, check_factors, {})


def check_force_sum():
    batch = float_batches(1)[0]
    total = sum_of_gradients(batch)
    for factor in (None, 0.5):
        model = MlpStack()
        shard(model, units=list(model.blocks))
        for module in [model, *model.blocks]:
            module.set_force_sum_reduction_for_comms(True)
            if factor is not None:
                module.set_gradient_divide_factor(factor)
        model(my_rows(batch, dist.get_rank(), dist.get_world_size())).square().mean().backward()
        divide_by = dist.get_world_size() if factor is None else factor
        expected = {name: gradient / divide_by for name, gradient in total.items()}
        assert_same_values(full_gradients(model), expected, f"sum only, factor {factor}", atol=1e-6, rtol=1e-5)


def test_sum_only_reduction_gives_the_same_gradients(on_ranks):
    on_ranks(2, check_force_sum)


def reduce_in_16_bits(dtype):
    # Small integers: exact in 16 bits, whatever the order of scaling and adding.
    values = torch.arange(11.0) + dist.get_rank()
    total = sum(torch.arange(11.0) + rank for rank in range(dist.get_world_size()))
    for factor in (0.5, 1.0, 4.0):
        model = shard(Weights(), units=[], mp={"param_dtype": dtype, "reduce_dtype": dtype})
        model.set_gradient_divide_factor(factor)
        model(values).backward()
        assert_same_values(full_gradients(model), {"weight": total / factor}, f"factor {factor} in {dtype}")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_divide_factor_is_honoured_in_16_bits(on_ranks, dtype):
    on_ranks(2, reduce_in_16_bits, dtype)


def overflow():
    """Halves of the largest fp16 number: adding before dividing would overflow."""
    model = shard(Weights(), units=[], mp={"param_dtype": torch.float16, "reduce_dtype": torch.float16})
    model(torch.full((11,), 60000.0)).backward()
    gradient = full_gradients(model)["weight"]
    assert torch.equal(gradient, torch.full((11,), 60000.0).half().float()), gradient


def test_fp16_average_does_not_overflow_on_the_way(on_ranks):
    on_ranks(2, overflow)
