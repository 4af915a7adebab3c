"""State dicts of the older wrapper: the names given, full and local, in both directions, whatever the padding."""

import pytest
import torch
import torch.distributed as dist

from tests.support.engines import full_parameters, shard
from tests.support.guards import assert_same_values
from tests.support.models import build_model, my_rows, token_batches
from tests.support.training import adamw, causal_loss
from tests.support.wrapping import wrap
from ya_fsdp import (
    YaFSDPModule,
    get_full_optimizer_state_dict,
    get_full_state_dict,
    get_sharded_state_dict,
    load_full_optimizer_state_dict,
    load_full_state_dict,
    load_sharded_checkpoint,
    memory_report,
    parameter_names,
    save_sharded_checkpoint,
)

#: Names of somebody's older checkpoints.
GIVEN = {"model.embed_tokens": "wte", "model.layers.1": "second", "model.norm": "last.norm", "lm_head": "out"}


def renamed(own):
    for path, name in GIVEN.items():
        if own.startswith(f"{path}."):
            return name + own.removeprefix(path)
    return own


def step(model, seed=0):
    optimizer = adamw(model.parameters())
    tokens = token_batches(1, rows=6, seed=seed)[0]
    causal_loss(model, my_rows(tokens, dist.get_rank(), dist.get_world_size())).backward()
    optimizer.step()
    return optimizer


def round_trip_full(name):
    rank = dist.get_rank()
    model = wrap(name)
    step(model)
    state = model.state_dict()
    everywhere = model.state_dict(rank0_only=False)
    plain = build_model(name, seed=1)
    assert plain.load_state_dict(everywhere, strict=True).missing_keys == []
    if rank == 0:
        assert list(state) == list(plain.state_dict())
        assert_same_values(state, everywhere, "on the first rank and everywhere")
        if name == "gpt2":
            tied = ("transformer.wte.weight", "lm_head.weight")
            assert state[tied[0]].data_ptr() == state[tied[1]].data_ptr(), "the tie takes no second copy"
    else:
        assert state == {}, f"rank {rank}: only the first rank keeps full tensors"
    expected = full_parameters(model.module)
    for given in (state, everywhere):
        other = wrap(build_model(name, seed=2))
        missing, unexpected = other.load_state_dict(given)
        assert missing == unexpected == []
        assert_same_values(full_parameters(other.module), expected, f"rank {rank}, {len(given)} entries here")
    tokens = token_batches(1, rows=2)[0]
    with torch.no_grad():
        torch.testing.assert_close(plain(input_ids=tokens).logits, model(input_ids=tokens).logits, atol=1e-5, rtol=0)


@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_a_full_state_dict_comes_back_and_loads_into_the_plain_model(on_ranks, name):
    on_ranks(2, round_trip_full, name)


def round_trip_local(name):
    model = wrap(name)
    step(model)
    state = model.local_state_dict()
    local = sum(value.numel() for value in state["tensors"].values())
    assert local < 0.6 * sum(value.numel() for value in build_model(name).state_dict().values())
    other = wrap(build_model(name, seed=2))
    other.load_state_dict(state)
    assert_same_values(full_parameters(other.module), full_parameters(model.module), "after local state")


@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_local_state_comes_back(on_ranks, name):
    on_ranks(2, round_trip_local, name)


def use_given_names(folder):
    rank = dist.get_rank()
    model = wrap(names=GIVEN)
    optimizer = step(model)
    own = build_model("llama").state_dict()
    names = [renamed(name) for name in own]
    assert "second.self_attn.q_proj.weight" in names
    everywhere = model.state_dict(rank0_only=False)
    assert list(everywhere) == names
    assert list(model.local_state_dict()["tensors"]) == names
    assert list(model.local_state_dict()["header"]["slices"]) == names
    # The engine's own functions see the wrapper as a model with these names.
    assert list(get_sharded_state_dict(model)) == names
    assert list(get_full_state_dict(model, rank0_only=False)) == names
    assert sorted(name for group in parameter_names(model, optimizer) for name in group) == sorted(names)
    assert memory_report(model) == memory_report(model.module)

    expected = full_parameters(model.module)
    moments = get_full_optimizer_state_dict(model, optimizer, rank0_only=False)
    assert set(moments["state"]) == set(names)
    save_sharded_checkpoint(folder, model)
    others = [wrap(build_model("llama", seed=seed), names=GIVEN) for seed in (1, 2, 3, 4)]
    others[0].load_state_dict(everywhere)
    others[1].load_state_dict(model.local_state_dict())
    load_full_state_dict(others[2], everywhere)
    load_sharded_checkpoint(folder, others[3])
    for other in others:
        assert_same_values(full_parameters(other.module), expected, f"rank {rank}")
    other_optimizer = step(others[0])
    load_full_optimizer_state_dict(others[0], other_optimizer, moments)
    again = get_full_optimizer_state_dict(others[0], other_optimizer, rank0_only=False)
    for name, values in moments["state"].items():
        assert_same_values(again["state"][name], values, name)

    wrong = dict(everywhere)
    wrong["model.layers.1.mlp.up_proj.weight"] = wrong.pop("second.mlp.up_proj.weight")
    before = full_parameters(others[0].module)
    with pytest.raises(RuntimeError, match=r"missing \['second.mlp.up_proj.weight'\], unexpected \['model.layers.1"):
        others[0].load_state_dict(wrong)
    assert_same_values(full_parameters(others[0].module), before, "after a refusal")
    missing, unexpected = others[0].load_state_dict(wrong, strict=False)
    assert missing == ["second.mlp.up_proj.weight"]
    assert unexpected == ["model.layers.1.mlp.up_proj.weight"]


def test_names_given_are_the_names_of_every_state_dict(on_ranks, tmp_path):
    on_ranks(2, use_given_names, str(tmp_path / "sharded"))


def refuse_states():
    rank = dist.get_rank()
    model = wrap()
    everywhere = model.state_dict(rank0_only=False)
    with pytest.raises(RuntimeError, match=r"got it on \[1\] of 2"):
        model.load_state_dict(everywhere if rank == 1 else {})
    with pytest.raises(RuntimeError, match="save its full state_dict"):
        model.load_state_dict({"main_parameter": torch.zeros(3), "layernorm_parameter": torch.zeros(3)})
    with pytest.raises(RuntimeError, match="missing"):
        model.load_state_dict({})
    local = model.local_state_dict()
    with pytest.raises(RuntimeError, match=f"rank {rank}: got the local state of rank {1 - rank}"):
        model.load_state_dict({**local, "header": {**local["header"], "rank": 1 - rank}})


def test_states_that_do_not_fit_are_refused(on_ranks):
    on_ranks(2, refuse_states)


def pieces_of(model):
    """Return the elements per rank of every bucket."""
    units = {id(m._get_fsdp_state()): m._get_fsdp_state() for m in model.modules() if isinstance(m, YaFSDPModule)}
    return [group.layout.shard_numel for state in units.values() for group in state.groups]


def exchange_over_paddings(folder):
    """The padding that yccl wants is there with and without it, so slices and checkpoints fit either way."""
    first, second = (
        wrap("gpt2", param_dtype=torch.bfloat16, use_yccl_padding=padding, bit16_reduce_scatter=True)
        for padding in (False, True)
    )
    optimizer = step(first)
    assert pieces_of(first.module) == pieces_of(second.module)
    assert all(numel * torch.bfloat16.itemsize % 16 == 0 for numel in pieces_of(first.module))
    assert first.local_state_dict()["header"] == second.local_state_dict()["header"]
    state, expected = first.state_dict(rank0_only=False), full_parameters(first.module)
    shapes = {name: value.shape for name, value in build_model("gpt2").state_dict().items()}
    assert {name: value.shape for name, value in state.items()} == shapes
    for given in (first.local_state_dict(), state):
        second.load_state_dict(build_model("gpt2", seed=9).state_dict())
        second.load_state_dict(given)
        assert_same_values(full_parameters(second.module), expected, "with and without padding")

    # Another padding altogether: checkpoints hold true shapes.
    wide = shard(build_model("gpt2", seed=9), shard_alignment=64)
    assert pieces_of(wide) != pieces_of(first.module)
    save_sharded_checkpoint(f"{folder}/model", first)
    save_sharded_checkpoint(f"{folder}/optimizer", first, optimizer)
    load_sharded_checkpoint(f"{folder}/model", wide)
    assert_same_values(full_parameters(wide), expected, "64 elements of alignment, sharded checkpoint")
    wide_optimizer = adamw(wide.parameters())
    load_sharded_checkpoint(f"{folder}/optimizer", wide, wide_optimizer)
    load_full_state_dict(wide, state)
    assert_same_values(full_parameters(wide), expected, "64 elements of alignment, full state")
    moments = [get_full_optimizer_state_dict(*pair) for pair in ((first, optimizer), (wide, wide_optimizer))]
    for name, values in moments[0].get("state", {}).items():
        assert_same_values(dict(sorted(moments[1]["state"][name].items())), dict(sorted(values.items())), name)


@pytest.mark.parametrize("world", [2, 3])
def test_checkpoints_do_not_depend_on_padding(on_ranks, world, tmp_path):
    on_ranks(world, exchange_over_paddings, str(tmp_path))


def stay_in_a_group():
    """Two groups train apart from one another; each has a first rank of its own."""
    rank = dist.get_rank()
    groups = [dist.new_group([member]) for member in range(2)]
    model = wrap(build_model("llama", seed=rank), data_parallel_process_group=groups[rank])
    assert_same_values(model.state_dict(), build_model("llama", seed=rank).state_dict(), f"rank {rank}")
    other = build_model("llama", seed=5 + rank).state_dict()
    model.load_state_dict(other)
    assert_same_values(model.state_dict(), other, f"rank {rank}, loaded")


def test_a_group_of_the_job_has_state_of_its_own(on_ranks):
    on_ranks(2, stay_in_a_group)
