"""Copies of sharded models: refused with the way out, the average of the weights, and a reference model."""

import copy
import pickle
import re
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.optim.swa_utils import AveragedModel

from tests.support.engines import ENGINE, FSDP2, full, full_parameters, shard
from tests.support.guards import assert_same_values
from tests.support.models import build_model, my_rows, token_batches
from tests.support.training import causal_loss
from ya_fsdp import get_full_state_dict, load_full_state_dict

pytestmark = pytest.mark.skipif(ENGINE == FSDP2, reason="what ya_fsdp promises")
RECIPES = Path(__file__).resolve().parents[2] / "docs" / "recipes.md"


def recipe(number):
    """Return the code of the page's n-th example."""
    return re.findall(r"```python\n(.*?)```", RECIPES.read_text(), re.DOTALL)[number]


def step(model, optimizer, batch):
    causal_loss(model, my_rows(batch, dist.get_rank(), dist.get_world_size())).backward()
    optimizer.step()
    optimizer.zero_grad()


def refusals():
    models = [shard(build_model("llama", seed=0)) for _ in range(2)]
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.1) for model in models]
    for attempt in (copy.deepcopy, AveragedModel, pickle.dumps):
        with pytest.raises(TypeError, match="Copy the model before fully_shard"):
            attempt(models[0])
    for model, optimizer in zip(models, optimizers, strict=True):
        step(model, optimizer, token_batches(1)[0])
    assert_same_values(full_parameters(models[0]), full_parameters(models[1]), "the refused copy left the model intact")


def test_copying_a_sharded_model_is_refused_and_leaves_it_intact(on_ranks):
    on_ranks(2, refusals)


def average_of_weights():
    model = shard(build_model("llama", seed=0))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    names = {"torch": torch, "model": model}
    exec(recipe(0), names)  # the page's own code
    exec(recipe(1), names)
    expected = full_parameters(model)
    for batch in token_batches(4):
        step(model, optimizer, batch)
        names["update"](0.9)
        for name, value in full_parameters(model).items():
            expected[name].lerp_(value, 1 - 0.9)
    found = {name: full(value) for name, value in names["average"].items()}
    assert_same_values(found, expected, "average", atol=1e-6)
    trained = full_parameters(model)
    names["swap"]()
    assert_same_values(full_parameters(model), found, "swapped in")
    names["swap"]()
    assert_same_values(full_parameters(model), trained, "swapped out")


@pytest.mark.parametrize("world", [2, 3])
def test_the_documented_average_equals_that_of_the_full_weights(on_ranks, world):
    on_ranks(world, average_of_weights)


def reference_model():
    plain = build_model("llama", seed=0)
    model, reference = shard(copy.deepcopy(plain)), shard(copy.deepcopy(plain).requires_grad_(False))
    step(model, torch.optim.SGD(model.parameters(), lr=0.5), token_batches(1)[0])
    assert_same_values(full_parameters(reference), dict(plain.named_parameters()), "the reference stays")
    load_full_state_dict(reference, get_full_state_dict(model, rank0_only=False))
    assert_same_values(full_parameters(reference), full_parameters(model), "carried over")


def test_models_copied_before_sharding_are_independent(on_ranks):
    on_ranks(2, reference_model)
