"""Dtypes of what goes in and comes out: containers, dataclasses, and parts with a policy of their own."""

from dataclasses import dataclass

import pytest
import torch
import torch.distributed as dist
from torch import nn

from tests.support.engines import ENGINE, FSDP2, engine_module, full_parameters, mesh_1d
from tests.support.guards import assert_same_values
from tests.support.models import Mlp, float_batches, my_rows

STEPS = 3


@dataclass(frozen=True)
class Batch:
    """What a data loader may give."""

    features: torch.Tensor
    ids: torch.Tensor
    more: dict


class TakesBatch(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.mlp = Mlp(10, 14)

    def forward(self, batch, *, scale):
        self.seen = (batch.features.dtype, batch.ids.dtype, batch.more["list"][0].dtype, scale.dtype)
        return self.mlp(batch.features * scale + batch.more["list"][0])


def policy(**dtypes):
    return engine_module().MixedPrecisionPolicy(**dtypes)


def check_dataclass():
    features = my_rows(float_batches(1)[0], dist.get_rank(), dist.get_world_size())
    for casts in (True, False):
        mp = policy(param_dtype=torch.bfloat16, cast_forward_inputs=casts)
        model = engine_module().fully_shard(TakesBatch(), mesh=mesh_1d(), mp_policy=mp)
        dtype = torch.float32 if casts else torch.bfloat16
        batch = Batch(features.to(dtype), torch.arange(3), {"list": [torch.ones(10, dtype=dtype), "text"]})
        out = model(batch, scale=torch.ones((), dtype=dtype))
        assert model.seen == (torch.bfloat16, torch.int64, torch.bfloat16, torch.bfloat16)
        assert batch.features.dtype == dtype, "the caller's object has changed"
        assert out.dtype == torch.bfloat16
        out.float().square().mean().backward()
        assert all(parameter.grad.dtype == torch.float32 for parameter in model.parameters())


def test_tensors_in_dataclasses_are_cast_like_others(on_ranks):
    on_ranks(2, check_dataclass)


class Mixed(nn.Module):
    """An inner part with a norm, which each has a policy of its own."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(10, 10)
        self.norm = nn.LayerNorm(10)
        self.inner = Mlp(10, 14)
        self.last = nn.Linear(10, 10)

    def forward(self, x):
        x = torch.tanh(self.first(x))
        x = self.inner(self.norm(x)).to(x.dtype) + x
        return self.last(x)


def mixed_run(engine):
    module = engine_module(engine)
    mesh = mesh_1d()
    model = Mixed()
    narrow = module.MixedPrecisionPolicy(param_dtype=torch.float16, reduce_dtype=torch.float32)
    wide = module.MixedPrecisionPolicy(param_dtype=torch.float32, output_dtype=torch.bfloat16)
    outer = module.MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    module.fully_shard(model.norm, mesh=mesh, mp_policy=wide)
    module.fully_shard(model.inner, mesh=mesh, mp_policy=narrow)
    module.fully_shard(model, mesh=mesh, mp_policy=outer)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    outputs = {}
    for step, batch in enumerate(float_batches(STEPS)):
        out = model(my_rows(batch, dist.get_rank(), dist.get_world_size()))
        assert out.dtype == torch.bfloat16
        outputs[f"step {step}"] = out.detach().clone()
        out.float().square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return outputs, full_parameters(model)


def compare_mixed():
    (outputs, weights), (expected_outputs, expected_weights) = mixed_run(ENGINE), mixed_run(FSDP2)
    assert_same_values(outputs, expected_outputs, "outputs")
    assert_same_values(weights, expected_weights, "weights")


def test_parts_with_policies_of_their_own_equal_fsdp2_bit_for_bit(on_ranks):
    on_ranks(2, compare_mixed)


@pytest.mark.parametrize("world", [4])
def test_parts_with_policies_of_their_own_on_four_ranks(on_ranks, world):
    on_ranks(world, check_close)


def check_close():
    (_, weights), (_, expected) = mixed_run(ENGINE), mixed_run(FSDP2)
    assert_same_values(weights, expected, "weights", atol=1e-3)
