"""One process: the same calls work, with nobody to talk to."""

import torch
import torch.distributed as dist

from tests.support.engines import full_gradients, shard
from tests.support.guards import assert_same_values
from tests.support.models import OddModel, build_model, float_batches, token_batches
from tests.support.training import adamw, causal_loss, square_loss, total_norm


def check_backward(build, units_of_model, loss_fn, batches):
    assert dist.get_world_size() == 1
    for reshard_after_forward in (True, False):
        plain, model = build(), build()
        shard(model, units=units_of_model(model), reshard_after_forward=reshard_after_forward)
        optimizers = adamw(plain.parameters()), adamw(model.parameters())
        for start in (0, 2):
            model.set_requires_gradient_sync(False)
            for each in (plain, model):
                loss_fn(each, batches[start]).backward()
            model.set_requires_gradient_sync(True)
            for each in (plain, model):
                loss_fn(each, batches[start + 1]).backward()
            expected = {name: parameter.grad for name, parameter in plain.named_parameters()}
            assert_same_values(full_gradients(model), expected, f"step {start // 2}", atol=1e-6)
            assert abs(total_norm(model, 1.0) - torch.nn.utils.clip_grad_norm_(plain.parameters(), 1.0).item()) < 1e-5
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()


def check_small():
    check_backward(OddModel, lambda model: list(model.blocks), square_loss, float_batches(4, width=5))


def check_bf16():
    model = shard(build_model("llama"), mp={"param_dtype": torch.bfloat16, "reduce_dtype": torch.float32})
    tokens = token_batches(1)[0]
    causal_loss(model, tokens).backward()
    replica = build_model("llama")
    for parameter in replica.parameters():
        parameter.data = parameter.data.bfloat16()
    causal_loss(replica, tokens).backward()
    expected = {name: parameter.grad.float() for name, parameter in replica.named_parameters()}
    assert_same_values(full_gradients(model), expected, "bf16 compute")


def test_one_rank_runs_backward_and_accumulates(on_ranks):
    on_ranks(1, check_small)


def test_one_rank_computes_in_bf16(on_ranks):
    on_ranks(1, check_bf16)
