"""``accelerator.prepare``: in whatever order things are built, training equals a single process."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from tests.huggingface.session import accelerated_steps, assert_close_to, plain_steps, session, two_groups
from tests.support.guards import assert_really_sharded
from tests.support.models import build_model, my_rows, token_batches
from tests.support.recorder import CollectiveRecorder
from tests.support.training import causal_loss
from ya_fsdp import RaggedShardDTensor

OnRanks = Callable[..., list[Any]]
ORDERS = ["together", "model first", "optimizer first", "optimizer built after", "one step taken"]


def _linear_decay(optimizer: Any) -> Any:
    return torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0 / (1 + step))


def _prepare_in_order(order: str) -> None:
    batches = token_batches(4)
    reference = build_model("llama")
    plain = torch.optim.AdamW(two_groups(reference), lr=1e-3)
    plain_scheduler = _linear_decay(plain)
    model = build_model("llama")
    optimizer: Any = torch.optim.AdamW(two_groups(model), lr=1e-3)
    if order == "one step taken":
        plain_steps(reference, plain, batches[:1])
        plain_steps(model, optimizer, batches[:1])
    before = [{key: value for key, value in group.items() if key != "params"} for group in optimizer.param_groups]
    sizes = [len(group["params"]) for group in optimizer.param_groups]
    first = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    with session() as accelerator:
        if order == "model first":
            model = accelerator.prepare(model)
            optimizer = accelerator.prepare(optimizer)
        elif order == "optimizer first":
            optimizer = accelerator.prepare(optimizer)
            model = accelerator.prepare(model)
        elif order == "optimizer built after":
            model = accelerator.prepare(model)
            optimizer = accelerator.prepare(torch.optim.AdamW(two_groups(model), lr=1e-3))
        else:
            model, optimizer = accelerator.prepare(model, optimizer)
        scheduler = accelerator.prepare(_linear_decay(optimizer.optimizer))
        scheduler.split_batches = True  # the test drives one scheduler step per optimizer step
        assert type(optimizer.optimizer) is torch.optim.AdamW
        assert [len(group["params"]) for group in optimizer.param_groups] == sizes
        after = [{key: value for key, value in group.items() if key != "params"} for group in optimizer.param_groups]
        for old, new in zip(before, after, strict=True):
            assert {key: new[key] for key in old if key != "initial_lr"} == {
                k: v for k, v in old.items() if k != "initial_lr"
            }
        losses = accelerated_steps(accelerator, model, optimizer, batches[1:], scheduler)
        expected = plain_steps(reference, plain, batches[1:], plain_scheduler)
        assert losses == pytest.approx(expected, abs=1e-5)
        assert_close_to(model, reference, atol=1e-4)
        for name, parameter in model.named_parameters():
            assert not torch.equal(parameter.full_tensor(), first[name]), f"{name} never moved"
        with CollectiveRecorder() as recorder:
            causal_loss(model, my_rows(batches[0], dist.get_rank(), dist.get_world_size())).backward()
        assert_really_sharded(model, recorder, "ya_fsdp")


@pytest.mark.parametrize("order", ORDERS)
def test_training_equals_a_single_process_in_every_order_of_preparation(on_ranks: OnRanks, order: str) -> None:
    on_ranks(2, _prepare_in_order, order)


def _stray_parameter(order: str) -> None:
    model = build_model("llama")
    stray = nn.Parameter(torch.zeros(7, 3))
    optimizer = torch.optim.SGD([{"params": list(model.parameters())}, {"params": [stray]}], lr=0.1)
    with session() as accelerator:
        if order == "one by one":
            accelerator.prepare(model)
        objects = (model, optimizer) if order == "together" else (optimizer,)
        with pytest.raises(ValueError, match=r"rank \d: SGD .*number 0 of group 1, shape \(7, 3\)"):
            accelerator.prepare(*objects)


@pytest.mark.parametrize("order", ["together", "one by one"])
def test_a_parameter_of_no_prepared_model_is_named(on_ranks: OnRanks, order: str) -> None:
    on_ranks(2, _stray_parameter, order)


def _state_that_cannot_be_split() -> None:
    model = build_model("llama")
    optimizer = torch.optim.Adafactor(model.parameters(), lr=1e-2)
    plain_steps(model, optimizer, token_batches(1))
    with session() as accelerator, pytest.raises(ValueError, match=r"Adafactor has already taken steps, and its state"):
        accelerator.prepare(model, optimizer)


def test_state_that_cannot_be_carried_over_is_an_error_that_names_it(on_ranks: OnRanks) -> None:
    on_ranks(2, _state_that_cannot_be_split)


def _unsuited_optimizer(name: str, order: str) -> None:
    model = build_model("llama")
    before = {key: value.clone() for key, value in model.named_parameters()}
    optimizer = getattr(torch.optim, name)([p for p in model.parameters() if p.dim() == 2], lr=0.1)
    with session() as accelerator:
        if order == "one by one":
            model = accelerator.prepare(model)
        objects = (model, optimizer) if order == "together" else (optimizer,)
        with pytest.raises(ValueError, match=rf"{name} cannot train sharded parameters: it .*AdamW"):
            accelerator.prepare(*objects)
        if order == "together":
            assert all(type(value) is nn.Parameter for value in model.parameters()), "nothing was sharded"
            assert all(torch.equal(value, before[key]) for key, value in model.named_parameters())


@pytest.mark.parametrize("order", ["together", "one by one"])
@pytest.mark.parametrize("name", ["Muon", "Rprop"])
def test_an_optimizer_that_cannot_work_on_slices_is_refused_by_name(on_ranks: OnRanks, name: str, order: str) -> None:
    on_ranks(2, _unsuited_optimizer, name, order)


class _WithBuffers(nn.Module):
    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.inner = model
        self.register_buffer("kept", torch.randn(5))
        self.register_buffer("passing", torch.randint(0, 9, (3,)), persistent=False)
        self.register_buffer("flag", torch.tensor(True))
        self.config = model.config  # type: ignore[assignment]

    def forward(self, **kwargs: Any) -> Any:
        return self.inner(**kwargs)


def _start_from_rank_zero(kind: str) -> float:
    rank = dist.get_rank()
    if kind == "meta" and rank:
        with torch.device("meta"):
            model = _WithBuffers(build_model("llama"))
    else:
        model = _WithBuffers(build_model("llama", seed=rank))
    torch.manual_seed(0)
    expected = _WithBuffers(build_model("llama", seed=0))
    if rank == 0:
        expected.load_state_dict(model.state_dict())
        expected.passing = model.passing.clone()
    box = [{**expected.state_dict(), "passing": expected.passing} if rank == 0 else None]
    dist.broadcast_object_list(box, src=0)
    assert box[0] is not None
    if rank:
        with torch.no_grad():
            for parameter in model.parameters():
                if not parameter.is_meta:
                    parameter.fill_(float("nan"))  # nothing of this rank's own values may survive
    with session() as accelerator:
        model = accelerator.prepare(model)
        found = {**accelerator.get_state_dict(model), "passing": model.passing}
        for name, buffer in model.named_buffers():
            assert not buffer.is_meta, f"rank {rank}: {name} is on meta"
            torch.testing.assert_close(buffer, box[0].get(name, buffer), atol=0, rtol=0)
        assert not any(parameter.is_meta for parameter in model.parameters())
        if rank == 0:
            assert set(found) == set(box[0])
            for name, value in found.items():
                assert torch.equal(value, box[0][name].to(value.dtype)), name
        batch = token_batches(1)[0]
        loss = causal_loss(model, batch)
        return loss.item()


@pytest.mark.parametrize("kind", ["other seeds", "meta"])
def test_all_ranks_start_from_the_weights_and_buffers_of_rank_zero(on_ranks: OnRanks, kind: str) -> None:
    losses = on_ranks(2, _start_from_rank_zero, kind)
    plain = causal_loss(_WithBuffers(build_model("llama", seed=0)), token_batches(1)[0]).item()
    assert losses == pytest.approx([plain, plain], abs=1e-6)


def _models_that_differ() -> None:
    with session() as accelerator, pytest.raises(ValueError, match=r"differs between ranks: rank 0 has .*rank 1 has"):
        accelerator.prepare(build_model("llama", vocab_size=101 + dist.get_rank()))


def test_different_models_on_different_ranks_are_named_instead_of_hanging(on_ranks: OnRanks) -> None:
    on_ranks(2, _models_that_differ)


def _bf16_weights_under_mixed_precision(meta: bool) -> list[float]:
    rank = dist.get_rank()
    with torch.device("meta" if meta and rank else "cpu"):
        model = build_model("llama", dtype=torch.bfloat16)
    seen = []
    with session("bf16") as accelerator:
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5)
        model, optimizer = accelerator.prepare(model, optimizer)
        layer = model.model.layers[0].mlp
        layer.register_forward_pre_hook(lambda module, args: seen.append((args[0].dtype, module.up_proj.weight.dtype)))
        before = {name: parameter.full_tensor().clone() for name, parameter in model.named_parameters()}
        losses = accelerated_steps(accelerator, model, optimizer, token_batches(1))
        assert {parameter.dtype for parameter in model.parameters()} == {torch.float32}
        moments = {value.dtype for state in optimizer.state.values() for value in state.values() if value.dim()}
        assert moments == {torch.float32}
        assert seen[0] == (torch.bfloat16, torch.bfloat16)
        moved = max((p.full_tensor() - before[n]).abs().max().item() for n, p in model.named_parameters())
        assert moved == pytest.approx(1e-5, rel=0.3)
        losses += accelerated_steps(accelerator, model, optimizer, token_batches(3))
    return losses


def test_master_weights_are_fp32_under_bf16_in_both_ways_of_loading(on_ranks: OnRanks) -> None:
    everywhere = on_ranks(2, _bf16_weights_under_mixed_precision, False)
    assert everywhere == on_ranks(2, _bf16_weights_under_mixed_precision, True)


def _forgotten_optimizer() -> None:
    model = build_model("llama")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with session() as accelerator:
        model = accelerator.prepare(model)
        causal_loss(model, token_batches(1)[0]).backward()
        with pytest.raises(RuntimeError, match=r"SGD is about to step on model.embed_tokens.weight as it was before"):
            optimizer.step()


def test_an_optimizer_that_was_never_prepared_is_stopped_at_its_first_step(on_ranks: OnRanks) -> None:
    on_ranks(2, _forgotten_optimizer)


def _wrong_objects() -> None:
    with (
        session() as accelerator,
        pytest.raises(ValueError, match="contains DistributedDataParallel; pass the plain model"),
    ):
        accelerator.prepare(nn.parallel.DistributedDataParallel(build_model("llama")))
    with (
        session(FSDP_TRANSFORMER_CLS_TO_WRAP="LlamaLayer") as accelerator,
        pytest.raises(ValueError, match="LlamaLayer"),
    ):
        accelerator.prepare(build_model("llama"))
    with (
        session(FSDP_IGNORED_MODULES="nothing") as accelerator,
        pytest.raises(ValueError, match="fsdp_ignored_modules"),
    ):
        accelerator.prepare(build_model("llama"))
    hybrid = {"FSDP_SHARDING_STRATEGY": "HYBRID_SHARD", "FSDP_YA_FSDP_HYBRID_GROUP_SIZE": "3"}
    with session(**hybrid) as accelerator, pytest.raises(ValueError, match="hybrid_group_size: 3 does not divide"):
        accelerator.prepare(build_model("llama"))


def test_what_cannot_be_sharded_is_refused_with_the_reason(on_ranks: OnRanks) -> None:
    on_ranks(2, _wrong_objects)


def _ignored_modules() -> None:
    model = build_model("llama")
    with session(FSDP_IGNORED_MODULES=r"model\.layers\.1\.mlp") as accelerator:
        model = accelerator.prepare(model)
        plain = {name for name, parameter in model.named_parameters() if not isinstance(parameter, RaggedShardDTensor)}
        assert plain == {f"model.layers.1.mlp.{part}_proj.weight" for part in ("gate", "up", "down")}


def test_ignored_modules_are_left_whole(on_ranks: OnRanks) -> None:
    on_ranks(2, _ignored_modules)


def _state_of_the_accelerator(cpu: bool) -> None:
    with session(cpu=cpu) as accelerator:
        assert str(accelerator.distributed_type) == "DistributedType.FSDP"
        assert accelerator.is_fsdp2
        assert accelerator.num_processes == dist.get_world_size()
        assert accelerator.process_index == dist.get_rank()
        assert accelerator.device.type == "cpu"
        assert type(accelerator.state.fsdp_plugin).__name__ == "YaFSDPPlugin"


@pytest.mark.parametrize("cpu", [False, True])
def test_the_engine_is_selected_without_a_gpu_whether_or_not_the_script_asks_for_cpu(
    on_ranks: OnRanks, cpu: bool
) -> None:
    on_ranks(2, _state_of_the_accelerator, cpu)


def _refused_precisions() -> None:
    with pytest.raises(ValueError, match="mixed_precision: fp8 is not supported"), session("fp8"):
        pass
    with pytest.raises(ValueError, match="mixed_precision: fp16 needs a GPU"), session("fp16"):
        pass
    with (
        pytest.raises(ValueError, match="unknown key FSDP_SHARDING_STATEGY in the environment"),
        session(FSDP_SHARDING_STATEGY="x"),
    ):
        pass


def test_what_the_accelerator_cannot_honour_is_refused_when_it_is_built(on_ranks: OnRanks) -> None:
    on_ranks(2, _refused_precisions)


def _two_models() -> None:
    first, second = build_model("llama"), build_model("qwen2")
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.1) for model in (first, second)]
    with session() as accelerator:
        first, second, *optimizers = accelerator.prepare(first, second, *optimizers)
        for model, optimizer in zip((first, second), optimizers, strict=True):
            before = {name: parameter.full_tensor().clone() for name, parameter in model.named_parameters()}
            accelerated_steps(accelerator, model, optimizer, token_batches(1))
            assert all(not torch.equal(before[n], p.full_tensor()) for n, p in model.named_parameters())


def test_two_models_with_their_optimizers_can_be_prepared_together(on_ranks: OnRanks) -> None:
    on_ranks(2, _two_models)


def _hybrid(strategy: str, size: str) -> None:
    reference, batches = build_model("llama"), token_batches(3)
    expected = plain_steps(reference, torch.optim.SGD(reference.parameters(), lr=0.1), batches)
    model = build_model("llama", seed=dist.get_rank())  # rank 0's is the reference
    with session(FSDP_SHARDING_STRATEGY=strategy, FSDP_YA_FSDP_HYBRID_GROUP_SIZE=size) as accelerator:
        model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
        assert accelerated_steps(accelerator, model, optimizer, batches) == pytest.approx(expected, abs=1e-5)
        held = sum(parameter.to_local().numel() for parameter in model.parameters())
        total = sum(parameter.numel() for parameter in model.parameters())
        assert held < 0.6 * total, "two of four processes share one copy"
        assert_close_to(model, reference, atol=1e-5)


@pytest.mark.parametrize("world", [4])
@pytest.mark.parametrize("strategy", ["HYBRID_SHARD", "HYBRID_SHARD_ZERO2"])
def test_hybrid_strategies_replicate_over_groups(on_ranks: OnRanks, world: int, strategy: str) -> None:
    on_ranks(world, _hybrid, strategy, "2")
