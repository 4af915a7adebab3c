"""16-bit gradients on the wire, added up in 32 bits."""

import pytest
import torch
import torch.distributed as dist

from tests.support.engines import ENGINE, FSDP2, full_gradients, shard
from tests.support.guards import assert_same_values
from tests.support.models import Weights, build_model, my_rows, token_batches
from tests.support.recorder import CollectiveRecorder
from tests.support.training import causal_loss
from ya_fsdp.runtime import reducer

pytestmark = pytest.mark.skipif(ENGINE == FSDP2, reason="an option of ya_fsdp")
NARROW = {"param_dtype": torch.bfloat16, "reduce_dtype": torch.bfloat16}
WIDE = {**NARROW, "bit32_acc_for_bit16_reduce_scatter": True}


def exact_sum(micro_batches):
    """Every rank's gradient is exact in bf16; their sum is not."""
    values = {True: 256.0, False: 1.0}
    expected = sum(values[rank == 0] for rank in range(dist.get_world_size())) / dist.get_world_size()
    for policy, is_exact in ((WIDE, True), (NARROW, False)):
        model = shard(Weights(), units=[], mp=policy)
        for last in [False] * (micro_batches - 1) + [True]:
            model.set_requires_gradient_sync(last)
            model(torch.full((11,), values[dist.get_rank() == 0] / micro_batches)).backward()
        gradient = full_gradients(model)["weight"]
        assert gradient.dtype == torch.float32
        assert torch.equal(gradient, torch.full((11,), expected)) == is_exact, (policy, gradient)


@pytest.mark.parametrize("micro_batches", [1, 2])
@pytest.mark.parametrize("world", [2, 4])
def test_the_sum_over_ranks_is_exact_to_32_bits(on_ranks, world, micro_batches):
    on_ranks(world, exact_sum, micro_batches)


def whole_model(staging_bytes):
    reducer.MAX_STAGING_BYTES, kept = staging_bytes or reducer.MAX_STAGING_BYTES, reducer.MAX_STAGING_BYTES
    try:
        rows = my_rows(token_batches(1)[0], dist.get_rank(), dist.get_world_size())
        gradients = {}
        for name, policy in (("wide", WIDE), ("fp32", {**NARROW, "reduce_dtype": torch.float32})):
            model = shard(build_model("llama", seed=0), mp=policy)
            causal_loss(model, rows).backward()
            gradients[name] = full_gradients(model)
            model.zero_grad()
            with CollectiveRecorder() as recorder:
                causal_loss(model, rows).backward()
            sent = [e for e in recorder.events if e.kind in ("reduce_scatter", "alltoall_base_", "all_to_all_single")]
            assert {e.dtype for e in sent} == {torch.bfloat16 if name == "wide" else torch.float32}, recorder.events
        # Gradients come out of the backward in bf16, so sending them in bf16 loses nothing.
        assert_same_values(gradients["wide"], gradients["fp32"], "wide", atol=1e-7)
    finally:
        reducer.MAX_STAGING_BYTES = kept


@pytest.mark.parametrize("staging_bytes", [None, 2048])
@pytest.mark.parametrize("world", [1, 2, 3])
def test_gradients_equal_those_of_a_reduction_in_fp32(on_ranks, world, staging_bytes):
    if world == 1:
        staging_bytes = None  # one rank sends nothing
    on_ranks(world, whole_model_of_one if world == 1 else whole_model, staging_bytes)


def whole_model_of_one(_):
    model = shard(build_model("llama", seed=0), mp=WIDE)
    causal_loss(model, token_batches(1)[0]).backward()
    assert all(gradient.dtype == torch.float32 for gradient in full_gradients(model).values())
