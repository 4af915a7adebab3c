"""The same training loop for one process and for a sharded engine."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import nn

from tests.support.engines import ENGINE, full, full_parameters
from tests.support.guards import assert_really_sharded, assert_same_on_all_ranks
from tests.support.models import my_rows
from tests.support.recorder import CollectiveRecorder

OptimizerFn = Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]
LossFn = Callable[[nn.Module, torch.Tensor], torch.Tensor]


@dataclass
class RunResult:
    """What a run produced.

    Attributes:
        losses: Loss of each step, averaged over the global batch, before the step.
        norms: Total gradient norm of each step, before clipping.
        parameters: Full parameters after the last step, by name.
    """

    losses: list[float] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)
    parameters: dict[str, torch.Tensor] = field(default_factory=dict)


def sgd(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    """Plain SGD: differences between runs are not magnified."""
    return torch.optim.SGD(parameters, lr=0.1)


def adamw(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    """AdamW with its usual settings."""
    return torch.optim.AdamW(parameters, lr=1e-3, weight_decay=0.01)


def causal_loss(model: nn.Module, tokens: torch.Tensor) -> torch.Tensor:
    """Mean next-token loss of a transformers model, in fp32, or in fp64 for an fp64 model."""
    logits = model(input_ids=tokens).logits[:, :-1]
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    return nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())


def square_loss(model: nn.Module, features: torch.Tensor) -> torch.Tensor:
    """Mean square of a model's output."""
    return model(features).float().square().mean()


def reference_run(
    model: nn.Module,
    make_optimizer: OptimizerFn,
    batches: list[torch.Tensor],
    *,
    loss_fn: LossFn = causal_loss,
    max_norm: float | None = None,
    norm_type: float = 2.0,
) -> RunResult:
    """Train an unsharded model in this process on whole global batches."""
    optimizer = make_optimizer(model.parameters())
    result = RunResult()
    for batch in batches:
        loss = loss_fn(model, batch)
        loss.backward()
        result.losses.append(loss.item())
        result.norms.append(total_norm(model, max_norm, norm_type))
        optimizer.step()
        optimizer.zero_grad()
    result.parameters = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    return result


def sharded_run(
    model: nn.Module,
    make_optimizer: OptimizerFn,
    batches: list[torch.Tensor],
    *,
    engine: str = ENGINE,
    loss_fn: LossFn = causal_loss,
    max_norm: float | None = None,
    norm_type: float = 2.0,
) -> RunResult:
    """Train a sharded model, each rank on its rows of the global batches; check that it is sharded.

    Only the first step is recorded, so that the recorder cannot be what makes the others work.
    """
    rank, world_size = dist.get_rank(), dist.get_world_size()
    optimizer = make_optimizer(model.parameters())
    result = RunResult()
    recorder = CollectiveRecorder()
    for step, batch in enumerate(batches):
        if step == 0:
            with recorder:
                loss = loss_fn(model, my_rows(batch, rank, world_size))
                loss.backward()
            assert_really_sharded(model, recorder, engine)
        else:
            loss = loss_fn(model, my_rows(batch, rank, world_size))
            loss.backward()
        result.losses.append(mean_over_ranks(loss))
        result.norms.append(total_norm(model, max_norm, norm_type))
        assert_same_on_all_ranks(result.norms[-1], f"gradient norm of step {step}")
        optimizer.step()
        optimizer.zero_grad()
    result.parameters = full_parameters(model)
    return result


def total_norm(model: nn.Module, max_norm: float | None = None, norm_type: float = 2.0) -> float:
    """Return the total gradient norm, and clip if a limit is given (collective for a sharded model)."""
    if max_norm is not None:
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm, norm_type)
    else:
        gradients = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
        norm = torch.nn.utils.get_total_norm(gradients, norm_type)
    return full(norm).item()


def mean_over_ranks(value: torch.Tensor) -> float:
    """Return the mean of a scalar over all ranks (collective)."""
    total = value.detach().clone()
    dist.all_reduce(total)
    return total.item() / dist.get_world_size()
