"""Prefetch lists: gathers start earlier, none is added, and gradients stay the same."""

import torch
import torch.distributed as dist
from torch import nn

from tests.support.engines import full_gradients, shard
from tests.support.guards import assert_same_values
from tests.support.models import Mlp, float_batches, my_rows
from tests.support.recorder import GATHER, CollectiveRecorder


class Uneven(nn.Module):
    """Blocks of different sizes, so that a gather can be told by its bytes."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(Mlp(10, hidden) for hidden in (10, 20, 30, 40, 50))

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return x


class Timeline(CollectiveRecorder):
    """Collects, in order: ``("gather", i)`` and the moments ``("forward", i)``, ``("backward", i)`` of the blocks."""

    def __init__(self, model):
        super().__init__()
        self.moments = []
        sizes = [sum(parameter.numel() for parameter in block.parameters()) * 4 for block in model.blocks]
        self.sizes = sizes
        for index, block in enumerate(model.blocks):
            block.up.register_forward_pre_hook(lambda *_, index=index: self.moments.append(("forward", index)))
            block.up.register_forward_hook(lambda module, args, output, index=index: self._watch(output, index))

    def _watch(self, output, index):
        if output.requires_grad:
            output.register_hook(lambda _: self.moments.append(("backward", index)))

    def _record(self, func, args):
        before = len(self.events)
        super()._record(func, args)
        for event in self.events[before:]:
            if event.kind == GATHER:
                # Padding adds a little: the unit is the largest one that fits.
                index = max(i for i, size in enumerate(self.sizes) if size <= event.num_bytes)
                self.moments.append((GATHER, index))


def run(forward_ahead, backward_ahead):
    batch = float_batches(1)[0]
    plain = Uneven()
    plain(batch).square().mean().backward()
    expected = {name: parameter.grad for name, parameter in plain.named_parameters()}
    model = Uneven()
    shard(model, units=list(model.blocks), reshard_after_forward=True)
    blocks = list(model.blocks)
    for index, block in enumerate(blocks):
        if forward_ahead is not None:
            block.set_modules_to_forward_prefetch(blocks[index + 1 : index + 1 + forward_ahead])
        if backward_ahead is not None:
            block.set_modules_to_backward_prefetch(blocks[max(0, index - backward_ahead) : index][::-1])
    timeline = Timeline(model)
    rows = my_rows(batch, dist.get_rank(), dist.get_world_size())
    for step in range(2):
        timeline.moments.clear()
        with timeline:
            model(rows).square().mean().backward()
        what = f"prefetch {forward_ahead} ahead in forward, {backward_ahead} in backward, step {step}"
        assert_same_values(full_gradients(model), expected, what, atol=1e-6)
        gathers = [index for kind, index in timeline.moments if kind == GATHER]
        assert sorted(gathers) == sorted([*range(5), *range(5)]), f"{what}: gathered {gathers}"
        model.zero_grad()
    return timeline.moments


def gathers_before(moments, moment):
    """Return which units were gathered in the same phase before a moment."""
    phase_start = 0 if moment[0] == "forward" else max(i for i, m in enumerate(moments) if m[0] == "forward") + 1
    return [index for kind, index in moments[phase_start : moments.index(moment)] if kind == GATHER]


def check_lists():
    for ahead in (1, 2, 3):
        moments = run(ahead, ahead)
        assert gathers_before(moments, ("forward", 0)) == list(range(ahead + 1)), moments
        found = gathers_before(moments, ("backward", 4))
        assert found == list(range(4, 3 - ahead, -1)), f"{ahead} ahead: {moments}"


def check_none():
    """An empty list turns forward prefetch off: a unit is gathered when its own turn has come."""
    moments = run(0, None)
    for index in range(5):
        assert gathers_before(moments, ("forward", index)) == list(range(index + 1)), moments


def check_default():
    """Without a list the backward looks one unit ahead."""
    moments = run(None, None)
    assert gathers_before(moments, ("backward", 4))[:2] == [4, 3], moments
    assert gathers_before(moments, ("backward", 3))[:3] == [4, 3, 2], moments


def test_lists_start_gathers_earlier_and_add_none(on_ranks):
    on_ranks(2, check_lists)


def test_an_empty_list_turns_forward_prefetch_off(on_ranks):
    on_ranks(2, check_none)


def test_backward_looks_one_unit_ahead_by_default(on_ranks):
    on_ranks(2, check_default)
