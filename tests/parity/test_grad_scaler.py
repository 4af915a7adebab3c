"""fp16 compute with torch's gradient scaler on fp32 shards: an overflow on one rank makes all ranks skip the step."""

import math

import pytest
import torch
import torch.distributed as dist

from tests.support.engines import full, full_parameters, shard
from tests.support.guards import assert_same_on_all_ranks, assert_same_values
from tests.support.models import MlpStack, float_batches, my_rows
from tests.support.training import sgd

SCALE = 2.0**10
OVERFLOW_AT = 3


def plain_run(batches):
    """Train in fp32 in one process, without a scaler; return the norms and the weights after each step."""
    model = MlpStack()
    optimizer = sgd(model.parameters())
    norms, weights = [], []
    for batch in batches:
        model(batch).square().mean().backward()
        norms.append(torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5).item())
        optimizer.step()
        optimizer.zero_grad()
        weights.append({name: parameter.detach().clone() for name, parameter in model.named_parameters()})
    return norms, weights


def spoil_shard(model):
    """Make one element of the gradients infinite, of those that rank 1 alone holds."""
    if dist.get_rank() == 1:
        held = [local for parameter in model.parameters() if (local := parameter.grad.to_local()).numel()]
        held[0][-1] = math.inf


def check(where, reduce_dtype):
    rank, world_size = dist.get_rank(), dist.get_world_size()
    batches = float_batches(6)
    norms, weights = plain_run(batches[:OVERFLOW_AT] + batches[OVERFLOW_AT + 1 :])
    model = MlpStack()
    shard(model, units=list(model.blocks), mp={"param_dtype": torch.float16, "reduce_dtype": reduce_dtype})
    optimizer = sgd(model.parameters())
    scaler = torch.amp.GradScaler("cpu", init_scale=SCALE, growth_interval=100)
    done = 0
    for step, batch in enumerate(batches):
        before = full_parameters(model)
        loss = model(my_rows(batch, rank, world_size)).float().square().mean()
        is_spoilt = step == OVERFLOW_AT
        if is_spoilt and where == "loss" and rank == 1:
            loss = loss * math.inf
        scaler.scale(loss).backward()
        if is_spoilt and where == "shard":
            spoil_shard(model)
        scaler.unscale_(optimizer)
        norm = full(torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)).item()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        what = f"step {step}, rank {rank}, overflow in {where}"
        assert scaler.get_scale() == (SCALE if step < OVERFLOW_AT else SCALE / 2), f"{what}: {scaler.get_scale()}"
        if is_spoilt:
            assert not math.isfinite(norm), f"{what}: norm {norm}"
            assert_same_values(full_parameters(model), before, f"weights after the skipped {what}")
            continue
        assert_same_on_all_ranks(norm, f"norm ({what})")
        assert math.isclose(norm, norms[done], rel_tol=1e-2), f"{what}: norm {norm}, expected {norms[done]}"
        assert_same_values(full_parameters(model), weights[done], f"weights after {what}", atol=1e-3)
        done += 1


@pytest.mark.parametrize("reduce_dtype", [torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("where", ["loss", "shard"])
def test_an_overflow_on_one_rank_skips_the_step_on_all(on_ranks, where, reduce_dtype):
    on_ranks(2, check, where, reduce_dtype)


@pytest.mark.parametrize("world", [4])
def test_an_overflow_in_one_of_four_shards_skips_the_step_on_all(on_ranks, world):
    on_ranks(world, check, "shard", torch.float32)
