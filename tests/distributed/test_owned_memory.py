"""Backends that own memory: what they hand out is gathered into, once per buffer, and trains like ordinary memory."""

import pytest
import torch
import torch.distributed as dist

from tests.support import fake_yccl
from tests.support.engines import full_parameters, shard
from tests.support.guards import assert_same_numbers, assert_same_values
from tests.support.models import build_model, token_batches
from tests.support.recorder import GATHER, REDUCE_SCATTER, CollectiveRecorder
from tests.support.training import adamw, causal_loss, sgd, sharded_run
from tests.support.wrapping import wrap
from ya_fsdp import SymmetricMemoryBackend, YCCLBackend
from ya_fsdp.comm.symmetric import SymmetricMemoryCollectives

BF16 = torch.bfloat16


def train(model, num_steps=3, steps=1):
    optimizer = sgd(model.parameters())
    losses = []
    for batch in token_batches(num_steps, rows=8):
        for rows in batch.chunk(2)[dist.get_rank()].chunk(steps):
            loss = causal_loss(model, rows)
            loss.backward()
        losses.append(loss.item())
        optimizer.step()
        optimizer.zero_grad()
    return losses


def train_through_yccl(stage):
    options = {"param_dtype": BF16, "zero_stage": stage}
    plain = wrap(**options)
    expected = train(plain)
    with fake_yccl.installed() as handles:
        model = wrap(**options, use_yccl=True, yccl_intra_inter_expr="rank // 2 + 3, rank % 2")
        (handle,) = handles
        assert handle.colors == (3, dist.get_rank())
        # Gathers are copies: the same bits. Reductions stay in fp32 and so with torch.distributed.
        with CollectiveRecorder() as recorder:
            found = train(model)
        assert found == expected
        assert_same_values(full_parameters(model.module), full_parameters(plain.module), f"stage {stage}")
        per_step = 5 if stage < 3 else 2 * 5 - 1  # the embedding's backward reads no weights
        assert handle.calls == ["gather"] * (3 * per_step)
        assert recorder.count(GATHER) == 3 * per_step + 3  # the stand-in's own, and the norms' past it
        assert len(handle._outputs) == len(handle._inputs) == (5 if stage < 3 else 4)  # blocks share two in stage 3
        assert recorder.count(REDUCE_SCATTER) == 3 * 6


def reduce_through_yccl():
    options = {"param_dtype": BF16, "bit16_reduce_scatter": True, "gradient_accumulation_steps": 2}
    plain = wrap(**options, bit32_acc_for_bit16_reduce_scatter=True)
    expected = train(plain, steps=2)
    with fake_yccl.installed() as (handles):
        model = wrap(**options, use_yccl=True, yccl_intra_inter_expr="0, rank", profile=True)
        with CollectiveRecorder() as recorder:
            found = train(model, steps=2)
        (handle,) = handles
    assert_same_numbers(found, expected, "loss", atol=2e-2)
    for name, value in full_parameters(model.module).items():
        # Sums of two bf16 gradients, rounded once to 16 bits by the package and not at all in the comparison.
        torch.testing.assert_close(value, full_parameters(plain.module)[name], atol=2e-3, rtol=0, msg=name)
    assert handle.calls.count("reduce") == 3 * 5  # all units but the norms, once per cycle
    assert handle.calls.count("events") == 3  # once per cycle
    assert recorder.count(REDUCE_SCATTER) == 3  # the norms'
    sizes = [buffer.numel() for buffer in handle._staging]
    assert sizes == sorted(set(sizes)), f"a smaller registered buffer was made after a larger one: {sizes}"


def exchange_checkpoints_with_yccl():
    plain = wrap("gpt2", param_dtype=BF16, use_yccl_padding=True)
    train(plain)
    with fake_yccl.installed():
        model = wrap(build_model("gpt2", seed=4), param_dtype=BF16, use_yccl=True, yccl_intra_inter_expr="0, rank")
    expected = full_parameters(plain.module)
    for state in (plain.local_state_dict(), plain.state_dict()):
        model.load_state_dict(wrap(build_model("gpt2", seed=4)).local_state_dict())
        model.load_state_dict(state)
        assert_same_values(full_parameters(model.module), expected, "into the one with yccl")
    plain.load_state_dict(model.local_state_dict())
    assert_same_values(full_parameters(plain.module), expected, "and back")


def use_yccl_below_the_wrapper():
    """``fully_shard`` takes the backend as well; what is not 16 bits wide goes past it."""
    with fake_yccl.installed() as handles:
        backend = YCCLBackend("0, rank")
        for dtype, calls in ((torch.float32, 0), (torch.float16, 2 * 5 - 1)):
            model = shard(build_model("llama"), mp={"param_dtype": dtype}, backend=backend)
            causal_loss(model, token_batches(1, rows=2)[0]).backward()
            (handle,) = handles
            assert handle.calls == ["gather"] * calls, f"{dtype}: {handle.calls}"  # fp16 is gathered, not reduced


def test_yccl_carries_16_bit_gathers_of_everything_but_norms(on_ranks):
    for stage in (1, 3):
        on_ranks(2, train_through_yccl, stage)


def test_yccl_carries_16_bit_reductions_of_everything_but_norms(on_ranks):
    on_ranks(2, reduce_through_yccl)


def test_checkpoints_are_exchanged_with_and_without_yccl(on_ranks):
    on_ranks(2, exchange_checkpoints_with_yccl)


def test_other_dtypes_go_past_yccl(on_ranks):
    on_ranks(2, use_yccl_below_the_wrapper)


class MappedMemory:
    """torch's symmetric-memory module as the backend uses it, in ordinary memory."""

    def __init__(self):
        self.buffers = []
        self.mapped = []

    def empty(self, nbytes, *, dtype, device):
        self.buffers.append(torch.zeros(nbytes, dtype=dtype, device=device))
        return self.buffers[-1]

    def rendezvous(self, tensor, group):
        assert tensor is self.buffers[-1]
        self.mapped.append(group)


class MappedCollectives(SymmetricMemoryCollectives):
    def __init__(self, group, memory, seen):
        super().__init__(group, memory)
        self.seen = seen

    def all_gather(self, output, piece, *, async_op):
        self.seen.append(output.data_ptr())
        return super().all_gather(output, piece, async_op=async_op)


class MappedBackend:
    """A user's own backend: an object with one method."""

    def __init__(self, made):
        self.made = made

    def collectives(self, group):
        assert group.size() == self.made.world_size
        return self.made


def gather_into_mapped_memory():
    memory, seen = MappedMemory(), []
    made = MappedCollectives(dist.group.WORLD, memory, seen)
    backend = MappedBackend(made)
    batches = token_batches(3)
    expected = sharded_run(shard(build_model("llama")), adamw, batches)
    model = shard(build_model("llama"), backend=backend)
    found = sharded_run(model, adamw, batches)
    assert_same_numbers(found.losses, expected.losses, "loss")
    assert_same_values(found.parameters, expected.parameters, "weights")
    # Embedding, head with norm, and two buffers for the blocks: each mapped once and kept.
    assert len(memory.buffers) == 4
    assert memory.mapped == [dist.group.WORLD] * 4
    assert {buffer.data_ptr() for buffer in memory.buffers} == set(seen)
    model.release_buffers()
    assert all(buffer.untyped_storage().nbytes() == buffer.numel() for buffer in memory.buffers), (
        "mapped memory was freed"
    )
    causal_loss(model, batches[0][:2]).backward()
    assert len(memory.buffers) == 4


def test_mapped_memory_is_made_once_per_buffer_and_never_resized(on_ranks):
    on_ranks(2, gather_into_mapped_memory)


def refuse_symmetric_memory():
    with pytest.raises(ValueError, match=r"communicates through .*gloo.* needs nccl.*HierarchicalBackend"):
        shard(build_model("llama"), backend=SymmetricMemoryBackend())
    with pytest.raises(ValueError, match="needs nccl"):
        wrap(backend=SymmetricMemoryBackend())


def test_symmetric_memory_is_refused_without_nccl(on_ranks):
    on_ranks(2, refuse_symmetric_memory)
