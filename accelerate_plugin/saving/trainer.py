"""The Trainer's checkpoints: written aside, published whole, found only when complete."""

import importlib
import logging
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch.distributed as dist

import ya_fsdp
from accelerate_plugin.hooks import unless_asked
from accelerate_plugin.keys import SettingsError
from accelerate_plugin.prepare import is_managed
from accelerate_plugin.saving import forms
from accelerate_plugin.saving.folder import check_complete, why_incomplete
from accelerate_plugin.saving.publication import Publication, active, publication
from accelerate_plugin.saving.ranks import on_rank_zero

__all__ = [
    "wrap_get_last_checkpoint",
    "wrap_postprocess",
    "wrap_push_from_checkpoint",
    "wrap_save_checkpoint",
    "wrap_save_model",
    "wrap_save_part",
    "wrap_save_to_json",
    "wrap_train",
]

Function = Callable[..., Any]
_logger = logging.getLogger(__name__)
_CHECKPOINT = re.compile(r"checkpoint-(\d+)")
_TRAINER_STATE = "trainer_state.json"


def wrap_save_checkpoint(original: Function) -> Function:
    """Lets the Trainer write its checkpoint into another folder, and publishes that. A collective."""

    @unless_asked(original)
    def _save_checkpoint(self: Any, model: Any, trial: Any = None, *args: Any, **kwargs: Any) -> None:
        if not is_managed(self.model):
            original(self, model, trial, *args, **kwargs)
            return
        run_dir, best = self._get_output_dir(trial=trial), self.state.best_model_checkpoint
        final = os.path.join(run_dir, f"checkpoint-{self.state.global_step}")
        plugin = self.accelerator.state.fsdp_plugin
        facts = {"state_dict_type": forms.form_of(plugin), "num_processes": self.args.world_size}
        try:
            with publication(final, left_over="checkpoint-*", facts=facts) as saving:
                self._get_output_dir = lambda trial=None: os.path.join(run_dir, saving.aside.parent.name)
                try:
                    original(self, model, trial, *args, **kwargs)
                finally:
                    del self._get_output_dir  # the class's own again
                    _name_best(self.state, saving)
        except Exception:
            self.state.best_model_checkpoint = best
            raise
        for action in saving.afterwards:
            action(final)
        if self.args.should_save:
            # The Trainer has done this in the folder that it was given, where there was nothing to remove.
            importlib.import_module("transformers.trainer_utils").rotate_checkpoints(
                output_dir=run_dir,
                save_total_limit=self.args.save_total_limit,
                best_model_checkpoint=self.state.best_model_checkpoint,
                use_mtime=True,
            )

    return _save_checkpoint


def _name_best(state: Any, saving: Publication) -> None:
    """Gives the best checkpoint its final name where it is the one that is being written."""
    best = state.best_model_checkpoint
    if best is not None and Path(os.path.abspath(best)) == saving.aside:
        state.best_model_checkpoint = os.path.join(os.path.dirname(os.path.dirname(best)), saving.final.name)


def wrap_save_to_json(original: Function) -> Function:
    """Writes the final name of the best checkpoint into the Trainer's state."""

    @unless_asked(original)
    def save_to_json(self: Any, *args: Any, **kwargs: Any) -> Any:
        saving = active()
        if saving is not None:
            _name_best(self, saving)
        return original(self, *args, **kwargs)

    return save_to_json


def wrap_save_part(original: Function) -> Function:
    """Keeps an error of one part of a checkpoint for the end, when all ranks hear of it."""

    @unless_asked(original)
    def save_part(*args: Any, **kwargs: Any) -> Any:
        saving = active()
        if saving is None:
            return original(*args, **kwargs)
        with saving.deferring():
            return original(*args, **kwargs)

    return save_part


def wrap_push_from_checkpoint(original: Function) -> Function:
    """Uploads a checkpoint once it has its name."""

    @unless_asked(original)
    def _push_from_checkpoint(self: Any, *args: Any, **kwargs: Any) -> Any:
        saving = active()
        if saving is None:
            return original(self, *args, **kwargs)
        saving.afterwards.append(lambda final: original(self, final))
        return None

    return _push_from_checkpoint


def wrap_save_model(original: Function) -> Function:
    """Writes adapters without gathering their base, and something usable in the forms that gather nothing."""

    @unless_asked(original)
    def save_model(self: Any, output_dir: Any = None, _internal_call: bool = False, *args: Any) -> Any:
        if not is_managed(self.model):
            return original(self, output_dir, _internal_call, *args)
        saving = active()
        if saving is not None:
            with saving.deferring():
                _save_model(original, self, output_dir, _internal_call)
        else:
            _save_model(original, self, output_dir, _internal_call)
        return None

    return save_model


def _save_model(original: Function, trainer: Any, output_dir: str | None, internal: bool) -> None:
    folder = output_dir if output_dir is not None else trainer.args.output_dir
    if forms.form_of(trainer.accelerator.state.fsdp_plugin) == forms.FULL:
        if forms.is_adapter(trainer.model, True):
            wanted = {id(value) for value in forms.adapter_entries(trainer.model).values()}
            state = ya_fsdp.get_full_state_dict(trainer.model, select=lambda _, value: id(value) in wanted)
            trainer._save(folder, state_dict=state)
        else:
            original(trainer, folder, True)
    else:
        if not internal:
            forms.write_model(forms.SHARDED, trainer.model, folder, 0, adapter_only=True)
        if trainer.args.should_save:
            _describe(trainer, Path(folder))
    if trainer.args.push_to_hub and not internal:
        trainer.push_to_hub(commit_message="Model save", revision=trainer.args.hub_revision)


def _describe(trainer: Any, folder: Path) -> None:
    """Writes all that a model's folder has beside the weights, so that these can be merged into an ordinary model."""
    folder.mkdir(parents=True, exist_ok=True)
    model = trainer.model
    if forms.is_adapter(model, True):
        model.peft_config[model.active_adapter].save_pretrained(folder)
    else:
        for config in (getattr(model, "config", None), getattr(model, "generation_config", None)):
            if config is not None and hasattr(config, "save_pretrained"):
                config.save_pretrained(folder)
    tokenizer = trainer.processing_class or getattr(trainer.data_collator, "tokenizer", None)
    if tokenizer is not None:
        tokenizer.save_pretrained(folder)


def wrap_postprocess(original: Function) -> Function:
    """Refuses a form that cannot do what the arguments ask for, when the Trainer is built and not at its first save."""

    @unless_asked(original)
    def create_accelerator_and_postprocess(self: Any, *args: Any, **kwargs: Any) -> Any:
        result = original(self, *args, **kwargs)
        plugin = getattr(self.accelerator.state, "fsdp_plugin", None)
        if self.args.save_only_model and plugin is not None and forms.form_of(plugin) != forms.FULL:
            raise SettingsError(
                f"save_only_model and fsdp_state_dict_type: {forms.form_of(plugin)} cannot be combined: checkpoints "
                "without optimizer are plain model files, which FULL_STATE_DICT writes"
            )
        return result

    return create_accelerator_and_postprocess


def wrap_train(original: Function) -> Function:
    """Stops at once where the checkpoint to resume from is incomplete. A collective."""

    @unless_asked(original)
    def train(self: Any, resume_from_checkpoint: Any = None, *args: Any, **kwargs: Any) -> Any:
        if isinstance(resume_from_checkpoint, str | os.PathLike) and dist.is_initialized():
            folder = Path(resume_from_checkpoint)
            on_rank_zero(lambda: check_complete(folder), f"resuming from {folder}")
        return original(self, resume_from_checkpoint, *args, **kwargs)

    return train


def wrap_get_last_checkpoint(original: Function) -> Function:
    """Finds the newest checkpoint that is complete."""

    @unless_asked(original)
    def get_last_checkpoint(folder: Any, *args: Any, **kwargs: Any) -> Any:
        found = original(folder, *args, **kwargs)
        if found is None or _problem(Path(found)) is None:
            return found
        matches = [(_CHECKPOINT.fullmatch(path.name), path) for path in Path(folder).iterdir()]
        newest_first = sorted(((int(match[1]), path) for match, path in matches if match), reverse=True)
        for _, path in newest_first:
            problem = _problem(path)
            if problem is None:
                return os.path.join(folder, path.name)
            _logger.warning("%s is passed over: it is not a complete checkpoint: %s", path, problem)
        return None

    return get_last_checkpoint


def _problem(folder: Path) -> str | None:
    if not (folder / _TRAINER_STATE).exists():
        return f"{_TRAINER_STATE}, which is written last, is missing"
    return why_incomplete(folder)
