"""What trl's GRPO needs: whole weights for a generator, adapters merged into slices, and the trainer's own steps."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import ya_fsdp
from tests.huggingface.session import session
from tests.huggingface.stock_trainers import arguments, bits, build, logged, tokenizer
from tests.support.engines import full_parameters
from tests.support.guards import assert_really_sharded, assert_same_values
from tests.support.models import build_model, my_rows, token_batches
from tests.support.training import causal_loss
from ya_fsdp import RaggedShardDTensor

pytest.importorskip("trl")
OnRanks = Callable[..., list[Any]]


def _generation(model: nn.Module, accelerator: Any) -> Any:
    """trl's bridge to a generator, without the generator, which needs a GPU."""
    from trl.distributed import DistributedBackend
    from trl.generation.vllm_generation import VLLMGeneration

    bridge = object.__new__(VLLMGeneration)
    bridge.model, bridge.accelerator, bridge._dist = model, accelerator, DistributedBackend(accelerator)
    return bridge


def _train_a_step(accelerator: Any, model: nn.Module, optimizer: Any) -> None:
    accelerator.backward(causal_loss(model, my_rows(token_batches(1)[0], dist.get_rank(), dist.get_world_size())))
    optimizer.step()
    optimizer.zero_grad()


def _plain_weights(name: str) -> None:
    model = build_model(name)
    with session() as accelerator:
        model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
        _train_a_step(accelerator, model, optimizer)
        sent = {key: value.clone() for key, value in _generation(model, accelerator)._iter_named_params()}
        assert all(type(value) is torch.Tensor for value in sent.values())
        expected = accelerator.get_state_dict(model)
        if dist.get_rank() == 0:
            assert set(sent) <= set(expected)
            assert set(sent) == set(dict(build_model(name).named_parameters())), "tied weights once"
            for key, value in sent.items():
                assert torch.equal(value, expected[key]), key
        assert_really_sharded(model, None, "ya_fsdp")


@pytest.mark.parametrize("name", ["llama", "qwen2"])
def test_a_generator_receives_whole_weights_on_every_rank(on_ranks: OnRanks, name: str) -> None:
    on_ranks(2, _plain_weights, name)


def _merged_weights() -> None:
    reference, model = build("llama", lora=True), build("llama", lora=True)
    with session() as accelerator:
        model, optimizer = accelerator.prepare(
            model, torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
        )
        _train_a_step(accelerator, model, optimizer)
        reference.load_state_dict({key: value.clone() for key, value in full_parameters(model).items()}, strict=False)
        before, adapted = bits(model), _logits(model)
        sent = {key: value.clone() for key, value in _generation(model, accelerator)._iter_named_params()}
        merged = reference.merge_and_unload()  # type: ignore[operator]
        expected = dict(merged.named_parameters())
        assert set(sent) == set(expected), "names of the model without adapters"
        for key, value in sent.items():
            torch.testing.assert_close(
                value, expected[key].detach(), atol=1e-6, rtol=0, msg=lambda m, k=key: f"{k}: {m}"
            )
        plain = build_model("llama").state_dict()
        assert not torch.equal(sent[_ADAPTED], plain[_ADAPTED]), "adapters are in what is sent"
        assert_same_values(bits(model), before, "shards after the adapters were taken out again")
        assert_really_sharded(model, None, "ya_fsdp")
        assert torch.equal(_logits(model), adapted)
        _train_a_step(accelerator, model, optimizer)
        changed = {key for key, value in bits(model).items() if not torch.equal(value, before[key])}
        assert all("lora_" in key for key in changed)


_ADAPTED = "model.layers.1.self_attn.q_proj.weight"


def _logits(model: nn.Module) -> torch.Tensor:
    model.eval()
    with torch.no_grad():
        result: torch.Tensor = model(input_ids=token_batches(1)[0]).logits
    model.train()
    return result


def test_a_generator_receives_the_base_with_its_adapters_merged_and_training_goes_on_unmerged(
    on_ranks: OnRanks,
) -> None:
    on_ranks(2, _merged_weights)


def _merged_forward() -> None:
    model = build("llama", lora=True)
    with session() as accelerator:
        model = accelerator.prepare(model)
        adapted = _logits(model)
        model.merge_adapter()
        assert torch.equal(_logits(model), adapted) is False
        torch.testing.assert_close(_logits(model), adapted, atol=1e-5, rtol=0)
        with pytest.warns(UserWarning, match="already merged"):
            model.merge_adapter()
        model.unmerge_adapter()
        assert torch.equal(_logits(model), adapted)


def test_a_model_with_merged_adapters_computes_the_same(on_ranks: OnRanks) -> None:
    on_ranks(2, _merged_forward)


def _even_tokens(completion_ids: list[list[int]], **_: Any) -> list[float]:
    """A reward that differs between answers: the share of even tokens."""
    return [sum(token % 2 == 0 for token in ids) / max(1, len(ids)) for ids in completion_ids]


def _grpo(folder: str, lora: bool) -> tuple[list[float], list[float]]:
    model = build("llama", lora=True) if lora else f"{folder}/model"  # trl reads the reference from the same place
    prompts = [{"prompt": f"w{index} w{index + 7} w{index + 3}"} for index in range(5, 13)]
    with session():
        from datasets import Dataset
        from trl import GRPOTrainer

        settings = arguments(
            folder,
            "trl.GRPOConfig",
            bf16=False,
            num_generations=4,
            max_completion_length=6,
            beta=0.1,
            gradient_checkpointing=False,
            per_device_train_batch_size=4,
            max_steps=2,
            **({} if lora else {"model_init_kwargs": {"attn_implementation": "eager"}}),
        )
        trainer = GRPOTrainer(
            model,
            reward_funcs=_even_tokens,
            args=settings,
            train_dataset=Dataset.from_list(prompts),
            processing_class=tokenizer(),
        )
        reference = trainer.ref_model
        before, frozen = full_parameters(trainer.model), None if reference is None else bits(reference)
        trainer.train()
        assert_really_sharded(trainer.model, None, "ya_fsdp")
        after = full_parameters(trainer.model)
        if reference is not None:
            assert_same_values(bits(reference), frozen or {}, "the reference")
            assert all(isinstance(value, RaggedShardDTensor) for value in reference.parameters())
            assert ya_fsdp.memory_report(reference).gradients == 0
    moved = {name for name, value in after.items() if not torch.equal(value, before[name])}
    assert moved
    assert all("lora_" in name for name in moved) == lora
    return logged(trainer, "loss"), logged(trainer, "grad_norm")


@pytest.mark.parametrize("lora", [False, True])
def test_the_grpo_trainer_steps_on_its_own_samples(on_ranks: OnRanks, lora: bool, tmp_path: Path) -> None:
    build_model("llama").save_pretrained(tmp_path / "model")  # type: ignore[operator]
    first, second = on_ranks(2, _grpo, str(tmp_path), lora, limit=120.0)
    assert first == second, "all ranks log the same"
    assert len(first[1]) == 2
    assert all(0 < norm < 100 for norm in first[1])
