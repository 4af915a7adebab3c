"""Optimizers of torch, in every implementation, update sharded parameters as they update plain ones."""

import pytest
import torch

from tests.support.engines import ENGINE, FSDP2, shard
from tests.support.guards import assert_same_values
from tests.support.models import MlpStack, OddModel, float_batches
from tests.support.training import reference_run, sharded_run, square_loss

OPTIMIZERS = {
    "AdamW, loop": lambda p: torch.optim.AdamW(p, lr=1e-3, foreach=False),
    "AdamW, foreach": lambda p: torch.optim.AdamW(p, lr=1e-3, foreach=True),
    "AdamW, fused": lambda p: torch.optim.AdamW(p, lr=1e-3, fused=True),
    "AdamW, amsgrad, loop": lambda p: torch.optim.AdamW(p, lr=1e-3, amsgrad=True, foreach=False),
    "AdamW, amsgrad, foreach": lambda p: torch.optim.AdamW(p, lr=1e-3, amsgrad=True, foreach=True),
    "Adam, maximize": lambda p: torch.optim.Adam(p, lr=1e-3, weight_decay=0.1, maximize=True),
    "SGD, loop": lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9, weight_decay=0.1, foreach=False),
    "SGD, foreach": lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9, nesterov=True, foreach=True),
    "SGD, fused": lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9, fused=True),
    "Adagrad, loop": lambda p: torch.optim.Adagrad(p, lr=1e-2, foreach=False),
    "Adagrad, foreach": lambda p: torch.optim.Adagrad(p, lr=1e-2, foreach=True),
    "Adagrad, fused": lambda p: torch.optim.Adagrad(p, lr=1e-2, fused=True),
    "Adafactor": lambda p: torch.optim.Adafactor(p, lr=1e-2),
    "RMSprop, loop": lambda p: torch.optim.RMSprop(p, lr=1e-3, momentum=0.5, foreach=False),
}


def train(name, build, width):
    make_optimizer = OPTIMIZERS[name]
    batches = float_batches(4, width=width)
    model = build()
    shard(model, units=list(model.blocks))
    found = sharded_run(model, make_optimizer, batches, loss_fn=square_loss)
    expected = reference_run(build(), make_optimizer, batches, loss_fn=square_loss)
    assert_same_values(found.parameters, expected.parameters, name, atol=1e-4)
    start = dict(build().named_parameters())
    moved = [key for key, value in found.parameters.items() if not torch.equal(value, start[key])]
    assert moved == [key for key, value in start.items() if value.numel()], f"{name} moved only {moved}"


@pytest.mark.parametrize("name", list(OPTIMIZERS))
def test_optimizer_updates_equal_one_process(on_ranks, name):
    on_ranks(2, train, name, MlpStack, 10)


@pytest.mark.parametrize("name", ["AdamW, loop", "AdamW, foreach", "AdamW, fused", "SGD, loop", "Adagrad, loop"])
@pytest.mark.parametrize("world", [3])
@pytest.mark.skipif(ENGINE == FSDP2, reason="PyTorch's engine refuses scalar parameters")
def test_optimizers_work_on_ranks_with_nothing(on_ranks, world, name):
    on_ranks(world, train, name, OddModel, 5)


def schedule():
    """A state that is saved and loaded through the optimizer's own methods stays on its parameters."""
    model = MlpStack()
    shard(model, units=list(model.blocks))
    optimizer = torch.optim.AdamW(
        [{"params": model.blocks[0].parameters(), "lr": 0.1}, {"params": model.blocks[1].parameters(), "lr": 0.0}]
    )
    before = {name: parameter.full_tensor() for name, parameter in model.named_parameters()}
    batch = float_batches(1)[0]
    model(batch).square().mean().backward()
    optimizer.step()
    for name, parameter in model.named_parameters():
        moved = not torch.equal(parameter.full_tensor(), before[name])
        assert moved == name.startswith("blocks.0"), f"{name} {'moved' if moved else 'stayed'}"
    state = optimizer.state_dict()
    optimizer.load_state_dict(state)
    for parameter in model.blocks[0].parameters():
        assert optimizer.state[parameter]["exp_avg"].shape == parameter.shape


def test_parameter_groups_keep_their_settings(on_ranks):
    on_ranks(2, schedule)
