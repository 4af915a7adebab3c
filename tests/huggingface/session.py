"""An ``Accelerator`` under the engine inside one job of the rank pools, and plain references to compare with."""

import contextlib
import os
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from tests.support.models import my_rows
from tests.support.training import causal_loss


@contextlib.contextmanager
def session(mixed_precision: str | None = None, cpu: bool = False, **variables: str) -> Iterator[Any]:
    """Yield an Accelerator as a launched script gets it.

    Args:
        mixed_precision: Passed to the Accelerator.
        cpu: Passed to the Accelerator; a script may ask for CPU or not.
        **variables: ``FSDP_*`` variables, as the launcher exports them.
    """
    rank, world_size = str(dist.get_rank()), str(dist.get_world_size())
    places = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": world_size, "LOCAL_WORLD_SIZE": world_size}
    before = dict(os.environ)
    os.environ.update({"FSDP_YA_FSDP_ENABLED": "true", "OMP_NUM_THREADS": "1", **places, **variables})
    import accelerate_plugin

    accelerate_plugin.install()
    from accelerate import Accelerator
    from accelerate.state import AcceleratorState, GradientState

    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()
    try:
        yield Accelerator(mixed_precision=mixed_precision, cpu=cpu)
    finally:
        AcceleratorState._reset_state(reset_partial_state=True)
        GradientState._reset_state()
        os.environ.clear()
        os.environ.update(before)


def two_groups(model: nn.Module) -> list[dict[str, Any]]:
    """Parameter groups as the Trainer makes them: decayed matrices, undecayed vectors, with different rates."""
    return [
        {"params": [p for p in model.parameters() if p.dim() > 1], "weight_decay": 0.1, "lr": 2e-3},
        {"params": [p for p in model.parameters() if p.dim() <= 1], "weight_decay": 0.0},
    ]


def plain_steps(
    model: nn.Module, optimizer: torch.optim.Optimizer, batches: list[torch.Tensor], scheduler: Any = None
) -> list[float]:
    """Train in one process on whole batches; return the losses."""
    losses = []
    for batch in batches:
        loss = causal_loss(model, batch)
        loss.backward()
        optimizer.step()
        if scheduler is not None:
            scheduler.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def accelerated_steps(
    accelerator: Any, model: nn.Module, optimizer: Any, batches: list[torch.Tensor], scheduler: Any = None
) -> list[float]:
    """The same steps, each rank on its rows; losses are averaged over ranks."""
    losses = []
    for batch in batches:
        loss = causal_loss(model, my_rows(batch, dist.get_rank(), dist.get_world_size()))
        accelerator.backward(loss)
        optimizer.step()
        if scheduler is not None:
            scheduler.step()
        optimizer.zero_grad()
        mean = loss.detach().clone()
        dist.all_reduce(mean)
        losses.append(mean.item() / dist.get_world_size())
    return losses


def assert_close_to(model: nn.Module, reference: nn.Module, atol: float) -> None:
    """Compare gathered parameters with a plain model's (collective)."""
    expected = dict(reference.named_parameters())
    for name, parameter in model.named_parameters():
        full = parameter.full_tensor() if hasattr(parameter, "full_tensor") else parameter
        torch.testing.assert_close(
            full.detach(), expected[name].detach(), atol=atol, rtol=0, msg=lambda m, n=name: f"{n}: {m}"
        )
