"""Trainer runs inside one job of the rank pools, and what there is to compare about them."""

import contextlib
import os
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from tests.support.engines import full
from tests.support.models import VOCABULARY, build_model

FORMS = ["FULL_STATE_DICT", "SHARDED_STATE_DICT", "LOCAL_STATE_DICT"]
FULL, SHARDED, LOCAL = FORMS


@contextlib.contextmanager
def launched(form: str = FULL, **variables: str) -> Iterator[None]:
    """The environment of a launched script, before it has built anything."""
    rank, world_size = str(dist.get_rank()), str(dist.get_world_size())
    places = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": world_size, "LOCAL_WORLD_SIZE": world_size}
    before = dict(os.environ)
    asked = {"FSDP_YA_FSDP_ENABLED": "true", "FSDP_STATE_DICT_TYPE": form, "ACCELERATE_USE_FSDP": "true"}
    os.environ.update({**asked, **places, **variables})
    import accelerate_plugin

    accelerate_plugin.install()
    from accelerate.state import AcceleratorState, GradientState

    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()
    try:
        yield
    finally:
        AcceleratorState._reset_state(reset_partial_state=True)
        GradientState._reset_state()
        os.environ.clear()
        os.environ.update(before)


def rows(number: int = 48, length: int = 8, vocabulary: int = VOCABULARY) -> list[dict[str, torch.Tensor]]:
    """A list-backed dataset of token ids."""
    ids = torch.randint(0, vocabulary, (number, length), generator=torch.Generator().manual_seed(5))
    return [{"input_ids": row, "labels": row} for row in ids]


def model_of(name: str, seed: int = 0, **changes: object) -> nn.Module:
    """A tiny model; ``gpt2`` with the dropout that it has by default."""
    if name == "gpt2":
        changes = {"resid_pdrop": 0.1, "embd_pdrop": 0.1, "attn_pdrop": 0.1, **changes}
    return build_model(name, seed=seed, **changes)


def trainer_of(model: nn.Module, folder: str, *, callbacks: Any = None, eval_rows: Any = None, **options: Any) -> Any:
    """A Trainer with AdamW, warm-up and cosine, clipping and small batches."""
    from transformers import Trainer, TrainingArguments

    defaults: dict[str, Any] = {
        "per_device_train_batch_size": 12 // dist.get_world_size() // 3,
        "logging_steps": 1,
        "report_to": [],
        "max_grad_norm": 1.0,
        "learning_rate": 1e-2,
        "lr_scheduler_type": "cosine",
        "warmup_steps": 2,
        "disable_tqdm": True,
        "dataloader_pin_memory": False,
        "save_strategy": "steps",
        "save_steps": 1000,
        "weight_decay": 0.1,
        "seed": 3,
    }
    arguments = TrainingArguments(folder, **{**defaults, **options})
    return Trainer(model=model, args=arguments, train_dataset=rows(), eval_dataset=eval_rows, callbacks=callbacks)


def contents(trainer: Any) -> dict[str, torch.Tensor]:
    """Whole weights and optimizer state of a run, by name (collective)."""
    from accelerate_plugin.optimizers import inner_optimizer

    names = {id(parameter): name for name, parameter in trainer.model.named_parameters()}
    values = {name: full(parameter) for name, parameter in trainer.model.named_parameters()}
    for parameter, state in inner_optimizer(trainer.optimizer).state.items():
        for key, value in state.items():
            values[f"{names[id(parameter)]}/{key}"] = full(value)
    return values


def logged(trainer: Any) -> dict[int, dict[str, float]]:
    """Loss, norm and learning rate by step."""
    keys = ("loss", "grad_norm", "learning_rate")
    return {
        entry["step"]: {key: entry[key] for key in keys} for entry in trainer.state.log_history if "grad_norm" in entry
    }


def assert_equal(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor], what: str) -> None:
    """Compare bit for bit."""
    assert found.keys() == expected.keys(), f"{what}: {found.keys() ^ expected.keys()}"
    for name, value in expected.items():
        assert found[name].dtype == value.dtype, f"{what}: dtype of {name}"
        assert torch.equal(found[name], value), f"{what}: {name} differs by {(found[name] - value).abs().max()}"


def forms_by_step(forms: dict[int, str]) -> Any:
    """A callback that saves after the given steps, each time in another form."""
    from transformers import TrainerCallback

    class SaveInForms(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            from accelerate.state import AcceleratorState

            if state.global_step in forms:
                AcceleratorState().fsdp_plugin.set_state_dict_type(forms[state.global_step])
                control.should_save = True

    return SaveInForms()


def watcher(**actions: Any) -> Any:
    """A callback that runs ``action(trainer)`` at the named events; set its ``trainer`` before training."""
    from transformers import TrainerCallback

    class Watcher(TrainerCallback):
        trainer: Any = None

    for event, action in actions.items():

        def run(self: Any, *_: Any, act: Any = action, **__: Any) -> None:
            act(self.trainer)

        setattr(Watcher, event, run)
    return Watcher()
