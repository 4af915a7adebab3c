"""Full state dicts of model and optimizer, ours and those of torch's own helpers: plain tensors of full shape."""

import pytest
import torch
import torch.distributed as dist
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict, get_state_dict

from tests.support.engines import ENGINE, FSDP2, shard
from tests.support.guards import assert_same_values
from tests.support.models import OddModel, build_model, float_batches, my_rows, token_batches
from tests.support.training import adamw, causal_loss, square_loss

pytestmark = pytest.mark.skipif(ENGINE == FSDP2, reason="PyTorch's engine refuses scalars and returns wrappers on gloo")


def trained_pair():
    """Return a plain and a sharded model after the same two steps, with their optimizers."""
    batches = float_batches(2, width=5)
    plain, model = OddModel(), OddModel()
    shard(model, units=list(model.blocks))
    optimizers = adamw(plain.parameters()), adamw(model.parameters())
    for batch in batches:
        square_loss(plain, batch).backward()
        square_loss(model, my_rows(batch, dist.get_rank(), dist.get_world_size())).backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    return plain, optimizers[0], model, optimizers[1]


def assert_plain(state, what):
    for name, value in state.items():
        assert type(value) is torch.Tensor, f"{what}: {name} is a {type(value).__name__} on rank {dist.get_rank()}"


def check_torch_helpers():
    rank = dist.get_rank()
    plain, plain_optimizer, model, optimizer = trained_pair()
    options = StateDictOptions(full_state_dict=True)
    state = get_model_state_dict(model, options=options)
    assert_plain(state, "model")
    assert_same_values(state, plain.state_dict(), f"model, rank {rank}", atol=1e-6)

    state = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
    assert_plain(state, "model, cpu_offload")
    if rank == 0:
        assert_same_values(state, plain.state_dict(), "model, cpu_offload", atol=1e-6)
    else:
        assert state == {}

    _, found = get_state_dict(model, optimizer, options=options)
    _, expected = get_state_dict(plain, plain_optimizer, options=options)
    assert list(found["state"]) == list(expected["state"])
    for name, moments in expected["state"].items():
        assert_plain(found["state"][name], f"optimizer state of {name}")
        assert_same_values(found["state"][name], moments, f"optimizer state of {name}, rank {rank}", atol=1e-6)


def test_torch_helpers_return_full_plain_tensors(on_ranks):
    on_ranks(2, check_torch_helpers)


def check_own_functions():
    from ya_fsdp import get_full_state_dict, load_full_state_dict

    rank = dist.get_rank()
    plain, _, model, _ = trained_pair()
    state = get_full_state_dict(model)
    assert_plain(state, "model")
    if rank == 0:
        assert_same_values(state, plain.state_dict(), "rank 0", atol=1e-6)
    else:
        assert state == {}
    everywhere = get_full_state_dict(model, rank0_only=False, cpu_offload=False)
    assert_same_values(everywhere, plain.state_dict(), f"rank {rank}", atol=1e-6)

    other = OddModel(seed=5)
    shard(other, units=list(other.blocks))
    load_full_state_dict(other, everywhere)
    assert_same_values(get_full_state_dict(other, rank0_only=False), everywhere, "after loading on every rank")

    other = OddModel(seed=5)
    shard(other, units=list(other.blocks))
    load_full_state_dict(other, state, broadcast_from_rank0=True)
    assert_same_values(get_full_state_dict(other, rank0_only=False), everywhere, "after loading from rank 0")


@pytest.mark.parametrize("world", [1, 2, 3])
def test_full_state_dict_is_complete_and_loads_back(on_ranks, world):
    on_ranks(world, check_own_functions)


def check_mistakes():
    from ya_fsdp import get_full_state_dict, load_full_state_dict

    model = OddModel()
    shard(model, units=list(model.blocks))
    before = get_full_state_dict(model, rank0_only=False)
    broken = {**OddModel(seed=3).state_dict(), "unknown.weight": torch.ones(2)}
    del broken["blocks.1.gate"]
    with pytest.raises((RuntimeError, KeyError, ValueError)) as caught:
        load_full_state_dict(model, broken)
    assert "unknown.weight" in str(caught.value)
    assert "blocks.1.gate" in str(caught.value)
    assert_same_values(get_full_state_dict(model, rank0_only=False), before, "after a refused load")
    wrong = {**OddModel(seed=3).state_dict(), "shift": torch.ones(6)}
    with pytest.raises((RuntimeError, ValueError), match="shift"):
        load_full_state_dict(model, wrong)
    assert_same_values(get_full_state_dict(model, rank0_only=False), before, "after a refused shape")


def test_a_state_dict_with_wrong_keys_or_shapes_is_refused_before_any_weight_changes(on_ranks):
    on_ranks(2, check_mistakes)


def check_tied():
    from ya_fsdp import get_full_state_dict, load_full_state_dict

    model = shard(build_model("gpt2"))
    causal_loss(model, token_batches(1)[0]).backward()
    state = get_full_state_dict(model, rank0_only=False)
    assert list(state) == list(build_model("gpt2").state_dict())
    assert torch.equal(state["transformer.wte.weight"], state["lm_head.weight"])
    load_full_state_dict(model, build_model("gpt2", seed=4).state_dict())
    assert model.lm_head.weight is model.transformer.wte.weight
    assert_same_values(
        get_full_state_dict(model, rank0_only=False), build_model("gpt2", seed=4).state_dict(), "after loading"
    )


def test_tied_weights_are_saved_under_both_names_and_stay_tied(on_ranks):
    on_ranks(2, check_tied)
