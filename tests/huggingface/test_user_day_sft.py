"""trl's SFTTrainer as it comes: its loss reads the weight of the head instead of calling the head."""

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import ya_fsdp
from tests.huggingface.session import session
from tests.huggingface.stock_trainers import arguments, build, logged, plain_run, rows, tokenizer, trainable
from tests.support.engines import full
from tests.support.guards import assert_really_sharded
from tests.support.recorder import GATHER, CollectiveRecorder
from ya_fsdp import RaggedShardDTensor

pytest.importorskip("trl")
OnRanks = Callable[..., list[Any]]
UNITS = {"llama": 5, "qwen2": 4}


def _trainer(model: nn.Module, folder: str, seen: dict[str, Any], **changes: Any) -> Any:
    from trl import SFTTrainer

    class Watched(SFTTrainer):  # type: ignore[misc]
        """Notes the first step's collectives and gradients."""

        def training_step(self, wrapped: nn.Module, *args: Any, **kwargs: Any) -> torch.Tensor:
            if seen:  # any step but the first
                return super().training_step(wrapped, *args, **kwargs)
            handle = wrapped.register_forward_hook(lambda *_: seen.update(gathers=recorder.count(GATHER)))
            with CollectiveRecorder() as recorder:
                loss: torch.Tensor = super().training_step(wrapped, *args, **kwargs)
            handle.remove()
            assert_really_sharded(wrapped, recorder, "ya_fsdp")
            found = {name: parameter.grad for name, parameter in trainable(wrapped).items()}
            seen["gradients"] = {name: full(value) for name, value in found.items() if value is not None}
            seen["bytes"] = ya_fsdp.memory_report(wrapped).gradients
            return loss

    examples = rows()
    from datasets import Dataset

    settings = arguments(folder, "trl.SFTConfig", max_length=None, gradient_checkpointing=False, bf16=False, **changes)
    return Watched(
        model,
        settings,
        train_dataset=Dataset.from_list(examples),
        eval_dataset=Dataset.from_list(examples),
        processing_class=tokenizer(),
    )


@contextlib.contextmanager
def _released_is_nan() -> Iterator[None]:
    """Overwrites shared gather buffers when they are given back: whoever reads one too late gets NaN."""
    from ya_fsdp.runtime.buffers import Buffer

    original = Buffer.vacate

    def vacate(self: Any) -> None:
        if self._bytes is not None:
            self._bytes.fill_(255)  # all bits set is NaN in every floating dtype
        original(self)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Buffer, "vacate", vacate)
        yield


def _sft(name: str, lora: bool, folder: str) -> None:
    reference, model = build(name, lora=lora), build(name, lora=lora)
    frozen = {key: value.clone() for key, value in model.named_parameters() if not value.requires_grad}
    expected = list(plain_run(reference, rows()))
    seen: dict[str, Any] = {}
    with session(), _released_is_nan():
        trainer = _trainer(model, folder, seen)
        trainer.train()
        evaluated = trainer.evaluate()["eval_loss"]
        assert all(isinstance(value, RaggedShardDTensor) for value in model.parameters()), "held after evaluation"
        after = {key: full(value) for key, value in model.named_parameters()}
    buckets = UNITS[name] + 3 * lora  # frozen and trained parameters of a block are gathered separately
    assert seen["gathers"] == buckets, "one gather per unit in forward, the head's among them"
    assert logged(trainer, "loss")[:3] == pytest.approx([loss for loss, _, _ in expected], rel=1e-5)
    assert logged(trainer, "grad_norm")[:3] == pytest.approx([norm for _, norm, _ in expected], rel=1e-5)
    for key, value in expected[0][2].items():
        torch.testing.assert_close(
            seen["gradients"][key], value, atol=1e-6, rtol=1e-5, msg=lambda m, k=key: f"{k}: {m}"
        )
    (final, _, _) = next(plain_run(reference, rows()))
    assert evaluated == pytest.approx(final, rel=1e-5)
    for key, value in frozen.items():
        assert torch.equal(after[key], value), f"{key} is frozen and changed"
    size = sum(value.numel() for value in trainable(reference).values()) * 4
    assert seen["bytes"] < 0.6 * size + 2048, "only what is trained has gradients"
    if lora:
        states = trainer.optimizer.optimizer.param_groups
        assert sum(len(group["params"]) for group in states) == len(trainable(reference))


@pytest.mark.parametrize("lora", [False, True])
@pytest.mark.parametrize("name", ["llama", "qwen2"])
def test_the_default_loss_equals_the_models_own_in_one_process(
    on_ranks: OnRanks, name: str, lora: bool, tmp_path: Path
) -> None:
    on_ranks(2, _sft, name, lora, str(tmp_path))
