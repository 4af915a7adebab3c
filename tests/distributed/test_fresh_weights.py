"""A forward pass sees the weights as they are now, whoever changed them and whichever way."""

import pytest
import torch
import torch.distributed as dist

from tests.support.engines import ENGINE, FSDP2, full_parameters, shard
from tests.support.guards import assert_same_values
from tests.support.models import MlpStack, float_batches


def by_data(parameters):
    for parameter in parameters:
        parameter.data.mul_(1.5)


def by_local_tensor(parameters):
    for parameter in parameters:
        parameter.to_local().detach().mul_(1.5)


def by_no_grad(parameters):
    with torch.no_grad():
        for parameter in parameters:
            parameter.mul_(1.5)


def by_foreach(parameters):
    with torch.no_grad():
        torch._foreach_mul_(parameters, 1.5)


def by_optimizer(parameters):
    for parameter in parameters:
        parameter.grad = parameter.detach() * -0.5
    torch.optim.SGD(parameters, lr=1.0).step()
    for parameter in parameters:
        parameter.grad = None


def by_copy(parameters):
    with torch.no_grad():
        for parameter in parameters:
            parameter.copy_(parameter * 1.5)


WAYS = (by_data, by_local_tensor, by_no_grad, by_foreach, by_optimizer, by_copy)


def scaled_output(features, factor, dtype):
    model = MlpStack()
    for parameter in model.parameters():
        parameter.data.mul_(factor)
        parameter.data = parameter.data.to(dtype)
    with torch.no_grad():
        return model(features.to(dtype))


def check_changes(reshard_after_forward, dtype):
    features = float_batches(1)[0]
    mp = None if dtype == torch.float32 else {"param_dtype": dtype, "reduce_dtype": torch.float32}
    for way in WAYS:
        for before in ("evaluation", "training", "forward with gradients, no backward"):
            what = f"{way.__name__} after {before}, reshard_after_forward={reshard_after_forward}, {dtype}"
            model = MlpStack()
            shard(model, units=list(model.blocks), reshard_after_forward=reshard_after_forward, mp=mp)
            parameters = list(model.parameters())
            model.train(before == "training")
            with torch.set_grad_enabled(before != "evaluation"):
                output = model(features)
            if before == "training":
                output.float().sum().backward()
                model.zero_grad()
            torch.testing.assert_close(output.detach(), scaled_output(features, 1.0, dtype), atol=1e-6, rtol=0)
            way(parameters)
            with torch.no_grad():
                output = model(features)
            expected = scaled_output(features, 1.5, dtype)
            torch.testing.assert_close(
                output, expected, atol=1e-6, rtol=0, msg=lambda text, what=what: f"{what}: {text}"
            )


def test_changes_between_forwards_are_seen(on_ranks):
    for reshard_after_forward in (True, False, None):
        for dtype in (torch.float32, torch.bfloat16):
            on_ranks(2, check_changes, reshard_after_forward, dtype)


def check_loading():
    from ya_fsdp import load_full_state_dict

    features = float_batches(1)[0]
    other = MlpStack(seed=7)
    for reshard_after_forward in (True, False):
        model = MlpStack()
        shard(model, units=list(model.blocks), reshard_after_forward=reshard_after_forward)
        with torch.no_grad():
            model(features)
            load_full_state_dict(model, other.state_dict())
            torch.testing.assert_close(model(features), other(features), atol=1e-6, rtol=0)
        assert_same_values(full_parameters(model), dict(other.named_parameters()), "after loading a full state dict")

        source = MlpStack(seed=9)
        sharded_source = MlpStack(seed=9)
        shard(sharded_source, units=list(sharded_source.blocks))
        with torch.no_grad():
            model(features)
            model.load_state_dict(sharded_source.state_dict())
            torch.testing.assert_close(model(features), source(features), atol=1e-6, rtol=0)
        assert_same_values(
            full_parameters(model), dict(source.named_parameters()), "after loading a sharded state dict"
        )


@pytest.mark.skipif(ENGINE == FSDP2, reason="loading a full state dict is this engine's own function")
def test_loaded_weights_are_seen(on_ranks):
    on_ranks(2, check_loading)


def train_kept_units():
    """Units that stay gathered between forward and backward must gather again after the optimizer step."""
    batches = float_batches(6)
    plain = MlpStack()
    model = MlpStack()
    shard(model, units=list(model.blocks), reshard_after_forward=False)
    optimizers = [torch.optim.SGD(each.parameters(), lr=0.1) for each in (plain, model)]
    for step, batch in enumerate(batches):
        losses = [each(batch).square().mean() for each in (plain, model)]
        torch.testing.assert_close(losses[1], losses[0], atol=1e-6, rtol=0)
        for loss, optimizer in zip(losses, optimizers, strict=True):
            loss.backward()
            if step != 2:  # an accumulation step in between
                optimizer.step()
                optimizer.zero_grad()
        with torch.no_grad():
            torch.testing.assert_close(model(batch), plain(batch), atol=1e-5, rtol=0)
    assert dist.get_world_size() == 2


def test_units_that_stay_gathered_follow_the_optimizer(on_ranks):
    on_ranks(2, train_kept_units)
