"""Several roots, such as the chunks of a pipeline stage, that share streams and gather buffers."""

import pytest
import torch
import torch.distributed as dist
from torch import nn

from tests.support.guards import assert_same_values
from tests.support.models import my_rows
from tests.support.training import adamw
from ya_fsdp import fully_shard, get_full_state_dict, share_comm_ctx

WIDTH = 12


def chunks() -> list[nn.Sequential]:
    torch.manual_seed(0)
    return [
        nn.Sequential(*[nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(4)]).double() for _ in range(2)
    ]


def sharded() -> list[nn.Sequential]:
    made = chunks()
    for chunk in made:
        for block in chunk:
            fully_shard(block)
        fully_shard(chunk, reshard_after_forward=True)
    return made


def gather_bytes(modules: list[nn.Sequential]) -> int:
    groups = [group for chunk in modules for block in chunk for group in block._get_fsdp_state().groups]
    buffers = {id(buffer): buffer for group in groups for buffer in group.buffers}
    return sum(buffer.live_nbytes for buffer in buffers.values())


def train() -> None:
    rank, world_size = dist.get_rank(), dist.get_world_size()
    plain, model, apart = chunks(), sharded(), sharded()
    share_comm_ctx(model)
    contexts = [chunk._get_fsdp_state().context for chunk in model]
    assert contexts[0] is not contexts[1]
    assert contexts[0].comm.runtime is contexts[1].comm.runtime
    expected = adamw([p for chunk in plain for p in chunk.parameters()])
    optimizer = adamw([p for chunk in model for p in chunk.parameters()])
    for step in range(4):
        batch = torch.randn(8, WIDTH, dtype=torch.float64, generator=torch.Generator().manual_seed(step))
        for modules, rows in ((plain, batch), (model, my_rows(batch, rank, world_size)), (apart, batch)):
            # The schedule of a pipeline: forwards of several micro-batches, then their backwards, chunk by chunk.
            ends = []
            for part in rows.chunk(2):
                middle = modules[0](part)
                start = middle.detach().requires_grad_()
                ends.append((middle, start, modules[1](start).square().mean() / 2))
            for chunk in modules if modules is not plain else []:
                chunk.set_is_last_backward(False)
            for number, (middle, start, loss) in enumerate(ends):
                if number == 1 and modules is not plain:
                    for chunk in modules:
                        chunk.set_is_last_backward(True)
                loss.backward()
                middle.backward(start.grad)
        expected.step()
        expected.zero_grad()
        optimizer.step()
        optimizer.zero_grad()
        assert 0 < gather_bytes(model) == gather_bytes(apart) // 2, "half as many buffers for twice as many roots"
    for chunk, reference in zip(model, plain, strict=True):
        full = get_full_state_dict(chunk, rank0_only=False)
        assert_same_values(full, dict(reference.state_dict()), f"rank {rank}", atol=1e-9)


def test_chunks_with_one_context_train_like_one_process_in_half_the_buffers(on_ranks):
    on_ranks(2, train)


def refuse() -> None:
    model = sharded()
    with pytest.raises(ValueError, match="lies inside of another"):
        share_comm_ctx([model[0], model[0][1]])
    model = sharded()
    model[1](torch.ones(1, WIDTH, dtype=torch.float64))
    with pytest.raises(ValueError, match="has run, or is part of a model that has"):
        share_comm_ctx(model)
    with pytest.raises(ValueError, match="expected modules sharded by ya_fsdp"):
        share_comm_ctx([nn.Linear(2, 2)])


def test_parts_of_one_another_and_late_calls_are_refused(on_ranks):
    on_ranks(2, refuse)
