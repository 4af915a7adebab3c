"""Several forward passes before one backward, a unit used twice, and two backwards over one forward each."""

import torch
import torch.distributed as dist

from tests.support.engines import full_gradients, shard
from tests.support.guards import assert_same_values
from tests.support.models import MlpStack, float_batches, my_rows


class Repeated(MlpStack):
    """Runs its middle block twice."""

    def forward(self, x):
        for index in (0, 1, 1, 2):
            x = self.blocks[index](x)
        return x


def rows_of(batch):
    return my_rows(batch, dist.get_rank(), dist.get_world_size())


def sum_of_losses(model, rows):
    return sum(model(part).square().mean() for part in rows)


def gradients_of(build, batches):
    plain = build()
    sum_of_losses(plain, batches).backward()
    return {name: parameter.grad for name, parameter in plain.named_parameters()}


def sharded(build, reshard_after_forward):
    model = build()
    shard(model, units=list(model.blocks), reshard_after_forward=reshard_after_forward)
    return model


def check_forwards():
    batches = float_batches(3)
    expected = gradients_of(MlpStack, batches)
    for option in (True, False, None):
        model = sharded(MlpStack, option)
        for step in range(2):
            what = f"reshard_after_forward={option}, step {step}, rank {dist.get_rank()}"
            sum_of_losses(model, [rows_of(batch) for batch in batches]).backward()
            assert_same_values(full_gradients(model), expected, f"one backward, {what}", atol=1e-6)
            model.zero_grad()

            losses = [model(rows_of(batch)).square().mean() for batch in batches]
            for loss in losses:
                loss.backward()
            assert_same_values(full_gradients(model), expected, f"three backwards, {what}", atol=1e-6)
            model.zero_grad()

            losses = [model(rows_of(batch)).square().mean() for batch in batches]
            for loss in reversed(losses):
                loss.backward()
            assert_same_values(full_gradients(model), expected, f"backwards in reverse, {what}", atol=1e-6)
            model.zero_grad()


def test_gradients_of_several_forwards_add_up(on_ranks):
    on_ranks(2, check_forwards)


def check_repeated():
    batches = float_batches(2)
    expected = gradients_of(Repeated, batches)
    for option in (True, False):
        model = sharded(Repeated, option)
        for step in range(2):
            sum_of_losses(model, [rows_of(batch) for batch in batches]).backward()
            what = f"reshard_after_forward={option}, step {step}"
            assert_same_values(full_gradients(model), expected, what, atol=1e-6)
            model.zero_grad()


def test_a_unit_may_run_twice_in_one_forward(on_ranks):
    on_ranks(2, check_repeated)


def check_retained():
    batch = float_batches(1)[0]
    expected = gradients_of(MlpStack, [batch, batch])
    for option in (True, False):
        model = sharded(MlpStack, option)
        loss = model(rows_of(batch)).square().mean()
        loss.backward(retain_graph=True)
        loss.backward()
        assert_same_values(full_gradients(model), expected, f"reshard_after_forward={option}", atol=1e-6)


def test_a_graph_that_is_kept_can_run_backward_twice(on_ranks):
    on_ranks(2, check_retained)


def check_partial():
    """The loss uses what the first blocks gave; the last block ran for nothing."""
    batch = float_batches(1)[0]

    def loss_of(model, rows):
        hidden = []
        handle = model.blocks[1].register_forward_hook(lambda module, args, output: hidden.append(output))
        model(rows)
        handle.remove()
        return hidden[0].square().mean()

    plain = MlpStack()
    loss_of(plain, batch).backward()
    expected = {name: parameter.grad for name, parameter in plain.named_parameters()}
    model = sharded(MlpStack, True)
    for step in range(2):
        loss_of(model, rows_of(batch)).backward()
        assert_same_values(full_gradients(model), expected, f"step {step}", atol=1e-6)
        model.zero_grad()
        with torch.no_grad():
            torch.testing.assert_close(model(batch), plain(batch), atol=1e-6, rtol=0)


def test_a_unit_outside_the_loss_gets_no_gradient(on_ranks):
    on_ranks(2, check_partial)
