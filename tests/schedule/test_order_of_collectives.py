"""Which collectives a step issues, in which order, next to which computation."""

from functools import partial
from itertools import pairwise

import pytest
import torch
from torch import nn

from tests.schedule.fake_accelerator import NAME
from tests.schedule.scenarios import BF16, BLOCKS, UNITS, sharded

REDUCED = [name for name in reversed(UNITS) if name != "embedding"] + ["embedding"]


def moments_of_steps(device, world_size, num_steps, **options):
    """Return the moments of each step."""
    with sharded(device, world_size, **options) as run, run.watched():
        steps = []
        for _ in range(num_steps):
            run.step()
            steps.append(run.moments())
        return steps


def split(moments):
    """Return the moments of the forward and those of the backward."""
    end = moments.index(f"forward {UNITS[-1]}") + 1
    return moments[:end], moments[end:]


def names(moments, kind):
    """Return the units of one kind of moment, in order."""
    return [moment.split()[1] for moment in moments if moment.startswith(f"{kind} ")]


def check_counts(device, world_size, kept):
    for step, moments in enumerate(moments_of_steps(device, world_size, 3, kept=kept, policy=BF16)):
        forward, backward = split(moments)
        what = f"step {step} on {world_size} ranks, {kept} kept: {moments}"
        assert names(forward, "gather") == UNITS, what
        assert names(forward, "reduce") == [], what
        once = {*kept, "embedding"}  # the backward of an embedding reads no weights
        assert sorted(names(backward, "gather")) == sorted(set(UNITS) - once), what
        assert names(backward, "reduce") == REDUCED, what
        # One more for which parameters got a gradient at all.
        assert len(names(moments, "all-reduce")) == 1, what
        assert len(moments) == len(UNITS) * 4 - len(once) + len(UNITS) + 2, what


@pytest.mark.parametrize(("device", "world_size"), [("cpu", 2), ("cpu", 8), ("cpu", 1024), (NAME, 8)])
@pytest.mark.parametrize("kept", [("head",), (), tuple(UNITS)], ids=["head", "none", "all"])
def test_units_are_gathered_twice_or_once_if_kept_and_reduced_once(in_helper, device, world_size, kept):
    in_helper(check_counts, device, world_size, kept)


def check_forward_prefetch():
    first, second, third = (split(moments)[0] for moments in moments_of_steps("cpu", 8, 3))
    assert first == [m for name in UNITS for m in (f"gather {name}", f"forward {name}")], f"no forecast yet: {first}"
    expected = ["gather embedding"]
    for name, following in pairwise(UNITS):
        expected += [f"gather {following}", f"forward {name}"]
    expected.append(f"forward {UNITS[-1]}")
    assert second == expected, second
    assert third == expected, third


def test_forward_gathers_one_unit_ahead_from_the_second_step_on(in_helper):
    in_helper(check_forward_prefetch)


def check_backward_order():
    for moments in moments_of_steps("cpu", 8, 2):
        _, backward = split(moments)
        for position, name in enumerate(UNITS):
            computes, reduces = backward.index(f"backward {name}"), backward.index(f"reduce {name}")
            assert computes < reduces, backward
            if position > 1:
                previous = UNITS[position - 1]
                assert backward.index(f"gather {previous}") < computes, f"{previous} is not gathered ahead: {backward}"
            if position:
                assert reduces < backward.index(f"reduce {UNITS[position - 1]}"), backward
        assert names(backward, "backward") == UNITS[::-1], backward
        assert backward[-1] == "done", backward


def test_backward_gathers_one_unit_ahead_and_reduces_in_reverse(in_helper):
    in_helper(check_backward_order)


def check_ahead_is_bounded():
    """A look further ahead than the shared buffers allow would take memory or stall."""
    for moments in moments_of_steps("cpu", 8, 3, kept=()):
        forward, backward = split(moments)
        for phase, verb, order in ((forward, "forward", UNITS), (backward, "backward", UNITS[::-1])):
            for position, name in enumerate(order):
                gathered = names(phase[: phase.index(f"{verb} {name}")], "gather")
                assert len(gathered) <= position + 3, f"{verb} {name}: {gathered} are gathered already"
                needed = set(order[: position + 1]) - ({"embedding"} if verb == "backward" else set())
                assert needed <= set(gathered), f"{verb} {name}: {gathered}"


def test_no_more_than_two_units_are_gathered_ahead(in_helper):
    in_helper(check_ahead_is_bounded)


def check_same_order(kept):
    expected = moments_of_steps("cpu", 8, 3, kept=kept, policy=BF16)
    assert moments_of_steps(NAME, 8, 3, kept=kept, policy=BF16) == expected


@pytest.mark.parametrize("kept", [("head",), ()], ids=["head", "none"])
def test_cpu_and_accelerator_issue_the_same_in_the_same_order(in_helper, kept):
    in_helper(check_same_order, kept)


def check_prefetch_lists(device):
    with sharded(device) as run, run.watched():
        units = list(run.model.units().values())
        for index, unit in enumerate(units):
            unit.set_modules_to_forward_prefetch(units[index + 1 : index + 3])
            unit.set_modules_to_backward_prefetch(units[max(0, index - 2) : index][::-1])
        for step in range(2):
            run.step()
            moments = run.moments()
            forward, backward = split(moments)
            assert forward[:4] == [*(f"gather {name}" for name in UNITS[:3]), "forward embedding"], f"{step}: {forward}"
            for position, name in enumerate(UNITS):
                gathered = names(forward[: forward.index(f"forward {name}")], "gather")
                assert gathered == UNITS[: position + 3], f"step {step}, forward {name}: {gathered}"
            ahead = names(backward[: backward.index("backward head")], "gather")
            assert ahead[:2] == ["block3", "block2"], f"step {step}: {backward}"
            assert sorted(names(backward, "gather")) == sorted(BLOCKS), f"step {step}: {backward}"


@pytest.mark.parametrize("device", ["cpu", NAME])
def test_prefetch_lists_are_followed_from_the_first_step_on(in_helper, device):
    in_helper(check_prefetch_lists, device)


def check_no_sync():
    with sharded("cpu") as run, run.watched():
        run.model.set_requires_gradient_sync(False)
        for _ in range(2):
            run.forward_backward()
            moments = run.moments()
            assert names(moments, "reduce") == names(moments, "all-reduce") == [], moments
            assert len(names(moments, "gather")) == len(UNITS) + len(BLOCKS), moments
        run.model.set_requires_gradient_sync(True)
        run.forward_backward()
        assert names(run.moments(), "reduce") == REDUCED


def test_micro_batches_without_synchronisation_reduce_nothing(in_helper):
    in_helper(check_no_sync)


def check_kept_after_backward(make_optimizer, options):
    with sharded("cpu", kept=tuple(UNITS)) as run, run.watched():
        run.optimizer = make_optimizer(run.model.parameters(), **options)
        run.model.set_requires_gradient_sync(False)
        run.model.set_reshard_after_backward(False)
        run.forward_backward()
        assert names(run.moments(), "gather") == UNITS
        run.forward_backward()
        moments = run.moments()
        assert names(moments, "gather") == [], f"weights have not changed since: {moments}"
        run.model.set_requires_gradient_sync(True)
        run.step()
        run.moments()
        run.forward_backward()
        moments = run.moments()
        assert names(moments, "gather") == UNITS, f"the optimizer has changed the weights: {moments}"


@pytest.mark.parametrize("form", ["foreach", "fused", "for-loop"])
def test_units_kept_over_micro_batches_are_gathered_once_per_change_of_weights(in_helper, form):
    options = {"foreach": False} if form == "for-loop" else {form: True}
    in_helper(check_kept_after_backward, torch.optim.AdamW, {"lr": 0.1, **options})


def check_evaluation():
    with sharded("cpu", kept=()) as run, run.watched():
        run.step()
        run.moments()
        for _ in range(2):
            with torch.no_grad():
                run.model(run.tokens)
            moments = run.moments()
            assert names(moments, "gather") == UNITS, moments
            assert names(moments, "reduce") == names(moments, "all-reduce") == [], moments


def test_evaluation_gathers_every_unit_once_and_reduces_nothing(in_helper):
    in_helper(check_evaluation)


def check_block_not_gathered():
    with sharded("cpu", kept=()) as run, run.watched():
        run.model.blocks[1].set_unshard_in_backward(False)
        run.forward_backward()
        _, backward = split(run.moments())
        assert names(backward, "gather") == ["head", "block3", "block2", "block0"], backward
        assert "block1" in names(backward, "reduce"), backward


def test_a_unit_of_which_the_user_says_so_is_not_gathered_for_its_backward(in_helper):
    in_helper(check_block_not_gathered)


def uses_weight(embedding, tokens):
    """A forward that looks up and computes with the weight."""
    return nn.functional.embedding(tokens, embedding.weight) * embedding.weight.square().mean()


def change_embedding(embedding, change):
    if change == "hook":
        embedding.register_forward_hook(lambda module, args, output: output * module.weight.square().mean())
    elif change == "hook ahead":
        embedding.register_forward_pre_hook(lambda module, args: None)
    elif change == "forward":
        embedding.forward = partial(uses_weight, embedding)
    elif change == "renormalised":
        embedding.max_norm = 1.0
    elif change == "module inside":
        embedding.inside = nn.Identity()


def check_changed_embedding(change):
    with sharded("cpu", kept=()) as run, run.watched():
        run.forward_backward()
        _, backward = split(run.moments())
        assert "embedding" not in names(backward, "gather"), backward
        assert "embedding" in names(backward, "reduce"), backward
        change_embedding(run.model.embedding, change)
        run.forward_backward()
        _, backward = split(run.moments())
        assert "embedding" in names(backward, "gather"), f"its backward may read the weight now: {backward}"


@pytest.mark.parametrize("change", ["hook", "hook ahead", "forward", "renormalised", "module inside"])
def test_an_embedding_is_gathered_for_its_backward_only_if_something_may_read_its_weight(in_helper, change):
    in_helper(check_changed_embedding, change)
