"""A 2-D mesh: shards inside a row, replicas across rows."""

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from tests.support.engines import full_gradients, local, shard
from tests.support.guards import assert_same_numbers, assert_same_values
from tests.support.models import MlpStack, build_model, float_batches, my_rows, token_batches
from tests.support.recorder import ALL_REDUCE, GATHER, REDUCE_SCATTER, CollectiveRecorder
from tests.support.training import adamw, causal_loss, mean_over_ranks, reference_run, total_norm


def mesh_2d():
    return init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))


def compare_training():
    rank, world_size = dist.get_rank(), dist.get_world_size()
    batches = token_batches(2) * 3
    expected = reference_run(build_model("llama"), adamw, batches, max_norm=1.0)
    model = shard(build_model("llama"), mesh=mesh_2d())
    held = sum(local(parameter).numel() for parameter in model.parameters())
    share = held / sum(parameter.numel() for parameter in model.parameters())
    assert 0.4 < share < 0.6, f"rank {rank} holds {share:.0%}, expected half of the model"
    optimizer = adamw(model.parameters())
    losses, norms = [], []
    for batch in batches:
        loss = causal_loss(model, my_rows(batch, rank, world_size))
        loss.backward()
        losses.append(mean_over_ranks(loss))
        norms.append(total_norm(model, 1.0))
        optimizer.step()
        optimizer.zero_grad()
    assert_same_numbers(losses, expected.losses, "loss", atol=1e-5)
    assert_same_numbers(norms, expected.norms, "gradient norm", atol=1e-5)


@pytest.mark.parametrize("world", [4])
def test_hybrid_sharding_trains_like_one_process(on_ranks, world):
    on_ranks(world, compare_training)


def accumulate():
    """Without all-reduce, gradients are reduced inside a row, and over replicas only in the last micro-batch."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    batches = float_batches(3)
    plain = MlpStack()
    for batch in batches:
        plain(batch).square().mean().backward()
    expected = {name: parameter.grad for name, parameter in plain.named_parameters()}
    model = MlpStack()
    shard(model, units=list(model.blocks), mesh=mesh_2d(), reshard_after_forward=True)
    for _ in range(2):
        for index, batch in enumerate(batches):
            last = index == 2
            model.set_requires_all_reduce(last)
            with CollectiveRecorder() as recorder:
                model(my_rows(batch, rank, world_size)).square().mean().backward()
            assert recorder.count(GATHER) == 6
            assert recorder.count(REDUCE_SCATTER) == 3
            reductions = [event for event in recorder.of(ALL_REDUCE) if event.dtype == torch.float32]
            assert len(reductions) == (3 if last else 0), f"micro-batch {index}: {reductions}"
        assert_same_values(full_gradients(model), expected, f"rank {rank}", atol=1e-6)
        model.zero_grad()


@pytest.mark.parametrize("world", [4])
def test_replicas_are_reduced_in_the_last_micro_batch_only(on_ranks, world):
    on_ranks(world, accumulate)
