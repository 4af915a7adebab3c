"""A run that is resumed equals the run that never stopped, bit for bit, in every form."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from tests.checkpoint.runs import (
    FORMS,
    FULL,
    LOCAL,
    SHARDED,
    assert_equal,
    contents,
    forms_by_step,
    launched,
    logged,
    model_of,
    trainer_of,
    watcher,
)

OnRanks = Callable[..., list[Any]]
STEPS = 8


def _straight(name: str, bf16: bool, folder: str, forms: dict[int, str]) -> Any:
    with launched():
        callback = forms_by_step(forms)
        trainer = trainer_of(model_of(name), folder, callbacks=[callback], max_steps=STEPS, bf16=bf16)
        trainer.train()
        return logged(trainer), contents(trainer)


def _resumed(name: str, bf16: bool, folder: str, form: str, checkpoint: str, expected: Any) -> None:
    logs, values = expected
    with launched(form):
        # Other weights, so that nothing but the checkpoint can make the numbers equal.
        callbacks = [forms_by_step({6: form})]
        trainer = trainer_of(model_of(name, seed=7), folder, callbacks=callbacks, max_steps=STEPS, bf16=bf16)
        trainer.train(resume_from_checkpoint=checkpoint)
        found = logged(trainer)
        first = int(checkpoint.rpartition("-")[2]) + 1
        assert list(found)[-(STEPS - first + 1) :] == list(range(first, STEPS + 1))
        assert {step: found[step] for step in range(first, STEPS + 1)} == {
            step: logs[step] for step in range(first, STEPS + 1)
        }
        assert_equal(contents(trainer), values, f"{name} in {form}")
    with launched(form):
        again = trainer_of(model_of(name, seed=8), folder, max_steps=STEPS, bf16=bf16)
        again.train(resume_from_checkpoint=f"{folder}/checkpoint-6")
        assert again.state.global_step == STEPS
        assert_equal(contents(again), values, f"{name} in {form}, resumed twice")


@pytest.mark.parametrize("bf16", [False, True], ids=["fp32", "bf16"])
@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_a_resumed_run_equals_the_one_that_never_stopped(
    on_ranks: OnRanks, name: str, bf16: bool, tmp_path: Path
) -> None:
    forms = dict(zip((3, 4, 5), FORMS, strict=True))
    expected = on_ranks(2, _straight, name, bf16, str(tmp_path / "straight"), forms)[0]
    files = {step: {path.name for path in (tmp_path / f"straight/checkpoint-{step}").iterdir()} for step in forms}
    assert {"pytorch_model_fsdp.bin", "optimizer.bin", "model.safetensors"} <= files[3]
    assert {"pytorch_model_fsdp_0", "optimizer_0", "config.json"} <= files[4]
    assert {"pytorch_model_fsdp_0_local", "optimizer_0_local", "rng_state_0.pth", "rng_state_1.pth"} <= files[5]
    for step, form in forms.items():
        folder, checkpoint = str(tmp_path / form), str(tmp_path / f"straight/checkpoint-{step}")
        on_ranks(2, _resumed, name, bf16, folder, form, checkpoint, expected)
    assert not list(tmp_path.rglob("*saving*"))


def _saved(folder: str, forms: dict[int, str]) -> Any:
    kept: dict[int, Any] = {}
    with launched():
        callbacks = [forms_by_step(forms), watcher(on_step_end=lambda trainer: kept.update(_kept(trainer)))]
        trainer = trainer_of(model_of("llama"), folder, callbacks=callbacks, max_steps=5, **_batch())
        callbacks[1].trainer = trainer
        trainer.train()
        return logged(trainer), kept


def _kept(trainer: Any) -> dict[int, Any]:
    return {trainer.state.global_step: contents(trainer)}


def _batch() -> dict[str, int]:
    return {"per_device_train_batch_size": 12 // dist.get_world_size()}


@pytest.fixture(scope="session")
def saved_by_two(rank_pools: Any, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Checkpoints of two processes, one in each form: their folders, what was logged, and what each one holds."""
    folder = str(tmp_path_factory.mktemp("two"))
    logs, kept = rank_pools.run(2, _saved, folder, dict(zip((2, 3, 4), FORMS, strict=True)))[0]
    return {form: (f"{folder}/checkpoint-{step}", logs[step + 1], kept[step]) for step, form in enumerate(FORMS, 2)}


def _continue_elsewhere(folder: str, form: str, checkpoint: str, following: dict[str, float], saved: Any) -> None:
    loaded: list[Any] = []
    with launched(form):
        callbacks = [watcher(on_train_begin=lambda trainer: loaded.append(contents(trainer)))]
        step = int(checkpoint.rpartition("-")[2])
        trainer = trainer_of(model_of("llama", seed=7), folder, callbacks=callbacks, max_steps=5, **_batch())
        callbacks[0].trainer = trainer
        trainer.train(resume_from_checkpoint=checkpoint)
        assert_equal(loaded[0], saved, form)
        found = logged(trainer)[step + 1]
        assert found["learning_rate"] == following["learning_rate"]
        assert found["loss"] == pytest.approx(following["loss"], abs=1e-5)
        assert found["grad_norm"] == pytest.approx(following["grad_norm"], abs=1e-4)


@pytest.mark.parametrize("world", [1, 3, 4])
def test_another_number_of_processes_gets_exactly_what_was_saved(
    on_ranks: OnRanks, saved_by_two: Any, world: int, tmp_path: Path
) -> None:
    for form in (FULL, SHARDED):
        on_ranks(world, _continue_elsewhere, str(tmp_path / form), form, *saved_by_two[form])


def _refused(folder: str, checkpoint: str) -> None:
    with launched(LOCAL):
        trainer = trainer_of(model_of("llama", seed=7), folder, max_steps=4)
        with pytest.raises(RuntimeError, match=r"was saved by 2 processes under LOCAL_STATE_DICT .* loaded by 3"):
            trainer.train(resume_from_checkpoint=checkpoint)
        untouched = {name: value.detach() for name, value in model_of("llama", seed=7).named_parameters()}
        found = {name: parameter.full_tensor().detach() for name, parameter in trainer.model.named_parameters()}
        assert_equal(found, untouched, "after the refusal")


@pytest.mark.parametrize("world", [3])
def test_local_files_of_two_processes_are_refused_by_three_before_anything_changes(
    on_ranks: OnRanks, saved_by_two: Any, world: int, tmp_path: Path
) -> None:
    on_ranks(world, _refused, str(tmp_path), saved_by_two[LOCAL][0])
