"""trl's own command-line scripts inside one job of the rank pools: folders of a model and data, and what a run did."""

import contextlib
import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import ya_fsdp
from tests.checkpoint.runs import launched
from tests.huggingface.stock_trainers import bits, logged, tokenizer, trainable
from tests.support.engines import full
from tests.support.guards import assert_really_sharded
from tests.support.models import VOCABULARY, build_model
from tests.support.recorder import CollectiveRecorder
from ya_fsdp import RaggedShardDTensor

CHAT = (
    "{% for m in messages %}{{ 'w4 ' + m['role'][0].replace('u', 'w5').replace('a', 'w6') + ' ' }}"
    "{{ m['content'] + ' w2 ' }}{% endfor %}{% if add_generation_prompt %}{{ 'w4 w6 ' }}{% endif %}"
)
ROWS = 16
#: The global batch of every run, over one process or two.
BATCH = 8


def _words(generator: torch.Generator, least: int, most: int) -> str:
    length = int(torch.randint(least, most + 1, (), generator=generator))
    return " ".join(f"w{index}" for index in torch.randint(7, VOCABULARY, (length,), generator=generator).tolist())


def _row(kind: str, generator: torch.Generator) -> dict[str, Any]:
    def say(role: str, least: int = 3, most: int = 9) -> list[dict[str, str]]:
        return [{"role": role, "content": _words(generator, least, most)}]

    match kind:
        case "text":
            return {"text": _words(generator, 6, 14)}
        case "completion":
            return {"prompt": _words(generator, 3, 6), "completion": " " + _words(generator, 2, 9)}
        case "chat":
            return {"messages": say("user") + say("assistant")}
        case "preference":
            # Answers of one length: the loss is a mean over rows, whose means over ranks are only then the whole's.
            return {"prompt": say("user", 4, 4), "chosen": say("assistant", 5, 5), "rejected": say("assistant", 6, 6)}
    raise ValueError(f"unknown kind of data {kind!r}")


def write_inputs(folder: Path, kind: str, model: str = "llama") -> None:
    """Writes a model with tokenizer and chat template to ``folder/model``, and data of a kind to ``folder/data``."""
    build_model(model).save_pretrained(folder / "model")  # type: ignore[operator]
    words = tokenizer()
    words.chat_template = CHAT
    words.save_pretrained(folder / "model")
    generator = torch.Generator().manual_seed(7)
    (folder / "data").mkdir()
    lines = [json.dumps(_row(kind, generator)) + "\n" for _ in range(ROWS)]
    (folder / "data" / "train.jsonl").write_text("".join(lines))


@dataclass
class Run:
    """What one run of a script did.

    Attributes:
        losses: of each step.
        norms: gradient norm of each step.
        weights: full parameters at the end, by name.
        units: units of the model.
        gradient_bytes: bytes of gradients that this rank held at the end of the first backward.
        trainable: elements that are trained.
    """

    losses: list[float] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)
    weights: dict[str, torch.Tensor] = field(default_factory=dict)
    units: int = 0
    gradient_bytes: int = 0
    trainable: int = 0


def run_script(name: str, folder: str, *words: str, sharded: bool) -> Run:
    """Runs ``trl.scripts.NAME`` with its own parser on ``folder/model`` and ``folder/data``.

    Args:
        name: ``sft`` or ``dpo``.
        folder: filled by :func:`write_inputs`.
        *words: further options of the script.
        sharded: on the engine, as a launched script; otherwise as plain ``python -m trl.scripts.NAME``.
    """
    import importlib

    script = importlib.import_module(f"trl.scripts.{name}")
    world = dist.get_world_size()
    options = {
        "model_name_or_path": f"{folder}/model",
        "dataset_name": f"{folder}/data",
        "output_dir": f"{folder}/out{world}",
        "per_device_train_batch_size": BATCH // world,
        "max_steps": 4,
        "learning_rate": 0.1,
        "lr_scheduler_type": "constant",
        "optim": "sgd",
        "bf16": "false",
        "logging_steps": 1,
        "save_strategy": "no",
        "report_to": "none",
        "disable_tqdm": "true",
        "dataloader_pin_memory": "false",
        "attn_implementation": "eager",
    }
    given = [word for key, value in options.items() for word in (f"--{key}", str(value))]
    with contextlib.ExitStack() as stack:
        if sharded:
            stack.enter_context(launched())
        run = stack.enter_context(_watched(folder, sharded))
        script.main(*script.make_parser().parse_args_and_config([*given, *words]))
    return run


@contextlib.contextmanager
def _watched(folder: str, sharded: bool) -> Iterator[Run]:
    """Looks over the shoulder of the Trainer that a script builds: at its first step, and after its training."""
    import datasets
    from transformers import Trainer

    run = Run()
    step, train = Trainer.training_step, Trainer.train

    def training_step(self: Any, model: Any, *args: Any, **kwargs: Any) -> torch.Tensor:
        if self.state.global_step or not sharded:
            return step(self, model, *args, **kwargs)
        with CollectiveRecorder() as recorder:
            loss: torch.Tensor = step(self, model, *args, **kwargs)
        assert_really_sharded(model, recorder, "ya_fsdp")
        assert all(isinstance(parameter, RaggedShardDTensor) for parameter in model.parameters())
        report = ya_fsdp.memory_report(model)
        run.gradient_bytes, run.units = report.gradients, report.num_units
        return loss

    def trained(self: Any, *args: Any, **kwargs: Any) -> Any:
        reference = getattr(self, "ref_model", None)
        before = None if reference is None else bits(reference)
        result = train(self, *args, **kwargs)
        if reference is not None and sharded:
            _assert_sharded_and_frozen(reference, before or {}, moved=self.args.sync_ref_model)
        run.losses, run.norms = logged(self, "loss"), logged(self, "grad_norm")
        run.weights = {name: full(parameter) for name, parameter in self.model.named_parameters()}
        run.trainable = sum(parameter.numel() for parameter in trainable(self.model).values())
        return result

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(datasets.config, "HF_DATASETS_CACHE", f"{folder}/cache{dist.get_rank()}")
        patch.setattr(Trainer, "training_step", training_step)
        patch.setattr(Trainer, "train", trained)
        yield run


def _assert_sharded_and_frozen(reference: Any, before: dict[str, torch.Tensor], *, moved: bool) -> None:
    world = dist.get_world_size()
    parameters = dict(reference.named_parameters())
    assert all(isinstance(parameter, RaggedShardDTensor) for parameter in parameters.values())
    assert not any(parameter.requires_grad for parameter in parameters.values())
    assert all(parameter.grad is None for parameter in parameters.values())
    assert ya_fsdp.memory_report(reference).gradients == 0, "a frozen model owns no storage for gradients"
    held = sum(value.numel() for value in before.values())
    assert held < 1.2 / world * sum(parameter.numel() for parameter in parameters.values())
    for name, value in bits(reference).items():
        changed = not torch.equal(value, before[name])
        assert changed == (moved and value.numel() > 0), f"{name} of the reference {'changed' if changed else 'stayed'}"
