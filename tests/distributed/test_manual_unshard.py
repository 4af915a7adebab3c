"""``unshard`` and ``reshard`` by hand, also asynchronously."""

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from tests.support.engines import engine_module, full_gradients, shard
from tests.support.guards import assert_same_values
from tests.support.models import MlpStack, float_batches, my_rows
from tests.support.recorder import GATHER, CollectiveRecorder


def sharded_stack(**options):
    model = MlpStack()
    shard(model, units=list(model.blocks), **options)
    return model


def check_by_hand():
    original = dict(MlpStack().named_parameters())
    model = sharded_stack()
    sharded = dict(model.named_parameters())
    assert model.blocks[0].unshard() is None
    model.blocks[0].unshard()  # a second time changes nothing
    for name, parameter in model.named_parameters():
        is_gathered = name.startswith("blocks.0")
        assert isinstance(parameter, DTensor) != is_gathered, f"rank {dist.get_rank()}: {name} is {type(parameter)}"
        if is_gathered:
            assert torch.equal(parameter, original[name]), name
    model.blocks[0].reshard()
    model.blocks[0].reshard()
    for name, parameter in model.named_parameters():
        assert parameter is sharded[name], f"{name} is another object after reshard"


def test_unshard_shows_full_parameters_and_reshard_takes_them_back(on_ranks):
    on_ranks(2, check_by_hand)


def check_handle():
    original = dict(MlpStack().named_parameters())
    model = sharded_stack()
    handles = [block.unshard(async_op=True) for block in model.blocks[:2]]
    assert all(isinstance(handle, engine_module().UnshardHandle) for handle in handles)
    for handle in handles:
        handle.wait()
        handle.wait()
    for name, parameter in model.blocks[:2].named_parameters():
        assert torch.equal(parameter, original[f"blocks.{name}"]), name
    for block in model.blocks[:2]:
        block.reshard()
    assert all(isinstance(parameter, DTensor) for parameter in model.parameters())

    # Without a wait: the forward of the unit waits by itself.
    batch = float_batches(1)[0]
    model.blocks[1].unshard(async_op=True)
    torch.testing.assert_close(model(batch), MlpStack()(batch), atol=1e-6, rtol=0)


def test_handle_waits_for_the_gather(on_ranks):
    on_ranks(2, check_handle)


def check_dropped_handle():
    """A gather that nobody waits for, then reshard: nothing hangs, and values stay right."""
    batch = float_batches(1)[0]
    model = sharded_stack()
    model.blocks[1].unshard(async_op=True)
    model.blocks[1].reshard()
    torch.testing.assert_close(model(batch), MlpStack()(batch), atol=1e-6, rtol=0)


def test_reshard_before_wait_is_harmless(on_ranks):
    on_ranks(2, check_dropped_handle)


def check_training():
    rank, world_size = dist.get_rank(), dist.get_world_size()
    batch = float_batches(1)[0]
    plain = MlpStack()
    plain(batch).square().mean().backward()
    expected = {name: parameter.grad for name, parameter in plain.named_parameters()}
    model = sharded_stack()
    for _ in range(2):
        for block in model.blocks:
            block.unshard()
            block.reshard()
        model(my_rows(batch, rank, world_size)).square().mean().backward()
        for block in model.blocks:
            block.reshard()
        assert_same_values(full_gradients(model), expected, f"rank {rank}", atol=1e-6)
        model.zero_grad()


def test_training_goes_on_after_manual_calls(on_ranks):
    on_ranks(2, check_training)


def count_gathers():
    """Units gathered by hand after the root's forward began are not gathered again."""
    batch = float_batches(1)[0]
    model = sharded_stack(reshard_after_forward=True)
    model(batch)
    seen = {}

    def ahead(module, args):
        model.blocks[2].unshard()
        seen["type"] = type(model.blocks[2].up.weight)

    model.blocks[0].register_forward_pre_hook(ahead)
    with torch.no_grad(), CollectiveRecorder() as recorder:
        model(batch)
    assert not issubclass(seen["type"], DTensor)
    assert recorder.count(GATHER) == 3, f"{recorder.count(GATHER)} gathers for 3 units"


def test_a_unit_gathered_ahead_is_not_gathered_twice(on_ranks):
    on_ranks(2, count_gathers)
