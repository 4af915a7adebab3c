"""Parameters that model parallelism has cut before: tensor parallel blocks and experts on ranks of their own."""

import copy

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from tests.support.guards import assert_same_numbers, assert_same_values
from ya_fsdp import RaggedShardDTensor, fully_shard, get_full_state_dict, load_full_state_dict

WIDTH, HIDDEN, EXPERTS, STEPS = 12, 14, 4, 5
LIMIT = 0.05


def blocks(kind: type[nn.Module]) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*[kind() for _ in range(3)]).double()


def batches() -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(4, WIDTH, generator=generator, dtype=torch.float64) for _ in range(STEPS)]


class Mlp(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, HIDDEN)
        self.down = nn.Linear(HIDDEN, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.tanh(self.up(self.norm(x))))


class Copy(torch.autograd.Function):
    """The same tokens go to every rank with experts; their gradients come back from all of them."""

    @staticmethod
    def forward(ctx, x, group):
        ctx.group = group
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        grad = grad.clone()
        dist.all_reduce(grad, group=ctx.group)
        return grad, None


class Join(torch.autograd.Function):
    """Adds up what the ranks' experts made of the tokens."""

    @staticmethod
    def forward(ctx, x, group):
        x = x.clone()
        dist.all_reduce(x, group=group)
        return x

    @staticmethod
    def backward(ctx, grad):
        return grad, None


class Moe(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.mix = nn.Linear(WIDTH, WIDTH)
        self.experts = nn.Parameter(torch.randn(EXPERTS, WIDTH, WIDTH) / 4)
        self.group: dist.ProcessGroup | None = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.mix(x)
        if self.group is None:
            return x + torch.tanh(y @ self.experts).sum(0)
        assert isinstance(self.experts, DTensor)
        assert self.experts.placements == (Shard(0),)
        return x + Join.apply(torch.tanh(Copy.apply(y, self.group) @ self.experts.to_local()).sum(0), self.group)


def train(model: nn.Module, data: list[torch.Tensor], average) -> tuple[list[float], list[float]]:
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses, norms = [], []
    for x in data:
        loss = model(x).square().mean()
        loss.backward()
        losses.append(average(loss.detach()))
        norms.append(float(nn.utils.clip_grad_norm_(model.parameters(), LIMIT)))
        optimizer.step()
        optimizer.zero_grad()
    return losses, norms


def compare(model: nn.Module, plain: nn.Module, replica: DeviceMesh) -> None:
    """Trains both on the same batches and compares losses, norms, weights, and a state dict that goes both ways."""
    rank, size = replica.get_local_rank(), replica.size()

    def average(loss: torch.Tensor) -> float:
        loss = loss.full_tensor() if isinstance(loss, DTensor) else loss
        dist.all_reduce(loss, group=replica.get_group())
        return float(loss) / size

    expected = train(plain, batches(), float)
    found = train(model, [x.chunk(size)[rank] for x in batches()], average)
    assert_same_numbers(found[0], expected[0], "loss", atol=1e-12)
    assert_same_numbers(found[1], expected[1], "gradient norm", atol=1e-12)
    full = get_full_state_dict(model, rank0_only=False)
    assert_same_values(full, dict(plain.state_dict()), "weights", atol=1e-12)
    load_full_state_dict(model, {name: value + 1 for name, value in full.items()})
    again = get_full_state_dict(model, rank0_only=False)
    assert_same_values(again, {name: value + 1 for name, value in full.items()}, "loaded weights", atol=0)


def tensor_parallel(replicated: bool) -> None:
    shape, names = ((2, 2), ("dp", "tp")) if not replicated else ((2, 1, 2), ("replicate", "dp", "tp"))
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=names)
    model = blocks(Mlp)
    plain = copy.deepcopy(model)
    for block in model:
        parallelize_module(block, mesh["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
        for name, value in list(block.norm.named_parameters()):
            block.norm.register_parameter(name, nn.Parameter(distribute_tensor(value, mesh["tp"], [Replicate()])))
        block.norm.register_forward_pre_hook(lambda m, args: (DTensor.from_local(args[0], mesh["tp"], [Replicate()]),))
        block.norm.register_forward_hook(lambda m, args, out: out.to_local())
        fully_shard(block, mesh=mesh["replicate", "dp"] if replicated else mesh["dp"])
    fully_shard(model, mesh=mesh["replicate", "dp"] if replicated else mesh["dp"])
    weight = model[0].up.weight
    assert isinstance(weight, RaggedShardDTensor)
    assert weight.shape == (HIDDEN, WIDTH)
    assert weight.placements[-1] == Shard(0)
    held = sum(p.to_local().numel() for p in model.parameters()) / sum(p.numel() for p in plain.parameters())
    assert held < (0.4 if not replicated else 0.7), f"this rank holds {held:.0%}"
    compare(model, plain, mesh["replicate" if replicated else "dp"])


@pytest.mark.parametrize("replicated", [False, True])
def test_tensor_parallel_blocks_train_like_one_process(on_ranks, replicated):
    on_ranks(4, tensor_parallel, replicated)


def expert_parallel() -> None:
    from torch.distributed.fsdp._fully_shard._fsdp_common import FSDPMeshInfo, ShardPlacementResult

    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("efsdp", "ep"))
    everyone = mesh._flatten("dp")
    info = FSDPMeshInfo(mesh["efsdp"], 0)
    model = blocks(Moe)
    plain = copy.deepcopy(model)
    for block in model:
        block.experts = nn.Parameter(distribute_tensor(block.experts.data, mesh["ep"], [Shard(0)]))
        block.group = mesh["ep"].get_group()
        choose = {block.experts: ShardPlacementResult(Shard(1), info)}
        fully_shard(block, mesh=everyone, shard_placement_fn=choose.get)
    fully_shard(model, mesh=everyone)
    assert model[0].experts._spec.mesh.mesh_dim_names == ("efsdp", "ep")
    assert model[0].mix.weight._spec.mesh.size() == 4
    compare(model, plain, mesh["efsdp"])


def test_experts_on_a_mesh_of_their_own_train_like_one_process(on_ranks):
    on_ranks(4, expert_parallel)


def checkpoint(folder: str) -> None:
    import torch.distributed.checkpoint as dcp

    from ya_fsdp.state_dict import load_sharded_checkpoint, save_sharded_checkpoint

    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    model = blocks(Mlp)
    values = {name: value.clone() for name, value in model.state_dict().items()}
    for block in model:
        parallelize_module(block, mesh["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
        fully_shard(block, mesh=mesh["dp"])
    save_sharded_checkpoint(folder, model)
    plain = {"model": {name: torch.zeros_like(value) for name, value in values.items()}}
    dcp.load(plain, checkpoint_id=folder)
    assert_same_values(plain["model"], values, "checkpoint in plain tensors", atol=0)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    load_sharded_checkpoint(folder, model)
    assert_same_values(get_full_state_dict(model, rank0_only=False), values, "checkpoint loaded again", atol=0)


def test_checkpoint_of_tensor_parallel_blocks_has_the_true_shapes(on_ranks, tmp_path):
    on_ranks(4, checkpoint, str(tmp_path))


def refuse() -> None:
    experts = init_device_mesh("cpu", (2,), mesh_dim_names=("ep",))
    module = nn.Linear(4, 4, bias=False)
    module.weight = nn.Parameter(distribute_tensor(module.weight.data, experts, [Shard(0)]))
    with pytest.raises(ValueError, match=r"weight is a DTensor on .* slices of one DeviceMesh"):
        fully_shard(module, mesh=init_device_mesh("cpu", (1, 2), mesh_dim_names=("a", "b"))["b"])


def test_meshes_that_do_not_belong_together_are_refused(on_ranks):
    on_ranks(2, refuse)
