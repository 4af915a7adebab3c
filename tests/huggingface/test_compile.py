"""``torch_compile=True`` and accelerate's dynamo settings: the same numbers, graphs that run, plain names on disk."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from tests.huggingface.session import accelerated_steps, assert_close_to, plain_steps, session
from tests.huggingface.stock_trainers import arguments, bits, build, logged, padded, plain_run, rows
from tests.support.models import build_model, token_batches
from ya_fsdp import RaggedShardDTensor, YaFSDPModule

OnRanks = Callable[..., list[Any]]


def _graphs() -> int:
    return int(torch._dynamo.utils.counters["stats"]["unique_graphs"])


def _collate(examples: list[Any]) -> dict[str, torch.Tensor]:
    return padded(examples)


def _train(folder: str, evaluates_first: bool = True) -> None:
    from safetensors.torch import load_file
    from transformers import Trainer

    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    expected = list(plain_run(build("llama"), rows(8, even=True), steps=4))
    with session():
        model = build("llama")
        names = set(model.state_dict())
        settings = arguments(
            folder,
            max_steps=4,
            torch_compile=True,
            torch_compile_backend="aot_eager",
            save_strategy="steps",
            save_steps=4,
        )
        data = rows(8, even=True)
        trainer = Trainer(model, settings, train_dataset=data, eval_dataset=data, data_collator=_collate)
        if evaluates_first:
            assert trainer.evaluate()["eval_loss"] == pytest.approx(expected[0][0], abs=1e-4)
        trainer.train()
        assert _graphs() > 0, "nothing was compiled"
        assert all(isinstance(p, RaggedShardDTensor) for p in model.parameters())
        assert logged(trainer, "loss") == pytest.approx([step[0] for step in expected], abs=1e-4)
        assert logged(trainer, "grad_norm") == pytest.approx([step[1] for step in expected], abs=1e-4)
        before = _graphs()
        loss = trainer.evaluate()["eval_loss"]
        assert loss == pytest.approx(trainer.evaluate()["eval_loss"], abs=1e-6)
        assert _graphs() >= before
        trainer.save_model(f"{folder}/end")
        dist.barrier()
        for place in (Path(folder) / "end", Path(folder) / "checkpoint-4"):
            assert set(load_file(place / "model.safetensors")) == names, place
        weights = bits(model)
        again = Trainer(build("llama"), settings, train_dataset=data, data_collator=_collate)
        again.train(resume_from_checkpoint=str(Path(folder) / "checkpoint-4"))
        for name, value in bits(again.model).items():
            torch.testing.assert_close(value, weights[name], atol=0, rtol=0)


def test_the_trainer_compiles_what_is_sharded(on_ranks: OnRanks, tmp_path: Path) -> None:
    on_ranks(2, _train, str(tmp_path), limit=120)


def _regions() -> None:
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    batches = token_batches(3)
    reference = build_model("llama")
    plain = torch.optim.SGD(reference.parameters(), lr=0.1)
    model: nn.Module = build_model("llama")
    optimizer: Any = torch.optim.SGD(model.parameters(), lr=0.1)
    with session(ACCELERATE_DYNAMO_BACKEND="eager", ACCELERATE_DYNAMO_USE_REGIONAL_COMPILATION="true") as accelerator:
        model, optimizer = accelerator.prepare(model, optimizer)
        assert isinstance(model, YaFSDPModule)
        losses = accelerated_steps(accelerator, model, optimizer, batches)
        assert losses == pytest.approx(plain_steps(reference, plain, batches), abs=1e-5)
        assert_close_to(model, reference, atol=1e-5)
        assert _graphs() == 1, f"{_graphs()} graphs for three blocks that are alike"


def test_regional_compilation_makes_one_graph_for_all_blocks(on_ranks: OnRanks) -> None:
    on_ranks(2, _regions)


def _wrapped() -> None:
    torch._dynamo.reset()
    batches = token_batches(2)
    refused = pytest.raises(ValueError, match=r"wrapped by torch.compile.*pass the plain model")
    with session() as accelerator, refused:
        accelerator.prepare(torch.compile(build_model("llama"), backend="eager"))
    reference = build_model("llama")
    plain = torch.optim.SGD(reference.parameters(), lr=0.1)
    model: nn.Module = build_model("llama")
    for index, block in enumerate(model.model.layers):  # type: ignore[union-attr, arg-type]
        model.model.layers[index] = torch.compile(block, backend="eager")  # type: ignore[union-attr, index]
    optimizer: Any = torch.optim.SGD(model.parameters(), lr=0.1)
    with session() as accelerator:
        model, optimizer = accelerator.prepare(model, optimizer)
        losses = accelerated_steps(accelerator, model, optimizer, batches)
        assert losses == pytest.approx(plain_steps(reference, plain, batches), abs=1e-5)
        state = accelerator.get_state_dict(model)
        assert list(state) == (list(reference.state_dict()) if dist.get_rank() == 0 else [])


def test_compiled_blocks_are_sharded_and_a_compiled_model_is_refused(on_ranks: OnRanks) -> None:
    on_ranks(2, _wrapped)
