"""What checkpoints hold, what it costs to write them, and what they are refused for."""

import json
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.checkpoint.runs import (
    FORMS,
    FULL,
    LOCAL,
    SHARDED,
    assert_equal,
    contents,
    launched,
    model_of,
    rows,
    trainer_of,
    watcher,
)
from tests.support.models import token_batches
from tests.support.recorder import CollectiveRecorder

OnRanks = Callable[..., list[Any]]


def _best(folder: str, form: str) -> None:
    kept: dict[int, Any] = {}

    def keep(trainer: Any) -> None:
        weights = {name: value for name, value in contents(trainer).items() if "/" not in name}
        kept[trainer.state.global_step] = weights

    with launched(form):
        callbacks = [watcher(on_step_end=keep)]
        options = {"eval_strategy": "steps", "eval_steps": 1, "save_steps": 1, "max_steps": 5, "learning_rate": 0.3}
        trainer = trainer_of(
            model_of("llama"),
            folder,
            callbacks=callbacks,
            eval_rows=rows(8),
            load_best_model_at_end=True,
            save_total_limit=1,
            **options,
        )
        callbacks[0].trainer = trainer
        trainer.train()
        dist.barrier()
        best = trainer.state.best_global_step
        assert best < 5, "the rate is high enough that an early checkpoint is best"
        assert trainer.state.best_model_checkpoint == f"{folder}/checkpoint-{best}"
        weights = {name: value for name, value in contents(trainer).items() if "/" not in name}
        assert_equal(weights, kept[best], f"best of {form}")
        assert trainer.evaluate()["eval_loss"] == pytest.approx(trainer.state.best_metric, abs=1e-6)
        remaining = {path.name for path in Path(folder).glob("checkpoint-*")}
        assert f"checkpoint-{best}" in remaining
        assert len(remaining) <= 2
        state = json.loads(Path(folder, f"checkpoint-{best}", "trainer_state.json").read_text())
        assert state["best_model_checkpoint"] == f"{folder}/checkpoint-{best}"


@pytest.mark.parametrize("form", FORMS)
def test_the_best_model_at_the_end_is_exactly_the_best_checkpoint(on_ranks: OnRanks, form: str, tmp_path: Path) -> None:
    on_ranks(2, _best, str(tmp_path), form)


def _only_model(folder: str) -> None:
    for form in (SHARDED, LOCAL):
        with launched(form), pytest.raises(ValueError, match=rf"save_only_model.*{form}"):
            trainer_of(model_of("llama"), folder, save_only_model=True)
    best = {"eval_strategy": "steps", "eval_steps": 1, "save_steps": 1, "load_best_model_at_end": True}
    with launched(), pytest.raises(ValueError, match=r"save_only_model.*load_best_model_at_end"):
        trainer_of(model_of("llama"), folder, save_only_model=True, eval_rows=rows(8), **best)
    with launched():
        trainer = trainer_of(model_of("llama"), folder, save_only_model=True, save_steps=2, max_steps=2)
        trainer.train()
        expected = {name: value for name, value in contents(trainer).items() if "/" not in name}
    names = {path.name for path in Path(folder, "checkpoint-2").iterdir()}
    assert "model.safetensors" in names
    assert not [name for name in names if name.startswith(("optimizer", "pytorch_model_fsdp", "rng"))]
    with launched():
        from accelerate import Accelerator
        from accelerate.utils import fsdp_utils

        accelerator = Accelerator()
        model = accelerator.prepare(model_of("llama", seed=4))
        fsdp_utils.load_fsdp_model(accelerator.state.fsdp_plugin, accelerator, model, f"{folder}/checkpoint-2")
        found = {name: parameter.full_tensor().detach() for name, parameter in model.named_parameters()}
        assert_equal(found, expected, "loaded from the plain file")


def test_checkpoints_without_optimizer_are_plain_models_or_refused_when_the_trainer_is_built(
    on_ranks: OnRanks, tmp_path: Path
) -> None:
    on_ranks(2, _only_model, str(tmp_path))


def _peft_model(seed: int) -> Any:
    from peft import LoraConfig, get_peft_model

    config = LoraConfig(r=4, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM", init_lora_weights=False)
    torch.manual_seed(seed)
    return get_peft_model(model_of("llama"), config)


def _adapters(trainer: Any) -> dict[str, torch.Tensor]:
    return {n: p.full_tensor().detach() for n, p in trainer.model.named_parameters() if p.requires_grad}


def _mark_slices(trainer: Any) -> None:
    with torch.no_grad():
        for parameter in trainer.model.parameters():
            if parameter.requires_grad:
                parameter.to_local().fill_(0.01 * (1 + dist.get_rank()))


def _adapter_checkpoint(folder: str, form: str) -> Any:
    loaded: list[Any] = []
    with launched(form):
        callbacks = [watcher(on_step_end=_mark_slices)]
        trainer = trainer_of(_peft_model(1), folder, callbacks=callbacks, max_steps=1, save_steps=1)
        callbacks[0].trainer = trainer
        trainer.train()
        expected = _adapters(trainer)
        assert len({float(value.flatten()[0]) for value in expected.values()}) == 2, "both ranks hold some"
        trainer.model.eval()
        with torch.no_grad():
            logits = trainer.model(input_ids=token_batches(1)[0]).logits
    with launched(form):
        callbacks = [watcher(on_train_begin=lambda t: loaded.append(_adapters(t)))]
        again = trainer_of(_peft_model(2), folder, callbacks=callbacks, max_steps=2)
        callbacks[0].trainer = again
        again.train(resume_from_checkpoint=f"{folder}/checkpoint-1")
        assert_equal(loaded[0], expected, f"adapters in {form}")
    return logits


def _tensors(value: Any, name: str = "") -> Iterator[tuple[str, torch.Tensor]]:
    if isinstance(value, torch.Tensor):
        yield name, value
    elif isinstance(value, dict):
        for key, inner in value.items():
            yield from _tensors(inner, f"{name}/{key}")


@pytest.mark.parametrize("form", FORMS)
def test_adapter_checkpoints_are_complete_small_and_open_with_peft(
    on_ranks: OnRanks, form: str, tmp_path: Path
) -> None:
    from peft import PeftModel
    from safetensors.torch import load_file

    from accelerate_plugin import merge

    logits = on_ranks(2, _adapter_checkpoint, str(tmp_path), form)[0]
    checkpoint = tmp_path / "checkpoint-1"
    if form == SHARDED:
        merge.merge(checkpoint, tmp_path / "merged")
    names = set(load_file(checkpoint / "adapter_model.safetensors")) if form == FULL else set()
    for path in [*checkpoint.glob("*model_fsdp*.bin"), *checkpoint.glob("*model_fsdp*/*.bin")]:
        names |= {name for name, _ in _tensors(torch.load(path, weights_only=True))}
    if form == SHARDED:
        parts = [checkpoint / "pytorch_model_fsdp_0", checkpoint / "optimizer_0"]
        names |= {name for part in parts for name in merge.ShardedTensors(part).names()}
    assert names
    assert all("lora_" in name for name in names), names
    base = sum(p.numel() for p in model_of("llama").parameters()) * 4
    # Whatever the names say: a file of adapters has no room for the base.
    assert all(path.stat().st_size < base / 2 for path in checkpoint.rglob("*") if path.is_file())
    if form != LOCAL:
        folder = checkpoint if form == FULL else tmp_path / "merged"
        model = PeftModel.from_pretrained(model_of("llama"), folder).eval()
        with torch.no_grad():
            found = model(input_ids=token_batches(1)[0]).logits
        torch.testing.assert_close(found, logits, atol=1e-6, rtol=0)


def _other_vocabulary(folder: str, form: str) -> None:
    with launched(form):
        model = model_of("llama")
        model.resize_token_embeddings(103)
        trainer = trainer_of(model, folder, max_steps=1, save_steps=1)
        trainer.train()
    with launched(form):
        again = trainer_of(model_of("llama"), folder, max_steps=2)
        with pytest.raises(RuntimeError, match=r"(embed_tokens|lm_head).*\(103, 40\).*\(101, 40\)"):
            again.train(resume_from_checkpoint=f"{folder}/checkpoint-1")


@pytest.mark.parametrize("form", FORMS)
def test_a_checkpoint_of_another_vocabulary_stops_all_ranks_with_both_sizes(
    on_ranks: OnRanks, form: str, tmp_path: Path
) -> None:
    on_ranks(2, _other_vocabulary, str(tmp_path), form)


def _cost(folder: str) -> None:
    from accelerate_plugin.saving import forms
    from tests.checkpoint.test_exchange import _build, _train
    from ya_fsdp.state_dict import model as model_state
    from ya_fsdp.state_dict import optimizer as optimizer_state

    model, optimizer = _build("llama", 1, "ya_fsdp")
    _train(model, optimizer)
    for form in (SHARDED, LOCAL):
        with CollectiveRecorder() as recorder:
            forms.write_model(form, model, folder, 0, adapter_only=False)
            forms.write_optimizer(form, model, optimizer, folder, 0)
        # What the ranks tell each other are bytes and flags.
        assert not [event for event in recorder.events if event.dtype is not None and event.dtype.is_floating_point]
    gather, alive, most = model_state.gather_full, [], [0]

    def watched(*args: Any) -> torch.Tensor:
        most[0] = max(most[0], sum(reference() is not None for reference in alive))
        whole = gather(*args)
        alive.append(weakref.ref(whole))
        return whole

    model_state.gather_full = optimizer_state.gather_full = watched
    try:
        forms.write_model(FULL, model, folder, 0, adapter_only=False)
        number = len(alive)
        assert number == len(list(model.parameters()))
        assert not [reference for reference in alive if reference() is not None], "nothing is kept after the save"
        forms.write_optimizer(FULL, model, optimizer, folder, 0)
        assert len(alive) == 3 * number
    finally:
        model_state.gather_full = optimizer_state.gather_full = gather
    if dist.get_rank() == 0:
        assert most[0] <= 2 * number, "rank 0 holds what it writes"
    else:
        assert most[0] <= 1, f"rank {dist.get_rank()} held {most[0]} whole tensors at a time"


def test_sharded_and_local_saves_gather_nothing_and_full_ones_one_tensor_at_a_time(
    on_ranks: OnRanks, tmp_path: Path
) -> None:
    on_ranks(2, _cost, str(tmp_path))


def _odd(folder: str, form: str) -> None:
    from accelerate_plugin.saving import forms
    from tests.support.engines import full, shard
    from tests.support.models import OddModel
    from tests.support.training import square_loss

    def build(seed: int) -> Any:
        model = OddModel(seed)
        model = shard(model, units=list(model.blocks))
        return model, torch.optim.AdamW(model.parameters(), lr=1e-2)

    def step(model: Any, optimizer: Any) -> None:
        square_loss(model, torch.ones(4, 5)).backward()
        optimizer.step()
        optimizer.zero_grad()

    model, optimizer = build(1)
    step(model, optimizer)
    forms.write_model(form, model, folder, 0, adapter_only=False)
    forms.write_optimizer(form, model, optimizer, folder, 0)
    other, other_optimizer = build(2)
    forms.read_model(form, other, folder, 0, adapter_only=False)
    forms.read_optimizer(form, other, other_optimizer, folder, 0)
    for _ in range(2):
        found, expected = ({n: full(p) for n, p in m.named_parameters()} for m in (other, model))
        assert_equal(found, expected, form)
        step(model, optimizer)
        step(other, other_optimizer)


@pytest.mark.parametrize("world", [2, 4])
def test_parameters_without_dimensions_or_elements_come_back(on_ranks: OnRanks, world: int, tmp_path: Path) -> None:
    for form in FORMS:
        on_ranks(world, _odd, str(tmp_path / form), form)
