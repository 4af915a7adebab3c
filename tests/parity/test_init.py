"""What ``fully_shard`` makes of a module: its class, what its parameters are when, its state; on meta, after casts."""

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from tests.support.engines import ENGINE, FSDP2, engine_module, full_gradients, full_parameters, mesh_1d, shard
from tests.support.guards import assert_same_values
from tests.support.models import Mlp, MlpStack, float_batches, my_rows
from ya_fsdp import load_full_state_dict


def fully_shard(module, **options):
    return engine_module().fully_shard(module, **options)


def rows_of(batch):
    return my_rows(batch, dist.get_rank(), dist.get_world_size())


def check_classes():
    model = nn.Sequential(Mlp(10, 14), Mlp(10, 14), Mlp(10, 14))
    for part in model:
        fully_shard(part)
    fully_shard(model)
    assert isinstance(model, (nn.Sequential, FSDPModule))
    assert type(model).__name__ == "FSDPSequential"
    assert type(model[0]).__name__ == "FSDPMlp"
    assert not isinstance(model[0].up, FSDPModule), "only the module passed changes its class"
    assert not isinstance(model[:2], FSDPModule), "a slice of a Sequential is a plain Sequential"
    assert isinstance(model[:2], nn.Sequential)
    states = {id(fully_shard_state(module)) for module in [model, *model]}
    assert len(states) == 4, "each call makes a unit"
    assert fully_shard_state(model[0].up) is None
    with pytest.raises((ValueError, AssertionError), match=r"once|already"):
        fully_shard(model)
    for container in (nn.ModuleList([Mlp(10, 14)]), nn.ModuleDict({"a": Mlp(10, 14)})):
        with pytest.raises(ValueError, match="forward"):
            fully_shard(container)


def fully_shard_state(module):
    return engine_module().fully_shard.state(module)


def test_classes_slices_and_states(on_ranks):
    on_ranks(2, check_classes)


class Shows(Mlp):
    """Notes what its weights are while it runs."""

    def forward(self, x):
        self.seen = [type(parameter) for parameter in self.parameters()]
        return super().forward(x)


class ShowsAll(MlpStack):
    def __init__(self):
        super().__init__()
        self.bias = nn.Parameter(torch.zeros(10))
        for block in self.blocks:
            block.__class__ = Shows

    def forward(self, x):
        self.seen = [type(self.bias)]
        return super().forward(x + self.bias)


def check_registered():
    for option in (True, False, None):
        model = ShowsAll()
        shard(model, units=list(model.blocks), reshard_after_forward=option)
        before = dict(model.named_parameters())
        assert all(isinstance(parameter, DTensor) for parameter in before.values())
        loss = model(rows_of(float_batches(1)[0])).square().mean()
        assert all(kind is nn.Parameter for module in [model, *model.blocks] for kind in module.seen)
        for block in model.blocks:
            assert {isinstance(p, DTensor) for p in block.parameters()} == {option is not False}, option
        assert isinstance(model.bias, DTensor) == (option is True), f"root with reshard_after_forward={option}"
        loss.backward()
        after = dict(model.named_parameters())
        assert all(after[name] is parameter for name, parameter in before.items()), "other objects after a step"
        assert list(after) == list(before)


def test_modules_show_sharded_parameters_at_rest_and_full_ones_at_work(on_ranks):
    on_ranks(2, check_registered)


class Sharing(nn.Module):
    """One module in two places, a parameter and a buffer in two modules."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = Mlp(10, 14), Mlp(10, 14)
        self.again = self.first
        self.second.up.weight = self.first.up.weight
        self.first.register_buffer("offset", torch.ones(10))
        self.second.register_buffer("offset", self.first.offset)

    def forward(self, x):
        return self.again(self.second(self.first(x)) + self.second.offset)


def check_sharing():
    batch = float_batches(1)[0]
    plain, model = Sharing(), Sharing()
    fully_shard(model, mesh=mesh_1d())
    assert model.first is model.again
    assert model.first.up.weight is model.second.up.weight
    assert model.first.offset is model.second.offset
    assert len(list(model.parameters())) == len(list(plain.parameters())) == 7
    plain(batch).square().mean().backward()
    model(rows_of(batch)).square().mean().backward()
    expected = {name: parameter.grad for name, parameter in plain.named_parameters()}
    assert_same_values(full_gradients(model), expected, "gradients", atol=1e-5)


def test_shared_modules_parameters_and_buffers_stay_shared(on_ranks):
    on_ranks(2, check_sharing)


def check_cast():
    batch = float_batches(1)[0].double()
    plain, model = MlpStack().double(), MlpStack()
    shard(model, units=list(model.blocks))
    model.to(torch.float64)
    assert {parameter.dtype for parameter in model.parameters()} == {torch.float64}
    for _ in range(2):
        plain(batch).square().mean().backward()
        model(rows_of(batch)).square().mean().backward()
    expected = {name: parameter.grad for name, parameter in plain.named_parameters()}
    assert_same_values(full_gradients(model), expected, "gradients", atol=1e-9)


def test_a_model_may_be_cast_after_sharding(on_ranks):
    on_ranks(2, check_cast)


def check_meta(is_hybrid):
    """Only rank 0 has values."""
    world_size = dist.get_world_size()
    names = ("replicate", "shard")
    mesh = init_device_mesh("cpu", (world_size // 2, 2), mesh_dim_names=names) if is_hybrid else mesh_1d()
    source = MlpStack(seed=3)
    with torch.device("meta"):
        model = MlpStack()
    shard(model, units=list(model.blocks), mesh=mesh)
    assert all(parameter.is_meta for parameter in model.parameters())
    model.to_empty(device="cpu")
    load_full_state_dict(model, source.state_dict() if dist.get_rank() == 0 else {}, broadcast_from_rank0=True)
    expected = {name: parameter.detach() for name, parameter in source.named_parameters()}
    assert_same_values(full_parameters(model), expected, "weights")
    batch = float_batches(1)[0]
    torch.testing.assert_close(model(batch), source(batch), atol=1e-6, rtol=0)


@pytest.mark.skipif(ENGINE == FSDP2, reason="loads with this engine's function")
@pytest.mark.parametrize(("world", "is_hybrid"), [(2, False), (4, True)])
def test_a_meta_model_takes_the_weights_of_rank_zero(on_ranks, world, is_hybrid):
    on_ranks(world, check_meta, is_hybrid)


def check_meshes():
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("outer", "inner"))
    model = fully_shard(Mlp(10, 14), mesh=mesh["inner"])
    assert next(model.parameters()).device_mesh == mesh["inner"]
    assert sum(p.to_local().numel() for p in model.parameters()) < 0.7 * sum(p.numel() for p in model.parameters())
    with pytest.raises((ValueError, RuntimeError), match=r"[Mm]esh"):
        fully_shard(Mlp(10, 14), mesh=init_device_mesh("cpu", (2, 2, 1), mesh_dim_names=("a", "b", "c")))
    default = fully_shard(Mlp(10, 14))
    assert next(default.parameters()).device_mesh.size() == 4


@pytest.mark.parametrize("world", [4])
def test_meshes_are_taken_or_refused(on_ranks, world):
    on_ranks(world, check_meshes)


def check_part_of_the_model():
    """A unit may be run, and its backward too, without the root around it; then with it."""
    batch = float_batches(1)[0]
    plain, model = MlpStack(), MlpStack()
    shard(model, units=list(model.blocks))
    for call in (lambda each: each.blocks[1], lambda each: each, lambda each: each.blocks[0]):
        call(plain)(batch).square().mean().backward()
        call(model)(rows_of(batch)).square().mean().backward()
        expected = {name: parameter.grad for name, parameter in plain.named_parameters()}
        assert_same_values(full_gradients(model), expected, "gradients", atol=1e-5)


@pytest.mark.skipif(ENGINE == FSDP2, reason="PyTorch's engine wants the root to run first")
def test_a_unit_runs_without_its_root(on_ranks):
    on_ranks(2, check_part_of_the_model)
