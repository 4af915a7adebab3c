"""A small model in the units of a transformer, sharded over ranks that do not exist, and its training step."""

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.device_mesh import init_device_mesh

from tests.schedule.fake_accelerator import NAME, fake_ranks
from tests.schedule.timeline import Timeline
from ya_fsdp import MixedPrecisionPolicy, OffloadPolicy, fully_shard

WIDTH = 8
#: Sizes of the blocks, the embedding and the head, per rank: they differ by more than what padding can hide.
HIDDEN, VOCABULARY, CLASSES = (2, 3, 4, 5), 16, 20
BLOCKS = [f"block{i}" for i in range(len(HIDDEN))]
UNITS = ["embedding", *BLOCKS, "head"]
BF16 = {"param_dtype": torch.bfloat16, "reduce_dtype": torch.float32}


class Block(nn.Module):
    """A residual block; blocks differ in size, so that a collective tells whose it is."""

    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, hidden)
        self.down = nn.Linear(hidden, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(self.up(x).relu())


class Model(nn.Module):
    """Embedding, blocks and head.

    Args:
        scale: Number of ranks.
    """

    def __init__(self, scale: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY * scale, WIDTH)
        self.blocks = nn.ModuleList(Block(hidden * scale) for hidden in HIDDEN)
        self.head = nn.Linear(WIDTH, CLASSES * scale)
        self.embedded = lambda x: None  # a hook on the embedding itself might read its weight, for all the engine knows

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens)
        self.embedded(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x)  # type: ignore[no-any-return]

    def units(self) -> dict[str, nn.Module]:
        """Return the units below the root, in forward order."""
        return dict(zip(UNITS, [self.embedding, *self.blocks, self.head], strict=True))


class Run:
    """A sharded model and a timeline of what it does.

    Args:
        device: ``cpu`` or the fake accelerator.
        world_size: Number of ranks; this process is rank 0.
        policy: Arguments of the mixed precision policy.
        kept: Names of the units with ``reshard_after_forward=False``.
        mesh_shape: Shape of the mesh, by default one axis.
        frozen: Whether the first layer of each block is frozen, which gives blocks two buckets.
        offload: Where shards live.
        backend: Who communicates.
    """

    def __init__(
        self,
        device: str,
        world_size: int,
        policy: dict[str, Any],
        kept: tuple[str, ...],
        mesh_shape: tuple[int, ...] | None,
        frozen: bool,
        offload: OffloadPolicy,
        backend: Any,
    ) -> None:
        self.timeline = Timeline(device)
        options: Any = {
            "mesh": init_device_mesh(device, mesh_shape or (world_size,)),
            "mp_policy": MixedPrecisionPolicy(**policy),
            "offload_policy": offload,
            "backend": backend,
        }
        self.device = torch.device(device)
        with contextlib.ExitStack() as stack:
            self._modes(stack)
            with self.device:
                self.model: Any = Model(world_size)
            for block in self.model.blocks:
                block.up.requires_grad_(not frozen)
            for name, unit in self.model.units().items():
                fully_shard(unit, reshard_after_forward=name not in kept, **options)
            fully_shard(self.model, **options)
            self.tokens = torch.zeros(2, 5, dtype=torch.long, device=self.device)
        for name, unit in self.model.units().items():
            for group in unit._get_fsdp_state().groups:
                self.timeline.names[group.layout.padded_numel] = name
            self._mark(name, unit)
        assert frozen or len(self.timeline.names) == len(UNITS), "two units of one size"
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1, foreach=True)

    def _modes(self, stack: contextlib.ExitStack) -> None:
        if self.device.type == NAME:
            stack.enter_context(FakeTensorMode(allow_non_fake_inputs=True))
        stack.enter_context(self.timeline)

    def _mark(self, name: str, unit: nn.Module) -> None:
        """Note when a unit computes, behind the engine's hooks: on its first layer's input and its output."""
        timeline = self.timeline
        layer = unit.up if isinstance(unit, Block) else unit

        def enter(*_: Any) -> None:
            timeline.moment(f"forward {name}")

        def leave(module: nn.Module, args: Any, output: torch.Tensor) -> None:
            if output.requires_grad:
                output.register_hook(lambda _: timeline.moment(f"backward {name}"))

        if unit is self.model.embedding:
            timeline.labels["embedding"] = f"forward {name}"
            self.model.embedded = lambda output: leave(unit, None, output)
            return
        layer.register_forward_pre_hook(enter)
        (unit.down if isinstance(unit, Block) else unit).register_forward_hook(leave)

    @contextlib.contextmanager
    def watched(self) -> Iterator[Timeline]:
        """Record while the context is open."""
        with contextlib.ExitStack() as stack:
            self._modes(stack)
            yield self.timeline

    def forward_backward(self) -> None:
        """Run one micro-batch; call it while watched."""
        self.model(self.tokens).float().sum().backward()
        self.timeline.moment("done")

    def step(self) -> None:
        """Run one training step; call it while watched."""
        self.forward_backward()
        self.optimizer.step()
        self.optimizer.zero_grad()

    def moments(self) -> list[str]:
        """Return and forget the moments so far."""
        moments, self.timeline.moments = self.timeline.moments, []
        return moments


@contextlib.contextmanager
def sharded(
    device: str = NAME,
    world_size: int = 8,
    policy: dict[str, Any] | None = None,
    kept: tuple[str, ...] = ("head",),
    mesh_shape: tuple[int, ...] | None = None,
    frozen: bool = False,
    offload: OffloadPolicy = OffloadPolicy(),  # noqa: B008 (frozen)
    backend: Any = None,
) -> Iterator[Run]:
    """Shard the model on ranks that do not exist; see :class:`Run`."""
    with fake_ranks(world_size):
        yield Run(device, world_size, policy or {}, kept, mesh_shape, frozen, offload, backend)
