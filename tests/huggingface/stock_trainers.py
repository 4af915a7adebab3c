"""What the tests of stock trainers share: token rows, a tokenizer built in code, arguments, and plain references."""

import copy
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from tests.support.models import VOCABULARY, build_model

LEARNING_RATE = 0.3
Row = dict[str, list[int]]


def tokenizer() -> Any:
    """A word-level tokenizer of the tiny models' vocabulary: word ``w5`` is id 5."""
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from tokenizers.pre_tokenizers import WhitespaceSplit
    from transformers import PreTrainedTokenizerFast

    words = {f"w{index}": index for index in range(VOCABULARY)}
    backend = Tokenizer(WordLevel(words, unk_token="w3"))
    backend.pre_tokenizer = WhitespaceSplit()
    return PreTrainedTokenizerFast(
        tokenizer_object=backend, pad_token="w0", bos_token="w1", eos_token="w2", unk_token="w3"
    )


def rows(count: int = 8, seed: int = 3, *, even: bool = False) -> list[Row]:
    """Rows of 7 to 12 tokens, of which about half have a label; ``even``: the same lengths and labels everywhere."""
    generator = torch.Generator().manual_seed(seed)
    result = []
    for index in range(count):
        length = 10 if even else 7 + index % 6
        ids = torch.randint(4, VOCABULARY, (length,), generator=generator).tolist()
        hidden = 5 if even else length // 2 + index % 2
        result.append({"input_ids": ids, "labels": [-100] * hidden + ids[hidden:]})
    return result


def arguments(folder: str, config: str = "transformers.TrainingArguments", **changes: Any) -> Any:
    """Arguments of a short run under SGD that logs every step and writes nothing."""
    import importlib

    module, _, name = config.rpartition(".")
    values: dict[str, Any] = {
        "output_dir": folder,
        "max_steps": 3,
        "per_device_train_batch_size": 4,
        "logging_steps": 1,
        "report_to": [],
        "learning_rate": LEARNING_RATE,
        "lr_scheduler_type": "constant",
        "optim": "sgd",
        "save_strategy": "no",
        "disable_tqdm": True,
        "dataloader_pin_memory": False,
    }
    return getattr(importlib.import_module(module), name)(**{**values, **changes})


def logged(trainer: Any, name: str) -> list[float]:
    """Values that a Trainer logged, by step."""
    return [entry[name] for entry in trainer.state.log_history if name in entry]


def with_lora(model: nn.Module, seed: int = 5) -> nn.Module:
    """Adds adapters to a model; no factor is zero, so that all of them get a gradient."""
    from peft import LoraConfig, get_peft_model

    torch.manual_seed(seed)
    result = get_peft_model(model, LoraConfig(r=4, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM"))
    for name, parameter in result.named_parameters():
        if "lora_B" in name:
            nn.init.normal_(parameter, std=0.1)
    return result


def build(name: str, *, lora: bool = False) -> nn.Module:
    """A tiny model, the same everywhere, with or without adapters."""
    model = build_model(name)
    return with_lora(model) if lora else model


def trainable(model: nn.Module) -> dict[str, nn.Parameter]:
    """Parameters that are trained, by name."""
    return {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}


def padded(examples: list[Row]) -> dict[str, torch.Tensor]:
    """Rows as one batch, filled up at the right."""
    longest = max(len(row["input_ids"]) for row in examples)

    def fill(key: str, value: int) -> torch.Tensor:
        return torch.tensor([row[key] + [value] * (longest - len(row[key])) for row in examples])

    mask = torch.tensor([[1] * len(row["input_ids"]) + [0] * (longest - len(row["input_ids"])) for row in examples])
    return {"input_ids": fill("input_ids", 0), "labels": fill("labels", -100), "attention_mask": mask}


def plain_run(
    model: nn.Module, examples: list[Row], steps: int = 3, max_norm: float = 1.0
) -> Iterator[tuple[float, float, dict[str, torch.Tensor]]]:
    """Train in this process on all rows at each step; yield loss, gradient norm and gradients before clipping."""
    parameters = trainable(model)
    optimizer = torch.optim.SGD(parameters.values(), lr=LEARNING_RATE)
    batch = padded(examples)
    for _ in range(steps):
        loss = model(**batch).loss
        loss.backward()
        gradients = {name: copy.deepcopy(parameter.grad) for name, parameter in parameters.items()}
        norm = torch.nn.utils.clip_grad_norm_(parameters.values(), max_norm)
        optimizer.step()
        optimizer.zero_grad()
        yield loss.item(), norm.item(), {name: value for name, value in gradients.items() if value is not None}


def bits(model: nn.Module) -> dict[str, torch.Tensor]:
    """This rank's part of every parameter, copied."""
    return {
        name: (parameter.to_local() if hasattr(parameter, "to_local") else parameter).detach().clone()
        for name, parameter in model.named_parameters()
    }


def on_rank_zero() -> bool:
    """Whether this is the first rank."""
    return dist.get_rank() == 0
