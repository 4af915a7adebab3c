"""A unit too large for the staging limit is reduced in pieces, with the same result."""

import pytest
import torch
import torch.distributed as dist

from tests.support.engines import ENGINE, FSDP2, full_gradients, shard
from tests.support.guards import assert_same_values
from tests.support.models import OddModel, build_model, float_batches, my_rows, token_batches
from tests.support.recorder import REDUCE_SCATTER, CollectiveRecorder
from tests.support.training import causal_loss, square_loss

pytestmark = pytest.mark.skipif(ENGINE == FSDP2, reason="a limit of this engine")


def gradients(name, limit, policy):
    from ya_fsdp.runtime import reducer

    usual_limit = reducer.MAX_STAGING_BYTES
    if name == "odd":
        model, batch, loss_fn = OddModel(), float_batches(1, width=5)[0], square_loss
        shard(model, units=list(model.blocks), mp=policy)
    else:
        model, batch, loss_fn = shard(build_model(name), mp=policy), token_batches(1)[0], causal_loss
    rows = my_rows(batch, dist.get_rank(), dist.get_world_size())
    try:
        reducer.MAX_STAGING_BYTES = limit if limit is not None else usual_limit
        with CollectiveRecorder() as recorder:
            loss_fn(model, rows).backward()
    finally:
        reducer.MAX_STAGING_BYTES = usual_limit
    return full_gradients(model), recorder.count(REDUCE_SCATTER)


def compare():
    for policy in (None, {"param_dtype": torch.bfloat16, "reduce_dtype": torch.float32}):
        for name, limits in (("odd", (64 * dist.get_world_size(),)), ("llama", (1000, 7000, 50000))):
            whole, num_whole = gradients(name, None, policy)
            for limit in limits:
                pieces, num_pieces = gradients(name, limit, policy)
                assert num_pieces > num_whole, f"{name}: {num_pieces} reduce-scatters with {limit} bytes of staging"
                what = f"{name}, {limit} bytes, {policy}, rank {dist.get_rank()} of {dist.get_world_size()}"
                assert_same_values(pieces, whole, what, atol=1e-7)


@pytest.mark.parametrize("world", [2, 3])
def test_pieces_give_the_gradients_of_the_whole(on_ranks, world):
    on_ranks(world, compare)
