"""Bytes: at initialisation, of gather buffers, at rest, and over many steps."""

import pytest
import torch
import torch.distributed as dist
from torch import nn

from tests.support.engines import ENGINE, FSDP2, local, shard
from tests.support.memory import PeakBytes, settled_tensor_bytes
from tests.support.models import MlpStack, float_batches, my_rows, tiny_llama, token_batches
from tests.support.training import adamw, causal_loss


class Wide(nn.Module):
    """Eight equal matrices in one unit."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(128, 128, bias=False) for _ in range(8))

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return x


def check_initialisation(dtype):
    model = Wide().to(dtype)
    size = sum(parameter.numel() * parameter.element_size() for parameter in model.parameters())
    largest = max(parameter.numel() * parameter.element_size() for parameter in model.parameters())
    share = size // dist.get_world_size()
    with PeakBytes(model) as peak:
        shard(model, units=[])
    assert peak.start == size
    extra = peak.peak - size
    assert extra <= share + largest + 4096, (
        f"rank {dist.get_rank()}: sharding took {extra} bytes beside the model's {size}, "
        f"expected the shard ({share}) and at most one parameter ({largest})"
    )
    rest = peak.current()
    assert rest <= 1.05 * share + 4096, f"rank {dist.get_rank()}: {rest} bytes are left, the shard has {share}"


@pytest.mark.parametrize("world", [2, 4])
def test_sharding_makes_no_second_copy_of_the_model(on_ranks, world):
    for dtype in (torch.float32, torch.bfloat16):
        on_ranks(world, check_initialisation, dtype)


def check_buffers(policy, element_size):
    from ya_fsdp import memory_report

    # The embedding and the head are each far larger than a block.
    model = tiny_llama(num_layers=6, vocab_size=3000)
    block = sum(parameter.numel() for parameter in model.model.layers[0].parameters())
    embedding = model.model.embed_tokens.weight.numel()
    assert embedding > 6 * block
    shard(model, mp=policy)
    in_blocks, in_head = [], []

    def look(into):
        def hook(*_):
            into.append(memory_report(model).buffers)

        return hook

    def watch(module, into):
        module.register_forward_hook(look(into))
        module.register_forward_hook(lambda _, args, output: output.register_hook(look(into)) and None)

    for index in (2, 3):
        watch(model.model.layers[index].mlp.up_proj, in_blocks)
    watch(model.lm_head, in_head)
    for tokens in token_batches(3):
        causal_loss(model, my_rows(tokens, dist.get_rank(), dist.get_world_size())).backward()
        in_blocks.append(memory_report(model).buffers)
    limit = 1.1 * 2 * block * element_size
    what = f"rank {dist.get_rank()}"
    assert max(in_blocks) <= limit, f"{what}: {max(in_blocks)} bytes of buffers inside blocks, expected {limit}"
    assert min(in_blocks[:2]) >= block * element_size, f"{what}: {in_blocks} does not count the block that runs"
    limit += 1.1 * embedding * element_size
    assert max(in_head) <= limit, f"{what}: {max(in_head)} bytes of buffers in the head, expected {limit}"


@pytest.mark.skipif(ENGINE == FSDP2, reason="asks this engine's report")
def test_shared_buffers_are_not_sized_by_the_embedding(on_ranks):
    on_ranks(2, check_buffers, None, 4)
    on_ranks(2, check_buffers, {"param_dtype": torch.bfloat16, "reduce_dtype": torch.float32}, 2)


def check_staging():
    """The head's gradient is reduced piece by piece: no fp32 copy of a whole embedding or head."""
    from ya_fsdp.runtime import reducer

    model = tiny_llama(num_layers=3, vocab_size=20000)
    head = model.lm_head.weight.numel()
    usual_limit, reducer.MAX_STAGING_BYTES = reducer.MAX_STAGING_BYTES, head * 4 // 8
    shard(model, mp={"param_dtype": torch.bfloat16, "reduce_dtype": torch.float32})
    tokens = my_rows(token_batches(1, rows=2, length=2)[0], dist.get_rank(), dist.get_world_size())
    causal_loss(model, tokens).backward()
    model.zero_grad()
    with PeakBytes(model) as peak:
        loss = causal_loss(model, tokens)
        loss.backward()
    reducer.MAX_STAGING_BYTES = usual_limit
    # Beside the shards: gradient shards of both matrices in fp32, one matrix gathered in bf16, its bf16 gradient.
    expected = 2 * (head * 4 // 2) + head * 2 + head * 2
    extra = peak.peak - peak.start
    assert extra < expected + head, f"rank {dist.get_rank()}: {extra} bytes in a step, expected about {expected}"


def at_rest():
    """Sum the bytes per rank, then watch them over steps with evaluation and a full state dict in between."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    model = MlpStack(num_blocks=4)
    shard(model, units=list(model.blocks))
    optimizer = adamw(model.parameters())
    seen = {}
    batches = float_batches(5)
    for step in range(1, 201):
        model(my_rows(batches[step % 5], rank, world_size)).square().mean().backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        if step == 25:
            state = {name: parameter.full_tensor() for name, parameter in model.named_parameters()}
            with torch.no_grad():
                model(batches[0])
            del state
        if step in (10, 24, 30, 50, 200):
            seen[step] = settled_tensor_bytes(seen.get(10))
    assert len(set(seen.values())) == 1, f"rank {rank}: live bytes at steps: {seen}"


def test_live_bytes_do_not_grow_over_steps(on_ranks):
    on_ranks(2, at_rest)


def check_report():
    from ya_fsdp import memory_report

    model = shard(tiny_llama())
    num_parameters = sum(parameter.numel() for parameter in model.parameters())
    optimizer = adamw(model.parameters())
    held = sum(local(parameter).numel() for parameter in model.parameters()) * 4
    report = memory_report(model, optimizer)
    assert report.num_parameters == num_parameters
    assert report.num_units == 5
    assert held <= report.parameters <= 1.05 * held
    assert report.gradients == 0
    assert report.optimizer == 0
    causal_loss(model, token_batches(1)[0]).backward()
    optimizer.step()
    report = memory_report(model, optimizer)
    assert held <= report.gradients <= 1.05 * held
    assert 2 * held <= report.optimizer <= 2.1 * held
    optimizer.zero_grad()
    assert memory_report(model, optimizer).gradients == 0


@pytest.mark.skipif(ENGINE == FSDP2, reason="asks this engine's report")
def test_report_counts_what_this_rank_holds(on_ranks):
    on_ranks(2, check_report)


@pytest.mark.skipif(ENGINE == FSDP2, reason="PyTorch's engine copies whole gradients")
def test_a_large_head_is_reduced_without_a_full_fp32_copy(on_ranks):
    on_ranks(2, check_staging)
