"""What one training step sends, in numbers and bytes."""

import pytest
import torch
import torch.distributed as dist

from tests.support.engines import ENGINE, FSDP2, shard, units_of
from tests.support.models import build_model, my_rows, token_batches
from tests.support.recorder import ALL_REDUCE, GATHER, REDUCE_SCATTER, CollectiveRecorder
from tests.support.training import adamw, causal_loss

#: Elements by which a parameter or a rank's piece may be padded.
ALIGNMENT = 8
#: Units whose backward reads no weights: the embedding, which PyTorch's engine gathers all the same.
NOT_READ_IN_BACKWARD = 0 if ENGINE == FSDP2 else 1


def sizes_of_units(model):
    """Return elements and number of parameters of each unit, smallest first."""
    sizes = []
    for unit in units_of(model):
        parameters = [p for module in (unit if isinstance(unit, list) else [unit]) for p in module.parameters()]
        sizes.append((sum(parameter.numel() for parameter in parameters), len(parameters)))
    return sorted(sizes)


def assert_padded_sizes(events, sizes, element_size, what):
    """Check that the collectives carry the units' bytes and padding, no more."""
    found = sorted(event.num_bytes for event in events)
    assert len(found) == len(sizes), f"{what}: {len(found)} collectives, expected {len(sizes)}"
    for num_bytes, (numel, num_parameters) in zip(found, sizes, strict=True):
        limit = numel + ALIGNMENT * (num_parameters + 2 * dist.get_world_size())
        if ENGINE == FSDP2:
            limit = 1.5 * numel  # it pads every parameter to a multiple of the ranks
        assert numel * element_size <= num_bytes <= limit * element_size, (
            f"{what}: {num_bytes} bytes for {numel} elements, expected at most {limit * element_size}"
        )
    assert len({event.dtype for event in events}) == 1


def count_step(reshard_after_forward, policy):
    rank, world_size = dist.get_rank(), dist.get_world_size()
    model = build_model("llama")
    sizes = sizes_of_units(model)
    num_units = len(sizes)
    shard(model, reshard_after_forward=reshard_after_forward, mp=policy)
    optimizer = adamw(model.parameters())
    wire = torch.float32 if policy is None else policy["param_dtype"]
    for step, tokens in enumerate(token_batches(3)):
        what = f"rank {rank} of {world_size}, reshard_after_forward={reshard_after_forward}, {wire}, step {step}"
        with CollectiveRecorder() as recorder:
            recorder.phase = "forward"
            loss = causal_loss(model, my_rows(tokens, rank, world_size))
            recorder.phase = "backward"
            loss.backward()
            recorder.phase = "optimizer"
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
        assert_padded_sizes(recorder.of(GATHER, "forward"), sizes, wire.itemsize, f"gathers in forward, {what}")
        assert all(event.dtype == wire for event in recorder.of(GATHER)), what
        expected = num_units - NOT_READ_IN_BACKWARD if reshard_after_forward else 0
        assert recorder.count(GATHER, "backward") == expected, f"{what}: {recorder.count(GATHER, 'backward')} gathers"
        assert_padded_sizes(recorder.of(REDUCE_SCATTER), sizes, 4, f"reductions, {what}")
        assert recorder.count(REDUCE_SCATTER, "backward") == num_units
        # One for the norm, and one flag per parameter after the backward: has any rank a gradient for it?
        num_norms = 0 if ENGINE == FSDP2 else 1  # PyTorch's norm stays sharded until somebody reads it
        assert recorder.count(ALL_REDUCE, "optimizer") == num_norms, f"{what}: {recorder.of(ALL_REDUCE)}"
        flags = recorder.of(ALL_REDUCE, "backward")
        num_parameters = sum(num for _, num in sizes)
        assert [event.num_bytes for event in flags] in ([], [4 * num_parameters]), f"{what}: {flags}"
        num_known = recorder.count(GATHER) + recorder.count(REDUCE_SCATTER) + recorder.count(ALL_REDUCE)
        assert len(recorder.events) == num_known, f"{what}: also sent {recorder.events}"


def count_all():
    for reshard_after_forward in (True, False):
        for policy in (None, {"param_dtype": torch.bfloat16, "reduce_dtype": torch.float32}):
            count_step(reshard_after_forward, policy)


@pytest.mark.parametrize("world", [2, 3])
def test_a_step_gathers_twice_or_once_and_reduces_once_per_unit(on_ranks, world):
    on_ranks(world, count_all)


def count_reshard_switch():
    """``set_reshard_after_forward`` changes the number of gathers for the next step."""
    model = build_model("llama")
    shard(model, reshard_after_forward=True)
    tokens = token_batches(1)[0]
    twice = 2 * 5 - NOT_READ_IN_BACKWARD
    for value, expected in ((True, twice), (False, 5), (True, twice)):
        model.set_reshard_after_forward(value)
        for _ in range(2):
            with CollectiveRecorder() as recorder:
                causal_loss(model, tokens).backward()
            assert recorder.count(GATHER) == expected, f"{value}: {recorder.count(GATHER)} gathers"


def test_reshard_after_forward_can_be_switched_between_steps(on_ranks):
    on_ranks(2, count_reshard_switch)
