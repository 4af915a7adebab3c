"""Checkpoints written with torch.distributed.checkpoint load back, at any number of ranks and into plain tensors."""

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

from tests.support.engines import ENGINE, FSDP2, full, shard
from tests.support.guards import assert_same_values
from tests.support.models import OddModel, build_model, float_batches, my_rows, token_batches
from tests.support.training import adamw, causal_loss, square_loss

CASES = {
    "odd": (OddModel, square_loss, lambda: float_batches(3, width=5)),
    "llama": (lambda seed=0: build_model("llama", seed=seed), causal_loss, lambda: token_batches(3)),
}
pytestmark = pytest.mark.skipif(ENGINE == FSDP2, reason="PyTorch's engine refuses scalar parameters")


def sharded(case, seed):
    build, loss_fn, batches = CASES[case]
    model = build(seed=seed)
    shard(model, units=list(model.blocks) if case == "odd" else None)
    return model, adamw(model.parameters()), loss_fn, batches()


def step(model, optimizer, loss_fn, batch):
    loss = loss_fn(model, my_rows(batch, dist.get_rank(), dist.get_world_size()))
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()


def everything(model, optimizer):
    """Return all full parameters and moments, by name."""
    values = {}
    for name, parameter in model.named_parameters():
        values[name] = full(parameter)
        for key, value in optimizer.state[parameter].items():
            values[f"{name}/{key}"] = full(value)
    return values


def save(case, folder):
    model, optimizer, loss_fn, batches = sharded(case, seed=0)
    for batch in batches[:2]:
        step(model, optimizer, loss_fn, batch)
    model_state, optimizer_state = get_state_dict(model, optimizer)
    dcp.save({"model": model_state, "optimizer": optimizer_state}, checkpoint_id=folder)
    saved = everything(model, optimizer)
    step(model, optimizer, loss_fn, batches[2])
    return saved, {name: full(parameter) for name, parameter in model.named_parameters()}


def load(case, folder, saved, after):
    model, optimizer, loss_fn, batches = sharded(case, seed=1)
    model_state, optimizer_state = get_state_dict(model, optimizer)
    states = {"model": model_state, "optimizer": optimizer_state}
    dcp.load(states, checkpoint_id=folder)
    set_state_dict(model, optimizer, model_state_dict=states["model"], optim_state_dict=states["optimizer"])
    what = f"{case} on rank {dist.get_rank()} of {dist.get_world_size()}"
    assert_same_values(everything(model, optimizer), saved, f"loaded {what}")
    step(model, optimizer, loss_fn, batches[2])
    continued = {name: full(parameter) for name, parameter in model.named_parameters()}
    assert_same_values(continued, after, f"one step later, {what}", atol=1e-5)


@pytest.fixture(scope="session")
def saved_by_two(rank_pools, tmp_path_factory):
    """Checkpoints of two ranks, written once: folder, what it holds, and the weights one step later."""
    made = {}

    def get(case):
        if case not in made:
            folder = str(tmp_path_factory.mktemp(case))
            made[case] = (folder, *rank_pools.run(2, save, case, folder)[0])
        return made[case]

    return get


@pytest.mark.parametrize("case", ["odd", "llama"])
@pytest.mark.parametrize("world", [2, 1, 3])
def test_checkpoint_of_two_ranks_loads_exactly(on_ranks, saved_by_two, world, case):
    on_ranks(world, load, case, *saved_by_two(case))


@pytest.mark.parametrize("world", [4])
def test_checkpoint_of_four_ranks_loads_on_two(on_ranks, tmp_path, world):
    saved, after = on_ranks(world, save, "odd", str(tmp_path))[0]
    on_ranks(2, load, "odd", str(tmp_path), saved, after)


def load_into_fsdp2(folder, saved):
    model = shard(build_model("llama", seed=1), FSDP2)
    state = {"model": model.state_dict()}
    dcp.load(state, checkpoint_id=folder)
    model.load_state_dict(state["model"])
    parameters = {name: value for name, value in saved.items() if "/" not in name}
    found = {name: full(parameter) for name, parameter in model.named_parameters()}
    assert_same_values(found, parameters, "in PyTorch FSDP2")


def save_from_fsdp2(folder):
    model = shard(build_model("llama", seed=2), FSDP2)
    dcp.save({"model": model.state_dict()}, checkpoint_id=folder)


def load_from_fsdp2(folder):
    model = shard(build_model("llama", seed=1))
    state = {"model": model.state_dict()}
    dcp.load(state, checkpoint_id=folder)
    model.load_state_dict(state["model"])
    expected = dict(build_model("llama", seed=2).named_parameters())
    assert_same_values({name: full(p) for name, p in model.named_parameters()}, expected, "from PyTorch FSDP2")


def test_checkpoints_are_exchanged_with_fsdp2(on_ranks, saved_by_two, tmp_path):
    folder, saved, _ = saved_by_two("llama")
    on_ranks(2, load_into_fsdp2, folder, saved)
    on_ranks(2, save_from_fsdp2, str(tmp_path))
    on_ranks(2, load_from_fsdp2, str(tmp_path))


def test_checkpoint_loads_into_plain_tensors_in_one_process(saved_by_two):
    folder, saved, _ = saved_by_two("odd")
    model = OddModel(seed=1)
    state = {"model": model.state_dict()}
    dcp.load(state, checkpoint_id=folder, no_dist=True)
    model.load_state_dict(state["model"])
    expected = {name: value for name, value in saved.items() if "/" not in name}
    assert_same_values({name: p.detach() for name, p in model.named_parameters()}, expected, "plain tensors")


def copy_back():
    model, optimizer, loss_fn, batches = sharded("odd", seed=0)
    step(model, optimizer, loss_fn, batches[0])
    before = everything(model, optimizer)
    model_state, _ = get_state_dict(model, optimizer)
    kept = {name: value.clone() for name, value in model_state.items()}
    step(model, optimizer, loss_fn, batches[1])
    assert all(isinstance(value, type(next(iter(kept.values())))) for value in model_state.values())
    with torch.no_grad():
        for name, value in model.state_dict().items():
            value.copy_(kept[name])
    after = {name: value for name, value in everything(model, optimizer).items() if "/" not in name}
    assert_same_values(after, {name: value for name, value in before.items() if "/" not in name}, "copied back")


def test_sharded_state_can_be_cloned_and_copied_back(on_ranks):
    on_ranks(2, copy_back)
