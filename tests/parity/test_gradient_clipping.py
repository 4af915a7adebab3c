"""The gradient norm is the norm of the whole averaged gradient, and clipping uses it on every rank."""

import math

import pytest
import torch
import torch.distributed as dist

from tests.support.engines import ENGINE, FSDP2, full_parameters, shard
from tests.support.guards import assert_same_on_all_ranks, assert_same_values
from tests.support.models import build_model, my_rows, token_batches
from tests.support.training import causal_loss, sgd, total_norm


def check_clipping(max_norm, norm_type, foreach):
    what = f"max_norm {max_norm}, norm_type {norm_type}, foreach {foreach}"
    batch = token_batches(1)[0]
    plain = build_model("llama")
    causal_loss(plain, batch).backward()
    expected = torch.nn.utils.clip_grad_norm_(plain.parameters(), max_norm, norm_type)
    sgd(plain.parameters()).step()

    model = shard(build_model("llama"))
    causal_loss(model, my_rows(batch, dist.get_rank(), dist.get_world_size())).backward()
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm, norm_type, foreach=foreach)
    if ENGINE != FSDP2:
        assert type(norm) is torch.Tensor, f"{what}: the norm is a {type(norm).__name__}, expected a plain tensor"
        assert norm.dim() == 0
    norm = norm.full_tensor() if hasattr(norm, "full_tensor") else norm
    torch.testing.assert_close(norm, expected, rtol=1e-5, atol=0, msg=lambda text: f"{what}: {text}")
    assert_same_on_all_ranks(norm.item(), what)
    clipped = total_norm(model, norm_type=norm_type)
    assert math.isclose(clipped, min(norm.item(), max_norm), rel_tol=1e-4), f"{what}: norm after clipping is {clipped}"
    sgd(model.parameters()).step()
    assert_same_values(full_parameters(model), dict(plain.named_parameters()), what, atol=1e-6)


def check_limits(norm_type):
    for max_norm in (0.1, 1e9):
        for foreach in (None, False):
            check_clipping(max_norm, norm_type, foreach)


@pytest.mark.parametrize("norm_type", [2.0, math.inf, 1.0])
@pytest.mark.parametrize("world", [2, 3])
def test_norm_and_clipping_are_global(on_ranks, world, norm_type):
    if ENGINE == FSDP2 and math.isinf(norm_type):
        pytest.skip("PyTorch has no distributed infinity norm")
    on_ranks(world, check_limits, norm_type)


def check_nonfinite():
    model = shard(build_model("llama"))
    causal_loss(model, token_batches(1)[0]).backward()
    if dist.get_rank() == 1:
        next(iter(p.grad for p in model.parameters() if p.grad.to_local().numel())).to_local().fill_(math.inf)
    norm = total_norm(model)
    assert math.isinf(norm), f"rank {dist.get_rank()}: norm {norm}"
    with pytest.raises(RuntimeError, match="non-finite"):
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0, error_if_nonfinite=True)


def test_infinity_on_one_rank_is_seen_by_all(on_ranks):
    on_ranks(2, check_nonfinite)
