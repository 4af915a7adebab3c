"""``reshard_after_forward=<number of ranks>``: between forward and backward, neighbours hold a unit together."""

import pytest
import torch
import torch.distributed as dist

from tests.support.guards import assert_same_numbers, assert_same_values
from tests.support.models import MlpStack, float_batches, my_rows
from tests.support.training import mean_over_ranks, sgd
from ya_fsdp import fully_shard, get_full_state_dict
from ya_fsdp.comm import ProcessGroupCollectives


class Spy:
    """A backend that notes the size of the group of every gather."""

    def __init__(self) -> None:
        self.gathers: list[int] = []

    def collectives(self, group):
        spy = self

        class Watched(ProcessGroupCollectives):
            def all_gather(self, output, piece, *, async_op):
                assert piece.numel() * self.world_size == output.numel()
                spy.gathers.append(self.world_size)
                return super().all_gather(output, piece, async_op=async_op)

        return Watched(group)


def train(size: int, num_forwards: int) -> None:
    rank, world_size = dist.get_rank(), dist.get_world_size()
    plain, model, spy = MlpStack(), MlpStack(), Spy()
    for block in model.blocks:
        fully_shard(block, reshard_after_forward=size, backend=spy)
    fully_shard(model, backend=spy)
    num_blocks = len(model.blocks)
    expected, optimizer = sgd(plain.parameters()), sgd(model.parameters())
    losses: tuple[list[float], list[float]] = ([], [])
    for batch in float_batches(4):
        loss = sum(plain(batch * scale).square().mean() for scale in range(1, num_forwards + 1))
        loss.backward()
        losses[0].append(float(loss.detach()))
        expected.step()
        expected.zero_grad()
        with torch.no_grad():
            model(my_rows(batch, rank, world_size))
        assert spy.gathers == [world_size] * num_blocks, "an evaluation keeps nothing"
        spy.gathers.clear()
        loss = sum(
            model(my_rows(batch, rank, world_size) * scale).square().mean() for scale in range(1, num_forwards + 1)
        )
        assert spy.gathers == [world_size] * num_blocks * num_forwards
        spy.gathers.clear()
        loss.backward()
        assert set(spy.gathers) == {size}, "the backward gathers among neighbours"
        assert len(spy.gathers) == num_blocks * num_forwards
        spy.gathers.clear()
        losses[1].append(mean_over_ranks(loss.detach()))
        optimizer.step()
        optimizer.zero_grad()
        held = [group._neighbours_piece for block in model.blocks for group in block._get_fsdp_state().groups]
        assert held == [None] * len(held), "pieces go with the backward"
    assert_same_numbers(losses[1], losses[0], "loss", atol=1e-6)
    assert_same_values(get_full_state_dict(model, rank0_only=False), dict(plain.state_dict()), "weights", atol=1e-6)


@pytest.mark.parametrize("num_forwards", [1, 2])
def test_backward_gathers_among_neighbours_and_trains_like_one_process(on_ranks, num_forwards):
    on_ranks(4, train, 2, num_forwards)


def whole_numbers() -> None:
    for size, kept in ((1, True), (4, False)):
        module = fully_shard(torch.nn.Linear(8, 8), reshard_after_forward=size)
        settings = module._get_fsdp_state().settings
        assert settings.reshard_group_size is None
        assert settings.reshard_after_forward is not kept
    for wrong in (3, 0, 8, 2.0):
        with pytest.raises(ValueError, match="divides the 4 ranks"):
            fully_shard(torch.nn.Linear(8, 8), reshard_after_forward=wrong)


def test_one_rank_keeps_all_ranks_reshard_and_other_numbers_are_refused(on_ranks):
    on_ranks(4, whole_numbers)
