"""Mixtures of experts: ranks may use other experts, and some experts nobody uses."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from tests.families.models import FAMILIES
from tests.families.test_families import rows_of
from tests.huggingface.session import session
from tests.support.engines import full_gradients, plain_gradients
from tests.support.guards import assert_same_values

OnRanks = Callable[..., list[Any]]
MIXTURES = ["mixtral", "qwen2_moe", "qwen3_moe"]
# Experts of the first and the second half of the rows; number 3 is never chosen.
CHOICES = ([0, 1], [1, 2])


def _bias_routers(model: nn.Module, halves: tuple[list[int], ...]) -> int:
    """Makes every router choose by row: as many equal parts of the tokens as there are choices."""

    def choose(module: nn.Module, args: Any, output: Any) -> Any:
        logits, scores, indices = output
        rows = [torch.tensor(half).expand(len(indices) // len(halves), 2) for half in halves]
        chosen = torch.cat(rows)
        return logits, logits.float().softmax(-1).gather(1, chosen).to(scores.dtype), chosen

    routers = [module for module in model.modules() if type(module).__name__.endswith("Router")]
    for router in routers:
        router.register_forward_hook(choose)
    return len(routers)


def _other_experts_on_other_ranks(family_name: str) -> None:
    family = FAMILIES[family_name]
    batch = family.batches(1)[0]
    reference, model = family.build(), family.build()
    assert _bias_routers(reference, CHOICES) == 2
    reference(**batch).loss.backward()
    rank = dist.get_rank()
    _bias_routers(model, (CHOICES[rank],))
    with session() as accelerator:
        model = accelerator.prepare(model)
        accelerator.backward(model(**rows_of(batch, rank, dist.get_world_size())).loss)
        gradients = full_gradients(model)
    assert_same_values(gradients, plain_gradients(reference), "gradients", atol=1e-6)
    experts = [value for name, value in gradients.items() if "mlp.experts" in name]
    assert len(experts) == 4
    for value in experts:
        assert value is not None
        used = [bool(part.any()) for part in value]
        assert used == [True, True, True, False], "one rank's experts are averaged in, nobody's are zero"


@pytest.mark.parametrize("family", MIXTURES)
def test_experts_get_the_average_of_the_ranks_that_use_them(on_ranks: OnRanks, family: str) -> None:
    on_ranks(2, _other_experts_on_other_ranks, family)
