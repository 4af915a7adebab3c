"""A sharded parameter as a tensor: operators, conversions, pickling, initialisers, and refusals that help."""

import copy
import io

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor, Replicate, Shard

from tests.support.engines import ENGINE, FSDP2, mesh_1d
from ya_fsdp import RaggedShardDTensor, fully_shard

pytestmark = pytest.mark.skipif(ENGINE == FSDP2, reason="the type of ya_fsdp")


def build():
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Linear(5, 7), nn.LayerNorm(7), nn.Linear(7, 3))
    sharded = copy.deepcopy(plain)
    fully_shard(sharded, mesh=mesh_1d())
    return sharded, plain


def full(value):
    return value.full_tensor() if isinstance(value, DTensor) else value


ELEMENTWISE = {
    "abs": torch.abs,
    "sqrt": lambda t: t.abs().sqrt(),
    "sign": torch.sign,
    "compare": lambda t: t > 0,
    "where": lambda t: torch.where(t > 0, t, torch.zeros(())),
    "clamp": lambda t: t.clamp(min=0.1),
    "lerp": lambda t: t.lerp(t * 2, 0.5),
    "scalar first": lambda t: 1 - t,
    "masked fill": lambda t: t.masked_fill(t > 0, 3.0),
    "to bf16": lambda t: t.to(torch.bfloat16),
    "to fp64": lambda t: t.double(),
    "zeros_like": torch.zeros_like,
    "full_like": lambda t: torch.full_like(t, 2.5),
    "isfinite": torch.isfinite,
}
REDUCTIONS = {
    "sum": torch.sum,
    "mean": torch.mean,
    "max": torch.max,
    "min": torch.min,
    "any": lambda t: (t > 0).any(),
    "all": lambda t: (t > 0).all(),
    "std": torch.std,
    "var of the population": lambda t: t.var(correction=0),
    "norm 1": lambda t: torch.linalg.vector_norm(t, 1),
    "norm 2": torch.norm,
    "norm inf": lambda t: torch.linalg.vector_norm(t, float("inf")),
    "norm 0": lambda t: torch.linalg.vector_norm(t, 0),
    "sum of rows": lambda t: t.sum(dim=-1),
    "mean of columns": lambda t: t.mean(dim=0, keepdim=True),
    "norm of rows": lambda t: torch.norm(t, dim=-1, keepdim=True),
    "sum in fp64": lambda t: t.sum(dtype=torch.float64),
}


def operators():
    sharded, plain = build()
    for place in (0, 2):
        mine, whole = sharded[place].weight.detach(), plain[place].weight.detach()
        for name, op in ELEMENTWISE.items():
            result = op(mine)
            assert type(result) is RaggedShardDTensor, name
            assert torch.equal(full(result), op(whole)), name
        for name, op in REDUCTIONS.items():
            result, expected = op(mine), op(whole)
            assert type(result) is torch.Tensor, name
            torch.testing.assert_close(result, expected, msg=name)
        assert torch.equal(full(mine + whole), whole * 2), "a full operand is sliced"
        assert torch.equal(mine, mine.clone())
        assert torch.allclose(mine, mine + 1e-9)
        assert not torch.equal(mine, mine + 1)
        assert bool((mine.sum() - whole.sum()).abs() < 1e-5)
        into = whole.clone()
        into.add_(mine)
        assert torch.equal(into, whole * 2), "written into a plain tensor"


@pytest.mark.parametrize("world", [1, 2, 3])
def test_operators_equal_those_of_the_full_tensor(on_ranks, world):
    on_ranks(world, operators)


def conversions():
    sharded, plain = build()
    weight, whole = sharded[0].weight, plain[0].weight.detach()
    for placement in (Replicate(), Shard(0), Shard(1)):
        converted = weight.detach().redistribute(placements=[placement])
        assert type(converted) is DTensor
        assert converted.placements == (placement,)
        assert torch.equal(full(converted), whole)
        target = torch.zeros_like(weight.detach())
        target.copy_(converted)
        assert torch.equal(full(target), whole), f"back from {placement}"
    for weights_only in (True, False):
        file = io.BytesIO()
        torch.save({"one": weight, "all": sharded.state_dict()}, file)
        file.seek(0)
        loaded = torch.load(file, weights_only=weights_only)
        assert isinstance(loaded["one"], nn.Parameter)
        assert type(loaded["one"]) is RaggedShardDTensor
        assert loaded["one"].placements == weight.placements
        assert torch.equal(full(loaded["one"].detach()), whole)
        assert torch.equal(full(loaded["all"]["2.bias"]), plain[2].bias.detach())
    twin = copy.deepcopy(weight)
    with torch.no_grad():
        twin.zero_()
    assert isinstance(twin, nn.Parameter)
    assert torch.equal(full(weight.detach()), whole), "copies do not share memory"
    weight.data = weight.data * 2
    assert torch.equal(full(weight.detach()), whole * 2)
    with torch.no_grad():
        plain[0].weight.mul_(2)
        torch.testing.assert_close(sharded(torch.ones(1, 5)), plain(torch.ones(1, 5)))
    with pytest.raises(ValueError, match=r"torch.float64 tensor of shape \(7, 5\)"):
        weight.data = weight.data.double()


@pytest.mark.parametrize("world", [1, 2])
def test_conversions_keep_values(on_ranks, world):
    on_ranks(world, conversions)


def gradients():
    sharded, plain = build()
    rank, world = dist.get_rank(), dist.get_world_size()
    weight = sharded[0].weight
    (torch.ones(2, 5) * (rank + 1) @ weight.full_tensor().T).sum().backward()
    mean = sum(2.0 * (r + 1) for r in range(world)) / world
    assert torch.allclose(full(weight.grad), torch.full((7, 5), mean))
    weight.grad = None
    (weight.norm() + (weight**2).sum()).backward()
    whole = plain[0].weight
    (whole.norm() + (whole**2).sum()).backward()
    torch.testing.assert_close(full(weight.grad), whole.grad)


def test_gradients_flow_through_full_tensor_and_reductions(on_ranks):
    on_ranks(2, gradients)


INITIALISERS = [
    nn.init.xavier_uniform_,
    nn.init.kaiming_uniform_,
    nn.init.trunc_normal_,
    nn.init.normal_,
    nn.init.zeros_,
    lambda t: t.detach().uniform_(-1, 1),
    lambda t: t.detach().copy_(torch.randn_like(t)),
]


def initialise():
    sharded, plain = build()
    for initialiser in INITIALISERS:
        torch.manual_seed(7)
        initialiser(sharded[0].weight)
        torch.manual_seed(7)
        initialiser(plain[0].weight)
        assert torch.equal(full(sharded[0].weight.detach()), plain[0].weight.detach()), initialiser
    with torch.device("meta"):
        meta = nn.Sequential(nn.Linear(5, 7), nn.LayerNorm(7), nn.Linear(7, 3))
    fully_shard(meta, mesh=mesh_1d())
    meta.to_empty(device="cpu")
    for model in (meta, plain):
        torch.manual_seed(3)
        for layer in model:
            layer.reset_parameters()
    for name, parameter in meta.named_parameters():
        assert torch.equal(full(parameter.detach()), plain.get_parameter(name).detach()), name
    x = torch.ones(2, 5)
    torch.testing.assert_close(meta(x), plain(x))


@pytest.mark.parametrize("world", [1, 2, 3])
def test_initialisers_give_the_same_numbers_at_every_world_size(on_ranks, world):
    on_ranks(world, initialise)


def refusals():
    weight = build()[0][0].weight.detach()
    for op in (
        lambda: weight.T,
        lambda: weight @ torch.ones(5),
        lambda: weight[0],
        lambda: weight.view(-1),
        lambda: torch.cat([weight, weight]),
        lambda: weight + torch.ones(5),
        lambda: nn.init.orthogonal_(weight),
    ):
        with pytest.raises(RuntimeError, match=r"aten\..*full shape|aten\..*full_tensor\(\)|does not line up"):
            op()
    with pytest.raises(ValueError, match="expects Replicate or Shard"):
        weight.redistribute(placements=[type(weight.placements[0])(8, 8)])


def test_what_has_no_meaning_on_a_slice_names_the_operator_and_the_alternative(on_ranks):
    on_ranks(2, refusals)
