"""Architectures beyond one: each trains as in a single process, with no setting, and is really sharded."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist

import ya_fsdp
from tests.families.models import FAMILIES, Batch
from tests.huggingface.session import assert_close_to, session
from tests.support.guards import assert_really_sharded
from tests.support.recorder import CollectiveRecorder
from tests.support.training import mean_over_ranks, total_norm

OnRanks = Callable[..., list[Any]]
STEPS = 3


def rows_of(batch: Batch, rank: int, world_size: int) -> Batch:
    """This rank's rows of a global batch."""
    return {name: values.chunk(world_size)[rank] for name, values in batch.items()}


def _trains(family_name: str) -> int:
    family = FAMILIES[family_name]
    reference = family.build()
    plain = torch.optim.SGD(reference.parameters(), lr=0.1)
    model = family.build(seed=dist.get_rank())  # rank 0's weights count
    with session() as accelerator:
        model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
        for step, batch in enumerate(family.batches(STEPS)):
            expected = reference(**batch).loss
            expected.backward()
            mine = rows_of(batch, dist.get_rank(), dist.get_world_size())
            with CollectiveRecorder() as recorder:
                loss = model(**mine).loss
                accelerator.backward(loss)
            assert_really_sharded(model, recorder, "ya_fsdp")
            assert mean_over_ranks(loss) == pytest.approx(expected.item(), rel=1e-5), f"loss of step {step}"
            assert total_norm(model) == pytest.approx(total_norm(reference), rel=1e-5), f"gradient norm of step {step}"
            for one in (plain, optimizer):
                one.step()
                one.zero_grad()
        assert_close_to(model, reference, atol=1e-5)
        if family.tied is not None:
            first, second = (model.get_submodule(name) for name in family.tied)
            assert first.weight is second.weight, "the tie is lost"
        return ya_fsdp.memory_report(model).num_units


@pytest.mark.parametrize("family", FAMILIES)
def test_a_family_trains_as_in_one_process_without_any_setting(on_ranks: OnRanks, family: str) -> None:
    for units in on_ranks(2, _trains, family):
        assert units == FAMILIES[family].units
