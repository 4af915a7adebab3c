"""State dicts of model and optimizer: full, sharded and local, between runs of different size and with FSDP2."""

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_model_state_dict, get_optimizer_state_dict, set_state_dict

import ya_fsdp
from tests.support.engines import ENGINE, FSDP2, full, shard
from tests.support.guards import assert_same_values
from tests.support.models import OddModel, build_model, float_batches, my_rows, token_batches
from tests.support.recorder import CollectiveRecorder
from tests.support.training import causal_loss, square_loss
from ya_fsdp import load_sharded_checkpoint, save_sharded_checkpoint

pytestmark = pytest.mark.skipif(ENGINE == FSDP2, reason="functions of ya_fsdp")


def groups(model):
    """Two groups with different options, matrices and the rest."""
    params = list(model.parameters())
    return [
        {"params": [p for p in params if p.dim() > 1], "weight_decay": 0.1, "lr": 0.02},
        {"params": [p for p in params if p.dim() <= 1], "weight_decay": 0.0, "lr": 0.01},
    ]


def build(case, seed, engine=ENGINE):
    if case == "odd":
        model, batches, loss_fn = OddModel(seed=seed), float_batches(3, width=5), square_loss
        shard(model, engine, units=list(model.blocks))
    else:
        model, batches, loss_fn = build_model("llama", seed=seed), token_batches(3), causal_loss
        shard(model, engine)
    return model, torch.optim.AdamW(groups(model), amsgrad=True), batches, loss_fn


def step(model, optimizer, batch, loss_fn):
    loss_fn(model, my_rows(batch, dist.get_rank(), dist.get_world_size())).backward()
    optimizer.step()
    optimizer.zero_grad()


def everything(model, optimizer):
    values = {}
    for name, parameter in model.named_parameters():
        values[name] = full(parameter)
        for key, value in sorted(optimizer.state[parameter].items()):
            values[f"{name}/{key}"] = full(value)
    return values


def trained(case, engine=ENGINE):
    model, optimizer, batches, loss_fn = build(case, 0, engine)
    for batch in batches[:2]:
        step(model, optimizer, batch, loss_fn)
    optimizer.param_groups[0]["lr"] = 0.015
    return model, optimizer, batches, loss_fn


def full_round_trip(case, from_rank0):
    model, optimizer, batches, loss_fn = trained(case)
    saved = everything(model, optimizer)
    state = ya_fsdp.get_full_state_dict(model, rank0_only=from_rank0)
    optim = ya_fsdp.get_full_optimizer_state_dict(model, optimizer, rank0_only=from_rank0)
    assert bool(state) == (not from_rank0 or dist.get_rank() == 0)
    other, fresh, _, _ = build(case, 1)
    ya_fsdp.load_full_state_dict(other, state, broadcast_from_rank0=from_rank0)
    ya_fsdp.load_full_optimizer_state_dict(other, fresh, optim, broadcast_from_rank0=from_rank0)
    assert_same_values(everything(other, fresh), saved, "loaded")
    options = [{k: v for k, v in group.items() if k != "params"} for group in fresh.param_groups]
    assert options == [{k: v for k, v in group.items() if k != "params"} for group in optimizer.param_groups]
    for m, o in ((model, optimizer), (other, fresh)):
        step(m, o, batches[2], loss_fn)
    assert_same_values(everything(other, fresh), everything(model, optimizer), "one step later")


@pytest.mark.parametrize("from_rank0", [True, False])
@pytest.mark.parametrize("case", ["odd", "llama"])
@pytest.mark.parametrize("world", [1, 2, 3])
def test_full_state_of_model_and_optimizer_comes_back_exactly(on_ranks, world, case, from_rank0):
    on_ranks(world, full_round_trip, case, from_rank0)


def sharded_save(case, folder):
    model, optimizer, _, _ = trained(case)
    with CollectiveRecorder() as recorder:
        save_sharded_checkpoint(f"{folder}/model", model)
        save_sharded_checkpoint(f"{folder}/optimizer", model, optimizer)
    tensors = [event for event in recorder.events if event.kind == "gather" and event.dtype == torch.float32]
    assert not tensors, "only the plan may travel, which is bytes and sizes"
    return everything(model, optimizer)


def sharded_load(case, folder, saved):
    model, optimizer, _, _ = build(case, 1)
    load_sharded_checkpoint(f"{folder}/model", model)
    load_sharded_checkpoint(f"{folder}/optimizer", model, optimizer)
    assert_same_values(everything(model, optimizer), saved, f"at {dist.get_world_size()} ranks")
    assert [group["lr"] for group in optimizer.param_groups] == [0.015, 0.01]


@pytest.mark.parametrize("case", ["odd", "llama"])
@pytest.mark.parametrize("world", [2, 1, 3, 4])
def test_sharded_checkpoint_gathers_nothing_and_loads_at_any_size(on_ranks, tmp_path, world, case):
    saved = on_ranks(2, sharded_save, case, str(tmp_path))[0]
    on_ranks(world, sharded_load, case, str(tmp_path), saved)


def save_from_fsdp2(folder):
    model, optimizer, _, _ = trained("llama", FSDP2)
    dcp.save({"model": get_model_state_dict(model)}, checkpoint_id=f"{folder}/model")
    dcp.save({"optimizer": get_optimizer_state_dict(model, optimizer)}, checkpoint_id=f"{folder}/optimizer")
    return everything(model, optimizer)


def load_in_fsdp2(folder, saved):
    model, optimizer, _, _ = build("llama", 1, FSDP2)
    state = {"model": get_model_state_dict(model)}
    optim = {"optimizer": get_optimizer_state_dict(model, optimizer)}
    dcp.load(state, checkpoint_id=f"{folder}/model")
    dcp.load(optim, checkpoint_id=f"{folder}/optimizer")
    set_state_dict(model, optimizer, model_state_dict=state["model"], optim_state_dict=optim["optimizer"])
    assert_same_values(everything(model, optimizer), saved, "in FSDP2")


@pytest.mark.parametrize("world", [1, 3])
def test_sharded_checkpoints_are_exchanged_with_fsdp2_moments_included(on_ranks, tmp_path, world):
    ours = on_ranks(2, sharded_save, "llama", str(tmp_path / "ours"))[0]
    on_ranks(world, load_in_fsdp2, str(tmp_path / "ours"), ours)
    theirs = on_ranks(2, save_from_fsdp2, str(tmp_path / "theirs"))[0]
    on_ranks(world, sharded_load, "llama", str(tmp_path / "theirs"), theirs)


def local_save(case):
    model, optimizer, _, _ = trained(case)
    with CollectiveRecorder() as recorder:
        state = ya_fsdp.get_local_state_dict(model)
        optim = ya_fsdp.get_local_optimizer_state_dict(model, optimizer)
    assert not recorder.events
    return state, optim, everything(model, optimizer)


def local_load(case, saved):
    state, optim, expected = saved[dist.get_rank() % len(saved)]
    model, optimizer, _, _ = build(case, 1)
    before = everything_of_model(model)
    if dist.get_world_size() != 2:
        for load in (
            lambda: ya_fsdp.load_local_state_dict(model, state),
            lambda: ya_fsdp.load_local_optimizer_state_dict(model, optimizer, optim),
        ):
            with pytest.raises(RuntimeError, match=rf"saved by 2 ranks .* loaded by {dist.get_world_size()}"):
                load()
        assert_same_values(everything_of_model(model), before, "refused")
        return
    ya_fsdp.load_local_state_dict(model, state)
    ya_fsdp.load_local_optimizer_state_dict(model, optimizer, optim)
    assert_same_values(everything(model, optimizer), expected, "local")


def everything_of_model(model):
    return {name: full(parameter) for name, parameter in model.named_parameters()}


@pytest.mark.parametrize("case", ["odd", "llama"])
@pytest.mark.parametrize("world", [2, 3])
def test_local_state_comes_back_on_the_same_number_of_ranks_only(on_ranks, world, case):
    on_ranks(world, local_load, case, on_ranks(2, local_save, case))


def refusals():
    model, optimizer, _, _ = trained("llama")
    state = ya_fsdp.get_full_state_dict(model, rank0_only=False)
    before = everything(model, optimizer)
    incomplete = {name: value for name, value in state.items() if name != "lm_head.weight"}
    with pytest.raises(RuntimeError, match=r"rank \d.*missing \['lm_head.weight'\]"):
        ya_fsdp.load_full_state_dict(model, incomplete)
    assert ya_fsdp.load_full_state_dict(model, incomplete, strict=False) == (["lm_head.weight"], [])
    grown = {**state, "lm_head.weight": torch.zeros(103, 40)}
    with pytest.raises(RuntimeError, match=r"lm_head.weight: \(103, 40\) for \(101, 40\)"):
        ya_fsdp.load_full_state_dict(model, grown, strict=False)
    optim = ya_fsdp.get_full_optimizer_state_dict(model, optimizer, rank0_only=False)
    optim["param_groups"] = optim["param_groups"][:1]
    with pytest.raises(RuntimeError, match="1 groups"):
        ya_fsdp.load_full_optimizer_state_dict(model, optimizer, optim)
    assert_same_values(everything(model, optimizer), before, "after refusals")
    stray = torch.optim.SGD([*model.parameters(), torch.nn.Parameter(torch.ones(3))], lr=0.1)
    with pytest.raises(ValueError, match=r"shape \(3,\)"):
        ya_fsdp.get_sharded_optimizer_state_dict(model, stray)


def test_state_that_does_not_fit_is_refused_before_anything_changes(on_ranks):
    on_ranks(2, refusals)


def selection():
    model, _, _, _ = trained("llama")
    for parameter in model.model.parameters():
        parameter.requires_grad_(False)
    state = ya_fsdp.get_full_state_dict(model, rank0_only=False, select=lambda name, value: value.requires_grad)
    assert set(state) == {"lm_head.weight"}
    zeros = {name: torch.zeros_like(value) for name, value in state.items()}
    ya_fsdp.load_full_state_dict(model, zeros, select=lambda name, value: value.requires_grad)
    assert not full(model.lm_head.weight).any()
    assert full(model.model.norm.weight).any()


def test_entries_can_be_selected(on_ranks):
    on_ranks(2, selection)
