"""Training after ``accelerator.prepare``: ties, clipping, units, accumulation, and several numbers of processes."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.huggingface.session import accelerated_steps, assert_close_to, plain_steps, session, two_groups
from tests.support.models import build_model, my_rows, token_batches
from tests.support.training import causal_loss
from ya_fsdp import RaggedShardDTensor

OnRanks = Callable[..., list[Any]]


def _tied_weights() -> None:
    reference, batches = build_model("gpt2"), token_batches(4)
    expected = plain_steps(reference, torch.optim.SGD(reference.parameters(), lr=0.1), batches)
    model = build_model("gpt2")
    count = len(list(model.parameters()))
    with session() as accelerator:
        model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
        losses = accelerated_steps(accelerator, model, optimizer, batches)
        assert model.lm_head.weight is model.transformer.wte.weight
        assert len(list(model.parameters())) == count
        assert sum(len(group["params"]) for group in optimizer.param_groups) == count
        assert losses == pytest.approx(expected, abs=1e-5)
        assert_close_to(model, reference, atol=1e-5)
        state = accelerator.get_state_dict(model)
        if dist.get_rank() == 0:
            assert list(state) == list(build_model("gpt2").state_dict())
            assert all(type(value) is torch.Tensor for value in state.values())
        else:
            assert state == {}


def test_tied_weights_stay_one_parameter_and_train_like_one(on_ranks: OnRanks) -> None:
    on_ranks(2, _tied_weights)


def _clipping(norm_type: float) -> None:
    batch = token_batches(1)[0]
    reference = build_model("llama")
    causal_loss(reference, batch).backward()
    expected = torch.nn.utils.clip_grad_norm_(reference.parameters(), 0.1, norm_type=norm_type)
    model = build_model("llama")
    with session() as accelerator:
        model, _ = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
        accelerator.backward(causal_loss(model, my_rows(batch, dist.get_rank(), dist.get_world_size())))
        norm = accelerator.clip_grad_norm_(model.parameters(), 0.1, norm_type=norm_type)
        assert type(norm) is torch.Tensor
        assert float(norm) == pytest.approx(expected.item(), rel=1e-5)
        for name, parameter in model.named_parameters():
            plain = dict(reference.named_parameters())[name].grad
            torch.testing.assert_close(parameter.grad.full_tensor(), plain, atol=1e-6, rtol=1e-5)
        norms = [torch.zeros(()) for _ in range(dist.get_world_size())]
        dist.all_gather(norms, norm)
        assert len({value.item() for value in norms}) == 1


@pytest.mark.parametrize("norm_type", [2.0, float("inf")])
def test_clipping_uses_the_norm_over_all_shards_and_returns_a_plain_tensor(on_ranks: OnRanks, norm_type: float) -> None:
    on_ranks(2, _clipping, norm_type)


def _policies(variables: dict[str, str], units: int) -> list[float]:
    model = build_model("llama")
    with session(**variables) as accelerator:
        model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
        import ya_fsdp

        assert ya_fsdp.memory_report(model).num_units == units
        assert all(isinstance(parameter, RaggedShardDTensor) for parameter in model.parameters())
        return accelerated_steps(accelerator, model, optimizer, token_batches(3))


POLICIES = [
    ({}, 5),
    ({"FSDP_AUTO_WRAP_POLICY": "NO_WRAP"}, 1),
    (
        {"FSDP_AUTO_WRAP_POLICY": "TRANSFORMER_BASED_WRAP", "FSDP_TRANSFORMER_CLS_TO_WRAP": "LlamaMLP, LlamaAttention"},
        9,
    ),
    ({"FSDP_AUTO_WRAP_POLICY": "SIZE_BASED_WRAP", "FSDP_MIN_NUM_PARAMS": "5000"}, 5),
    ({"FSDP_SHARDING_STRATEGY": "SHARD_GRAD_OP"}, 5),
    ({"FSDP_RESHARD_AFTER_FORWARD": "true", "FSDP_FORWARD_PREFETCH": "true"}, 5),
]


@pytest.mark.parametrize(("variables", "units"), POLICIES)
def test_every_way_of_choosing_units_gives_the_same_losses(
    on_ranks: OnRanks, variables: dict[str, str], units: int
) -> None:
    reference = build_model("llama")
    expected = plain_steps(reference, torch.optim.SGD(reference.parameters(), lr=0.1), token_batches(3))
    for losses in on_ranks(2, _policies, variables, units):
        assert losses == pytest.approx(expected, abs=1e-5)


def _accumulation(sync_each: bool) -> None:
    batches = token_batches(4, rows=4)
    reference = build_model("llama")
    plain = torch.optim.SGD(reference.parameters(), lr=0.1)
    (sum(causal_loss(reference, batch) for batch in batches) / 4).backward()
    plain.step()
    model = build_model("llama")
    with session() as accelerator:
        from accelerate.utils import GradientAccumulationPlugin

        accelerator.gradient_state.plugin_kwargs = GradientAccumulationPlugin(
            num_steps=4, sync_each_batch=sync_each
        ).to_kwargs()
        model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
        for batch in batches:
            with accelerator.accumulate(model):
                loss = causal_loss(model, my_rows(batch, dist.get_rank(), dist.get_world_size()))
                accelerator.backward(loss)
                optimizer.step()
                optimizer.zero_grad()
        assert_close_to(model, reference, atol=1e-5)


@pytest.mark.parametrize("sync_each", [False, True])
def test_accumulated_gradients_equal_one_large_batch(on_ranks: OnRanks, sync_each: bool) -> None:
    on_ranks(2, _accumulation, sync_each)


def _single_process() -> None:
    reference, batches = build_model("llama"), token_batches(3)
    expected = plain_steps(reference, torch.optim.SGD(reference.parameters(), lr=0.1), batches)
    model = build_model("llama")
    with session() as accelerator:
        model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
        assert accelerated_steps(accelerator, model, optimizer, batches) == pytest.approx(expected, abs=1e-6)
        assert all(isinstance(parameter, RaggedShardDTensor) for parameter in model.parameters())


@pytest.mark.parametrize("world", [1])
def test_one_process_works(on_ranks: OnRanks, world: int) -> None:
    on_ranks(world, _single_process)


def _odd_worlds() -> None:
    reference, batches = build_model("llama"), token_batches(2)
    expected = plain_steps(reference, torch.optim.AdamW(two_groups(reference)), batches)
    model = build_model("llama")
    with session() as accelerator:
        model, optimizer = accelerator.prepare(model, torch.optim.AdamW(two_groups(model)))
        assert accelerated_steps(accelerator, model, optimizer, batches) == pytest.approx(expected, abs=1e-5)


@pytest.mark.parametrize("world", [3])
def test_three_processes_work(on_ranks: OnRanks, world: int) -> None:
    on_ranks(world, _odd_worlds)
