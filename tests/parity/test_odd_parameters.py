"""Parameters that are 0-dim, empty, tiny or transposed train like in one process, also where a rank owns nothing."""

import math

import pytest
import torch
import torch.distributed as dist
from torch import nn

from tests.support.engines import full_gradients, full_parameters, local, shard
from tests.support.guards import assert_same_numbers, assert_same_values
from tests.support.models import OddModel, float_batches, my_rows
from tests.support.training import adamw, reference_run, sharded_run, square_loss, total_norm


def sharded_model():
    model = OddModel()
    return shard(model, units=list(model.blocks))


def compare_training():
    rank, world_size = dist.get_rank(), dist.get_world_size()
    batches = float_batches(8, width=5)
    plain, model = OddModel(), sharded_model()
    shapes = {name: parameter.shape for name, parameter in plain.named_parameters()}
    assert {name: parameter.shape for name, parameter in model.named_parameters()} == shapes
    assert_same_values(full_parameters(model), dict(OddModel().named_parameters()), "values after sharding")

    square_loss(plain, batches[0]).backward()
    square_loss(model, my_rows(batches[0], rank, world_size)).backward()
    gradients = {name: parameter.grad for name, parameter in plain.named_parameters()}
    assert_same_values(full_gradients(model), gradients, f"gradients on rank {rank} of {world_size}", atol=1e-6)
    filled = nn.ParameterList(parameter for parameter in plain.parameters() if parameter.numel())
    for norm_type in (2.0, math.inf):
        # Of the plain parameters the empty ones are left out: torch refuses their infinity norm.
        expected = total_norm(filled, norm_type=norm_type)
        assert math.isclose(total_norm(model, norm_type=norm_type), expected, rel_tol=1e-5), f"norm {norm_type}"
    model.zero_grad()

    found = sharded_run(model, adamw, batches, loss_fn=square_loss, max_norm=0.5)
    expected = reference_run(OddModel(), adamw, batches, loss_fn=square_loss, max_norm=0.5)
    assert_same_numbers(found.losses, expected.losses, "loss", atol=1e-5)
    assert_same_numbers(found.norms, expected.norms, "gradient norm", atol=1e-5)
    assert_same_values(found.parameters, expected.parameters, "weights", atol=1e-4)
    return [name for name, parameter in model.named_parameters() if not local(parameter).numel()]


@pytest.mark.parametrize("world", [2, 3, 4])
def test_odd_parameters_train_like_one_process(on_ranks, world):
    empty = on_ranks(world, compare_training)
    assert any(set(names) - {"blocks.0.nothing", "blocks.1.nothing"} for names in empty), (
        "no rank was left empty-handed"
    )


class Gate(nn.Module):
    def __init__(self):
        super().__init__()
        self.gate = nn.Parameter(torch.tensor(2.0))

    def forward(self, x):
        return x * self.gate


def train_one_scalar():
    model = Gate()
    shard(model, units=[])
    assert sum(local(parameter).numel() for parameter in model.parameters()) == (1 if dist.get_rank() == 0 else 0)
    batches = float_batches(4)
    found = sharded_run(model, adamw, batches, loss_fn=square_loss, max_norm=1.0)
    expected = reference_run(Gate(), adamw, batches, loss_fn=square_loss, max_norm=1.0)
    assert_same_numbers(found.losses, expected.losses, "loss", atol=1e-6)
    assert_same_values(found.parameters, expected.parameters, "weights", atol=1e-6)


@pytest.mark.parametrize("world", [3])
def test_a_unit_smaller_than_the_world_trains(on_ranks, world):
    on_ranks(world, train_one_scalar)
