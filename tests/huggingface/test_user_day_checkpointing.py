"""Every switch of activation checkpointing recomputes the blocks it names, with the same dropout, and nothing else."""

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from tests.huggingface.session import session
from tests.support.engines import full_gradients
from tests.support.guards import assert_same_values
from tests.support.models import build_model, my_rows, token_batches
from tests.support.recorder import GATHER, CollectiveRecorder
from tests.support.training import causal_loss

OnRanks = Callable[..., list[Any]]
SWITCH, COUNT = "FSDP_ACTIVATION_CHECKPOINTING", "FSDP_NUM_LAYERS_TO_CHECKPOINT"
# What is switched on, and how many of the three blocks run forward twice.
SWITCHES: list[tuple[dict[str, str], str, int]] = [
    ({SWITCH: "true"}, "", 3),
    ({COUNT: "0"}, "", 0),
    ({COUNT: "1"}, "", 1),
    ({COUNT: "3"}, "", 3),
    ({SWITCH: "true", "FSDP_ACTIVATION_CHECKPOINTING_OFFLOAD": "true"}, "", 3),
    ({}, "reentrant", 3),
    ({}, "not reentrant", 3),
]
UNITS = {"llama": 5, "gpt2": 5}


def _blocks(model: nn.Module) -> list[nn.Module]:
    return list(model.model.layers if hasattr(model, "model") else model.transformer.h)  # type: ignore[union-attr, arg-type]


def _steps(
    name: str, variables: dict[str, str], own: str, precision: str | None, changes: dict[str, Any]
) -> tuple[list[float], list[dict[str, Any]], list[int], int]:
    """Two steps; returns losses, gradients, how often each block's inside ran in a step, and gathers in the second."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    model = build_model(name, **changes)
    if own:
        model.gradient_checkpointing_enable({"use_reentrant": own == "reentrant"})  # type: ignore[operator]
        model.enable_input_require_grads()  # type: ignore[operator]
    runs: Counter[int] = Counter()
    losses, gradients = [], []
    with session(precision, **variables) as accelerator:
        model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
        for index, block in enumerate(_blocks(model)):
            first = next(iter(block.children()))
            first.register_forward_pre_hook(lambda module, args, i=index: runs.update([i]))
        for step, batch in enumerate(token_batches(2)):
            runs.clear()
            torch.manual_seed(100 * step + rank)  # the masks of dropout differ between ranks
            with CollectiveRecorder() as recorder:
                loss = causal_loss(model, my_rows(batch, rank, world_size))
                accelerator.backward(loss)
            gradients.append(full_gradients(model))
            losses.append(loss.item())
            optimizer.step()
            optimizer.zero_grad()
    return losses, gradients, [runs[index] for index in range(len(_blocks(model)))], recorder.count(GATHER)


def _compare(name: str, variables: dict[str, str], own: str, precision: str | None, dropout: float, twice: int) -> None:
    changes: dict[str, Any] = {}
    if dropout:
        changes = {"attn_pdrop": dropout, "resid_pdrop": dropout, "embd_pdrop": dropout, "n_layer": 3}
    losses, gradients, once, _ = _steps(name, {}, "", precision, changes)
    assert once == [1, 1, 1]
    found, found_gradients, runs, gathers = _steps(name, variables, own, precision, changes)
    assert runs == [2] * twice + [1] * (3 - twice)
    tolerance = 1e-6 if precision is None else 1e-3
    assert found == pytest.approx(losses, abs=tolerance)
    for step, (actual, expected) in enumerate(zip(found_gradients, gradients, strict=True)):
        assert_same_values(actual, expected, f"gradients of step {step}", atol=tolerance, rtol=tolerance)
    if not own:
        assert gathers <= 2 * UNITS[name], "at most two gathers per unit and step"


@pytest.mark.parametrize("precision", [None, "bf16"])
@pytest.mark.parametrize(("variables", "own", "twice"), SWITCHES)
def test_recomputation_changes_no_number(
    on_ranks: OnRanks, variables: dict[str, str], own: str, twice: int, precision: str | None
) -> None:
    on_ranks(2, _compare, "llama", variables, own, precision, 0.0, twice)


@pytest.mark.parametrize(("variables", "own", "twice"), [SWITCHES[0], SWITCHES[2], SWITCHES[5], SWITCHES[6]])
def test_dropout_draws_the_same_masks_again(on_ranks: OnRanks, variables: dict[str, str], own: str, twice: int) -> None:
    on_ranks(2, _compare, "gpt2", variables, own, None, 0.3, twice)
