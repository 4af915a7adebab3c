"""Sharded training gives the numbers of one process, and of PyTorch FSDP2, on 1 to 4 ranks."""

import pytest
import torch
import torch.distributed as dist

from tests.support.engines import ENGINE, FSDP2, shard
from tests.support.guards import assert_same_numbers, assert_same_values
from tests.support.models import build_model, token_batches
from tests.support.training import adamw, reference_run, sgd, sharded_run

STEPS = 8
OPTIMIZERS = {"sgd": (sgd, 1e-5), "adamw": (adamw, 1e-4)}


def compare_runs(name, optimizer, dtype, tolerance):
    make_optimizer, parameter_tolerance = OPTIMIZERS[optimizer]
    parameter_tolerance = parameter_tolerance if dtype == torch.float32 else tolerance
    batches = token_batches(2) * (STEPS // 2)
    expected = {"one process": reference_run(build_model(name, dtype=dtype), make_optimizer, batches, max_norm=1.0)}
    runs = {}
    for engine in (ENGINE, FSDP2):
        model = shard(build_model(name, dtype=dtype), engine)
        runs[engine] = sharded_run(model, make_optimizer, batches, engine=engine, max_norm=1.0)
    expected["FSDP2"] = runs[FSDP2]
    for other, reference in expected.items():
        what = f"{name}, {optimizer}, rank {dist.get_rank()} of {dist.get_world_size()}, against {other}"
        found = runs[ENGINE]
        assert_same_numbers(found.losses, reference.losses, f"loss ({what})", atol=tolerance)
        assert_same_numbers(found.norms, reference.norms, f"gradient norm ({what})", atol=tolerance)
        assert_same_values(found.parameters, reference.parameters, f"weights ({what})", atol=parameter_tolerance)
    # Steps 0 and 6 see the same batch.
    assert runs[ENGINE].losses[6] < runs[ENGINE].losses[0] - 1e-3, "the model did not learn"


def compare_optimizers(name):
    for optimizer in OPTIMIZERS:
        compare_runs(name, optimizer, torch.float32, 1e-5)


@pytest.mark.parametrize(
    ("world", "name"),
    [*((world, name) for world in (1, 2, 3, 4) for name in ("llama", "gpt2")), (2, "qwen2"), (2, "mixtral")],
)
def test_training_matches_one_process_and_fsdp2(on_ranks, world, name):
    on_ranks(world, compare_optimizers, name)


@pytest.mark.parametrize("world", [3])
def test_training_in_float64_matches_to_nine_digits(on_ranks, world):
    # GPT-2, because the Llama of transformers computes its norms in fp32 whatever the model's dtype is.
    on_ranks(world, compare_runs, "gpt2", "adamw", torch.float64, 1e-9)


def compare_bits(name, optimizer):
    make_optimizer, _ = OPTIMIZERS[optimizer]
    batches = token_batches(STEPS)
    found = sharded_run(shard(build_model(name)), make_optimizer, batches)
    expected = sharded_run(shard(build_model(name), FSDP2), make_optimizer, batches, engine=FSDP2)
    assert_same_numbers(found.losses, expected.losses, f"loss ({name}, {optimizer})")
    assert_same_values(found.parameters, expected.parameters, f"weights ({name}, {optimizer})")


def compare_all_bits():
    for name in ("llama", "gpt2"):
        for optimizer in OPTIMIZERS:
            compare_bits(name, optimizer)


def test_two_ranks_without_clipping_are_bit_equal_to_fsdp2(on_ranks):
    on_ranks(2, compare_all_bits)
