"""trl's DPOTrainer: a sharded reference that never changes, or the base under adapters as reference."""

import math
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
from tests.support.engines import full
from tests.support.models import VOCABULARY, build_model
from ya_fsdp import RaggedShardDTensor

pytest.importorskip("trl")
OnRanks = Callable[..., list[Any]]
BETA, LEARNING_RATE = 0.5, 0.05


def _pairs(count: int = 8) -> list[dict[str, str]]:
    """Pairs of answers of equal lengths, so that means over rows are means over ranks."""
    generator = torch.Generator().manual_seed(11)

    def words(length: int) -> str:
        return "".join(f" w{i}" for i in torch.randint(4, VOCABULARY, (length,), generator=generator).tolist())

    return [{"prompt": words(4)[1:], "chosen": words(5), "rejected": words(6)} for _ in range(count)]


def _log_probability(model: nn.Module, prompt: list[int], answer: list[int]) -> torch.Tensor:
    tokens = torch.tensor([prompt + answer])
    logits = model(input_ids=tokens).logits[0, :-1].log_softmax(-1)
    return logits.gather(1, tokens[0, 1:, None])[len(prompt) - 1 :].sum()


def _plain_dpo(model: nn.Module, pairs: list[dict[str, list[int]]], steps: int) -> list[float]:
    """The loss of direct preference optimisation, written out, in this process; the reference is the initial model."""
    reference = build_model("llama")
    optimizer = torch.optim.SGD(model.parameters(), lr=LEARNING_RATE)
    losses = []
    for _ in range(steps):
        loss = torch.zeros(())
        for pair in pairs:
            margins = []
            for one in (model, reference):
                chosen, rejected = (_log_probability(one, pair["prompt_ids"], pair[k]) for k in ANSWERS)
                margins.append(chosen - rejected)
            loss = loss - nn.functional.logsigmoid(BETA * (margins[0] - margins[1].detach())) / len(pairs)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


ANSWERS = ("chosen_ids", "rejected_ids")


def _dpo(model: nn.Module, folder: str, reference: nn.Module | None, **changes: Any) -> Any:
    from datasets import Dataset
    from trl import DPOTrainer

    settings = arguments(
        folder,
        "trl.DPOConfig",
        beta=BETA,
        bf16=False,
        max_length=None,
        per_device_train_batch_size=8 // dist.get_world_size(),
        **{"learning_rate": LEARNING_RATE, "gradient_checkpointing": False, **changes},
    )
    return DPOTrainer(
        model,
        ref_model=reference,
        args=settings,
        train_dataset=Dataset.from_list(_pairs()),
        processing_class=tokenizer(),
    )


def _separate_reference(folder: str, checkpointing: str) -> None:
    variables = {"FSDP_ACTIVATION_CHECKPOINTING": "true"} if checkpointing == "engine" else {}
    with session(**variables):
        trainer = _dpo(
            build_model("llama"), folder, build_model("llama"), gradient_checkpointing=checkpointing == "model"
        )
        reference = trainer.ref_model
        assert all(isinstance(value, RaggedShardDTensor) for value in reference.parameters()), (
            "the reference is sharded"
        )
        assert ya_fsdp.memory_report(reference).num_units == 5, "in units like any model"
        assert not any(value.requires_grad for value in reference.parameters())
        assert not reference.training
        before = bits(reference)
        trainer.train()
        assert all(value.grad is None for value in reference.parameters())
        assert ya_fsdp.memory_report(reference).gradients == 0
        for name, value in bits(reference).items():
            assert torch.equal(value, before[name]), f"{name} of the reference changed"
        assert sum(value.numel() for value in before.values()) < 0.6 * sum(v.numel() for v in reference.parameters())
    losses = logged(trainer, "loss")
    assert losses[0] == pytest.approx(math.log(2), abs=1e-4)
    assert losses == pytest.approx(_plain_dpo(build_model("llama"), list(trainer.train_dataset), 3), rel=1e-5)


@pytest.mark.parametrize("checkpointing", ["none", "engine", "model"])
def test_a_separate_reference_is_sharded_and_never_changes(
    on_ranks: OnRanks, checkpointing: str, tmp_path: Path
) -> None:
    on_ranks(2, _separate_reference, str(tmp_path), checkpointing)


def _adapters(folder: str, checkpointing: bool) -> list[float]:
    from peft import LoraConfig, get_peft_model

    torch.manual_seed(1)  # as peft makes them: the second factor is zero, so policy and reference agree
    model = get_peft_model(build("llama"), LoraConfig(r=4, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM"))
    frozen = {name: value.clone() for name, value in model.named_parameters() if not value.requires_grad}
    with session():
        trainer = _dpo(model, folder, None, gradient_checkpointing=checkpointing, learning_rate=1.0)
        assert trainer.ref_model is None
        trainer.train()
        after = {name: full(value) for name, value in model.named_parameters()}
    for name, value in frozen.items():
        assert torch.equal(after[name], value), f"{name} is frozen and changed"
    losses = logged(trainer, "loss")
    assert losses[0] == pytest.approx(math.log(2), abs=1e-4)
    assert losses[-1] < losses[0] - 1e-4
    return losses


@pytest.mark.parametrize("checkpointing", [False, True])
def test_the_base_under_adapters_is_the_reference(on_ranks: OnRanks, checkpointing: bool, tmp_path: Path) -> None:
    alone = on_ranks(1, _adapters, str(tmp_path), False)[0]
    for losses in on_ranks(2, _adapters, str(tmp_path), checkpointing):
        assert losses == pytest.approx(alone, rel=1e-5)
