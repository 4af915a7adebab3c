"""Evaluation, prediction and generation, before and in the middle of training, disturb nothing."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from tests.huggingface.session import session
from tests.huggingface.stock_trainers import arguments, build, logged, padded, rows
from tests.support.engines import full_parameters
from tests.support.guards import assert_same_values
from ya_fsdp import RaggedShardDTensor

OnRanks = Callable[..., list[Any]]
NUM_NEW = 8


def _collate(examples: list[Any]) -> dict[str, torch.Tensor]:
    return padded(examples)


def _prompt(rank: int) -> torch.Tensor:
    """Prompts of other lengths on other ranks."""
    return torch.randint(4, 101, (1, 3 + 4 * rank), generator=torch.Generator().manual_seed(rank))


def _generate(model: nn.Module, rank: int, stop: int | None) -> list[int]:
    """Greedy tokens; ``stop`` ends the answer at that token on this rank only."""
    was_training = model.training
    model.eval()
    tokens = model.generate(  # type: ignore[operator]
        _prompt(rank),
        attention_mask=torch.ones_like(_prompt(rank)),
        max_new_tokens=NUM_NEW,
        do_sample=False,
        eos_token_id=stop,
        pad_token_id=0,
        use_cache=True,
    )
    model.train(was_training)
    return tokens[0, _prompt(rank).shape[1] :].tolist()


def _trainer(model: nn.Module, folder: str, **changes: Any) -> Any:
    from transformers import Trainer

    return Trainer(
        model,
        arguments(folder, **{"per_device_eval_batch_size": 2, **changes}),
        train_dataset=rows(),
        eval_dataset=rows(7, seed=8, even=True),
        data_collator=_collate,
    )


def _generates(name: str, folder: str, sample: bool) -> tuple[list[float], dict[str, torch.Tensor]]:
    from transformers import TrainerCallback

    rank = dist.get_rank()

    class Sample(TrainerCallback):  # type: ignore[misc]
        def on_step_end(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
            plain = build(name)
            weights = full_parameters(model)
            plain.load_state_dict(weights, strict=False)
            whole = _generate(plain, rank, None)
            stop = whole[2] if rank == 1 else None  # one rank ends after three tokens or less
            expected = _generate(plain, rank, stop)
            assert len(whole) == NUM_NEW
            assert rank == 0 or len(expected) <= 3
            found = _generate(model, rank, stop)
            assert found[: len(expected)] == expected
            assert set(found[len(expected) :]) <= {0}, "only filling follows the end"
            assert all(isinstance(value, RaggedShardDTensor) for value in model.parameters()), "held after generation"
            assert_same_values(full_parameters(model), weights, "weights")
            assert model.training

    with session():
        trainer = _trainer(build(name), folder)
        if sample:
            trainer.add_callback(Sample())
        trainer.train()
        return logged(trainer, "loss"), full_parameters(trainer.model)


@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_a_callback_generates_what_the_unsharded_model_would_and_training_goes_on_unchanged(
    on_ranks: OnRanks, name: str, tmp_path: Path
) -> None:
    without = on_ranks(2, _generates, name, str(tmp_path), False)
    for (losses, weights), (expected, same) in zip(
        on_ranks(2, _generates, name, str(tmp_path), True), without, strict=True
    ):
        assert losses == expected
        assert_same_values(weights, same, "weights after training")


@torch.no_grad()
def _expected(plain: nn.Module, examples: list[Any]) -> tuple[float, torch.Tensor]:
    """Loss and logits of seven rows in batches of two.

    The Trainer fills the last batch up with the first row on any number of processes above one, and gives a batch's
    mean loss to each of its rows.
    """
    batches = [examples[start : start + 2] for start in range(0, 7, 2)]
    batches[-1] = [*batches[-1], examples[0]]
    losses = [plain(**padded(batch)).loss.item() for batch in batches]
    return (2 * sum(losses[:3]) + losses[3]) / 7, plain(**padded(examples)).logits


def _evaluates(folder: str, during: bool) -> list[float]:
    examples = rows(7, seed=8, even=True)
    with session():
        trainer = _trainer(build("llama"), folder, **({"eval_strategy": "steps", "eval_steps": 2} if during else {}))
        if during:
            loss, logits = _expected(build("llama").eval(), examples)
            assert trainer.evaluate()["eval_loss"] == pytest.approx(loss, rel=1e-5)
            predicted = trainer.predict(examples)
            assert predicted.predictions.shape[0] == 7
            torch.testing.assert_close(torch.tensor(predicted.predictions), logits, atol=1e-5, rtol=0)
            assert all(isinstance(value, RaggedShardDTensor) for value in trainer.model.parameters())
        trainer.train()
        if during:
            assert len(logged(trainer, "eval_loss")) == 2, "once fresh, once in the middle"
            plain = build("llama").eval()
            plain.load_state_dict(full_parameters(trainer.model), strict=False)
            predicted = trainer.predict(examples)
            assert predicted.metrics["test_loss"] == pytest.approx(_expected(plain, examples)[0], rel=1e-5)
            assert predicted.predictions.shape[0] == 7
            assert all(isinstance(value, RaggedShardDTensor) for value in trainer.model.parameters())
    return logged(trainer, "loss")


def test_evaluation_and_prediction_equal_one_process_and_change_no_training_loss(
    on_ranks: OnRanks, tmp_path: Path
) -> None:
    assert on_ranks(2, _evaluates, str(tmp_path), True) == on_ranks(2, _evaluates, str(tmp_path), False)
