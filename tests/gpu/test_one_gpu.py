"""On a machine with a GPU: one rank over NCCL, streams and events for real. Skipped, and said so, elsewhere."""

import socket

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from tests.support.models import build_model, token_batches
from tests.support.training import causal_loss
from ya_fsdp import MixedPrecisionPolicy, fully_shard, get_full_state_dict, memory_report

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device, and this machine has none"),
]


@pytest.fixture
def mesh():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    torch.cuda.set_device(0)
    dist.init_process_group("nccl", init_method=f"tcp://127.0.0.1:{port}", rank=0, world_size=1)
    yield init_device_mesh("cuda", (1,))
    dist.destroy_process_group()


def sharded_llama(mesh, **options):
    model = build_model("llama", seed=0).cuda()
    for unit in [model.model.embed_tokens, *model.model.layers]:
        fully_shard(unit, mesh=mesh, **options)
    fully_shard([model.model.norm, model.lm_head], mesh=mesh, **options)
    return fully_shard(model, mesh=mesh, **options)


def losses_of(model, batches):
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    losses = []
    for batch in batches:
        loss = causal_loss(model, batch.cuda())
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def test_training_equals_the_plain_model(mesh):
    batches = token_batches(8)
    found = losses_of(sharded_llama(mesh), batches)
    expected = losses_of(build_model("llama", seed=0).cuda(), batches)
    assert found == pytest.approx(expected, abs=1e-5)


def test_bf16_compute_keeps_fp32_shards_and_full_values_come_back(mesh):
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    model = sharded_llama(mesh, mp_policy=policy)
    found = losses_of(model, token_batches(4))
    assert all(parameter.dtype == torch.float32 for parameter in model.parameters())
    assert found == pytest.approx(losses_of(build_model("llama", seed=0).cuda(), token_batches(4)), rel=2e-2)
    assert all(value.device.type == "cpu" for value in get_full_state_dict(model).values())


def test_memory_is_flat_over_steps_and_gone_with_the_model(mesh):
    torch.cuda.empty_cache()
    before = torch.cuda.memory_allocated()
    model = sharded_llama(mesh)
    losses_of(model, token_batches(3))
    live = torch.cuda.memory_allocated()
    losses_of(model, token_batches(10))
    assert torch.cuda.memory_allocated() == live
    assert memory_report(model).gradients == 0
    del model
    assert torch.cuda.memory_allocated() <= before + 2**20
