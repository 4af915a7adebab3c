"""A small model with units of all kinds, and the comparison of its gradients with one process, in fp64."""

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from tests.support.engines import full_gradients, shard
from tests.support.guards import assert_same_values
from tests.support.models import Mlp, float_batches, my_rows

WIDTH = 10


class Model(nn.Module):
    """A first layer, blocks and a head, so that units of all kinds take part."""

    def __init__(self, make_block: Callable[[int, int], nn.Module] = Mlp) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(make_block(WIDTH, 14) for _ in range(3))
        self.head = nn.Linear(WIDTH, 3)

    def units(self) -> list[nn.Module]:
        """Return the units below the root, inner ones first."""
        return [self.first, *self.blocks, self.head]

    def forward(self, x: torch.Tensor) -> Any:
        """Map ``[rows, 10]`` to ``[rows, 3]``."""
        x = torch.tanh(self.first(x))
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def mean_square(tensor: torch.Tensor) -> torch.Tensor:
    """Return the mean over rows of the squares, added up over columns; ranks' average is that of the batch."""
    return tensor.square().mean(0).sum()


def rows_of(batch: torch.Tensor) -> torch.Tensor:
    """Return this rank's rows."""
    return my_rows(batch, dist.get_rank(), dist.get_world_size())


def sharded(build: Callable[[], Any], **options: Any) -> Any:
    """Return a sharded model in fp64."""
    model = build().double()
    return shard(model, units=model.units(), **options)


def compare(
    build: Callable[[], Any],
    backward: Callable[[Any, torch.Tensor], None],
    *,
    reshard: tuple[bool | int | None, ...] = (True, False, None),
    steps: int = 2,
    **options: Any,
) -> None:
    """Run a backward on a plain model and on sharded ones, several times each, and compare gradients to nine digits.

    Args:
        build: Makes the model.
        backward: Runs forward and backward of a model on rows.
        reshard: Values of ``reshard_after_forward``.
        steps: How often.
        **options: Further arguments of ``fully_shard``.
    """
    batch = float_batches(1)[0].double()
    plain = build().double()
    backward(plain, batch)
    expected = {name: parameter.grad for name, parameter in plain.named_parameters()}
    assert any(gradient is not None and gradient.any() for gradient in expected.values())
    for option in reshard:
        model = sharded(build, reshard_after_forward=option, **options)
        for step in range(steps):
            backward(model, rows_of(batch))
            what = f"reshard_after_forward={option}, step {step}, rank {dist.get_rank()}"
            assert_same_values(full_gradients(model), expected, what, atol=1e-9)
            model.zero_grad()
