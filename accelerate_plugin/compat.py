"""What of accelerate, transformers and torch is replaced, why, and for which versions that was tested.

``REPLACEMENTS`` is the only list of its kind: every name that this package replaces anywhere stands in it. Each
replacement behaves exactly like the original unless the engine was asked for, which it checks when it is called.
"""

import importlib
import inspect
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass
from importlib import metadata
from types import ModuleType
from typing import Any

from accelerate_plugin.startup import requested

__all__ = [
    "REPLACEMENTS",
    "TESTED",
    "Replacement",
    "accelerator_available",
    "apply",
    "check_versions",
    "hooked_modules",
]

ALLOW_UNTESTED = "YA_FSDP_ALLOW_UNTESTED_VERSIONS"

# distribution: first version that is accepted, first version that is not
TESTED = {
    "accelerate": ("1.15", "1.16"),
    "torch": ("2.11", None),
    "transformers": ("5.24", "6"),
    "trl": ("1.16", "2"),
    "peft": ("0.21", "1"),
}


@dataclass(frozen=True, slots=True)
class Replacement:
    """One replaced name.

    Attributes:
        module: where the name is looked up when it is used. Names that a module copied with ``from x import y`` stand
            here with the module that copied them.
        name: attribute, or ``Class.method``.
        factory: ``module:function`` that takes the original and returns the replacement.
        why: the reason.
    """

    module: str
    name: str
    factory: str
    why: str


_LAUNCH = "accelerate.commands.launch"
_CHECKPOINTS = ("save_fsdp_model", "load_fsdp_model", "save_fsdp_optimizer", "load_fsdp_optimizer")
_CHECKPOINT_USERS = (
    "accelerate.utils.fsdp_utils",
    "accelerate.utils",
    "accelerate.accelerator",
    "transformers.trainer",
)

_LOST = "an error on one rank would leave the others waiting"
_TRAINER = (
    ("_save_checkpoint", "save_checkpoint", "an interrupted save must not damage an older one"),
    ("save_model", "save_model", "gathers the base of adapters, and writes nothing but under FULL_STATE_DICT"),
    ("_save_optimizer_and_scheduler", "save_part", _LOST),
    ("_save_scaler", "save_part", _LOST),
    ("_save_rng_state", "save_part", _LOST),
    ("_push_from_checkpoint", "push_from_checkpoint", "would upload a checkpoint that has not got its name yet"),
    ("create_accelerator_and_postprocess", "postprocess", "impossible settings would show at the first save"),
    ("train", "train", "half a checkpoint must not be loaded"),
)

REPLACEMENTS = (
    Replacement(
        _LAUNCH, "launch_command_parser", "launch:wrap_parser", "a flag that the parser does not know ends in exit 2"
    ),
    Replacement(
        "accelerate.commands.utils",
        "CustomArgumentParser.parse_args",
        "launch:wrap_parse_args",
        "`python -m accelerate.commands.launch` runs a second copy of the launcher, which no import hook sees",
    ),
    Replacement(
        _LAUNCH, "_validate_launch_command", "launch:wrap_validate", "unknown YAML keys are dropped without a word"
    ),
    Replacement(
        _LAUNCH, "prepare_multi_gpu_env", "launch:wrap_environment", "only a fixed list of keys reaches the workers"
    ),
    Replacement(
        "accelerate.utils.dataclasses",
        "FullyShardedDataParallelPlugin.__post_init__",
        "hooks:wrap_plugin_post_init",
        "raises without a GPU, and refuses values that the engine takes",
    ),
    Replacement(
        "accelerate.state",
        "PartialState.__init__",
        "hooks:wrap_partial_state",
        "without a GPU each process believes that it is alone",
    ),
    Replacement(
        "accelerate.state",
        "AcceleratorState.__init__",
        "hooks:wrap_accelerator_state",
        "never selects FSDP without a GPU",
    ),
    Replacement(
        "accelerate.accelerator",
        "Accelerator.__init__",
        "hooks:wrap_accelerator",
        "builds the plugin from all settings",
    ),
    Replacement("accelerate.accelerator", "Accelerator.prepare", "hooks:wrap_prepare", "shards with this engine"),
    Replacement(
        "accelerate.accelerator", "Accelerator.prepare_model", "hooks:wrap_prepare_model", "shards with this engine"
    ),
    Replacement(
        "accelerate.accelerator",
        "Accelerator.prepare_optimizer",
        "hooks:wrap_prepare_optimizer",
        "optimizers must hold the sharded parameters",
    ),
    Replacement(
        "accelerate.accelerator",
        "Accelerator.clip_grad_norm_",
        "hooks:wrap_clip_grad_norm",
        "the norm is over all shards, and a plain number",
    ),
    Replacement(
        "accelerate.accelerator",
        "Accelerator.get_state_dict",
        "checkpointing:wrap_get_state_dict",
        "full tensors, gathered one by one",
    ),
    *(
        Replacement(module, name, f"checkpointing:wrap_{name}", "the stock loader knows torch's own placements only")
        for module in _CHECKPOINT_USERS
        for name in _CHECKPOINTS
    ),
    Replacement(
        "accelerate.accelerator",
        "Accelerator.save_state",
        "saving.state:wrap_save_state",
        "an interrupted save must not damage an older one",
    ),
    Replacement(
        "accelerate.accelerator",
        "Accelerator.load_state",
        "saving.state:wrap_load_state",
        "half a checkpoint must not be loaded",
    ),
    *(
        Replacement("transformers.trainer", f"Trainer.{name}", f"saving.trainer:wrap_{function}", why)
        for name, function, why in _TRAINER
    ),
    *(
        Replacement(module, "get_last_checkpoint", "saving.trainer:wrap_get_last_checkpoint", "takes half checkpoints")
        for module in ("transformers.trainer_utils", "transformers.trainer")
    ),
    Replacement(
        "transformers.trainer_callback",
        "TrainerState.save_to_json",
        "saving.trainer:wrap_save_to_json",
        "would name the best checkpoint by the folder it is written in",
    ),
    Replacement(
        "transformers.modeling_utils",
        "PreTrainedModel.save_pretrained",
        "checkpointing:wrap_save_pretrained",
        "writes each rank's shards as if they were the weights",
    ),
    Replacement(
        "transformers.modeling_utils",
        "PreTrainedModel._load_pretrained_model",
        "loading:wrap_load_pretrained_model",
        "reads the whole checkpoint on every rank",
    ),
    Replacement(
        "transformers.training_args",
        "TrainingArguments._process_fsdp_args",
        "hooks:wrap_process_fsdp_args",
        "unknown fsdp_config keys are dropped without a word, and defaults cannot be told from choices",
    ),
    Replacement(
        "transformers.training_args",
        "is_torch_bf16_gpu_available",
        "hooks:wrap_bf16_available",
        "bf16 is refused on a CPU unless the script asks for CPU",
    ),
    Replacement(
        "trl.models.utils",
        "prepare_fsdp",
        "reference:wrap_prepare_fsdp",
        "shards a reference model with torch's engine, gathered as a whole",
    ),
    *(
        Replacement("peft.tuners.tuners_utils", f"BaseTuner.{name}", f"adapters:wrap_{name}", "needs whole layers")
        for name in ("merge_adapter", "unmerge_adapter")
    ),
)


def hooked_modules() -> list[str]:
    """Modules whose import is watched, without repetition."""
    return list(dict.fromkeys(["accelerate", "torch.optim.optimizer", *(item.module for item in REPLACEMENTS)]))


def apply(module: ModuleType) -> None:
    """Puts the replacements of one freshly imported module in place.

    Raises:
        ImportError: where the engine was asked for and the installed versions are outside the tested range.
    """
    if module.__name__ == "accelerate":
        if requested():
            check_versions()
        return
    if module.__name__ == "torch.optim.optimizer":
        # Nothing is replaced there: the engine's absence is noticed at the first optimizer step, however it came about.
        if requested():
            importlib.import_module("accelerate_plugin.guard").watch_optimizers(module)
        return
    problem = _outside_tested_range("accelerate")
    if problem and not _allow_untested():
        # Not asked for: leave everything alone. Asked for in a worker: the import of accelerate has already raised.
        if any("ya_fsdp" in argument or "ya-fsdp" in argument for argument in sys.argv[1:]):
            raise ImportError(problem)
        return
    for item in REPLACEMENTS:
        if item.module == module.__name__:
            _replace(module, item)


def _replace(module: ModuleType, item: Replacement) -> None:
    owner_name, _, attribute = item.name.rpartition(".")
    owner: Any = getattr(module, owner_name) if owner_name else module
    original = getattr(owner, attribute)
    if getattr(original, "__ya_fsdp__", False):
        return  # copied from a module where it was replaced already
    place, _, function = item.factory.partition(":")
    factory: Callable[[Any], Any] = getattr(importlib.import_module(f"accelerate_plugin.{place}"), function)
    replacement = factory(original)
    if replacement is not original:
        replacement.__ya_fsdp__ = True
        is_static = isinstance(inspect.getattr_static(owner, attribute), staticmethod)
        setattr(owner, attribute, staticmethod(replacement) if is_static else replacement)


def _allow_untested() -> bool:
    return os.environ.get(ALLOW_UNTESTED, "") not in ("", "0", "false")


def _version_tuple(text: str) -> tuple[int, ...]:
    numbers = []
    for part in text.split("+")[0].split("."):
        digits = "".join(character for character in part if character.isdigit())
        if not part[:1].isdigit():
            break
        numbers.append(int(digits))
    return tuple(numbers)


def _outside_tested_range(distribution: str) -> str | None:
    """A message where the installed version lies outside the tested range; None where it lies inside or is absent."""
    first, end = TESTED[distribution]
    try:
        found = metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return None
    version = _version_tuple(found)
    if version >= _version_tuple(first) and (end is None or version < _version_tuple(end)):
        return None
    wanted = f">={first}" + (f",<{end}" if end else "")
    return (
        f"ya-fsdp works inside accelerate and was tested with {distribution}{wanted}; found {distribution} {found}. "
        f"Install a tested version (pip install '{distribution}{wanted}'), or set {ALLOW_UNTESTED}=1 to try this one."
    )


def check_versions() -> None:
    """Compares the installed versions with the tested ones.

    Raises:
        ImportError: naming the distribution, the version found and the versions tested.
    """
    if _allow_untested():
        return
    for distribution in TESTED:
        problem = _outside_tested_range(distribution)
        if problem:
            raise ImportError(problem)


def accelerator_available() -> bool:
    """Whether this machine has a device that torch's collectives can use; Apple's does not count."""
    import torch

    return torch.cuda.is_available() or (hasattr(torch, "xpu") and torch.xpu.is_available())
