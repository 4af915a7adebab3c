"""More tokens than the model was made for: resized before it is sharded, or told to be."""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.huggingface.session import session
from tests.support.models import build_model, my_rows
from tests.support.training import causal_loss

OnRanks = Callable[..., list[Any]]
NEW = (101, 102)


def _train_with_new_tokens(name: str, folder: str) -> None:
    model = build_model(name, seed=0)
    model.resize_token_embeddings(103, mean_resizing=False)
    before = model.get_input_embeddings().weight.detach().clone()
    tokens = torch.tensor([[5, 101, 7, 102, 9, 101], [102, 3, 101, 4, 102, 8]])
    with session() as accelerator:
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        model, optimizer = accelerator.prepare(model, optimizer)
        for _ in range(2):
            accelerator.backward(causal_loss(model, my_rows(tokens, dist.get_rank(), dist.get_world_size())))
            optimizer.step()
            optimizer.zero_grad()
        with pytest.raises(RuntimeError, match=r"resize_token_embeddings: .* before the model is prepared"):
            model.resize_token_embeddings(105)
        model.save_pretrained(folder, is_main_process=accelerator.is_main_process)
        if dist.get_rank() == 0:
            torch.save(before, os.path.join(folder, "before.pt"))


@pytest.mark.parametrize("name", ["llama", "qwen2"])
def test_new_rows_are_trained_and_saved_and_a_late_resize_says_what_to_do(
    on_ranks: OnRanks, name: str, tmp_path: Path
) -> None:
    from transformers import AutoModelForCausalLM

    on_ranks(2, _train_with_new_tokens, name, str(tmp_path))
    model = AutoModelForCausalLM.from_pretrained(tmp_path)
    before = torch.load(tmp_path / "before.pt", weights_only=True)
    for weight in (model.get_input_embeddings().weight, model.get_output_embeddings().weight):
        assert weight.shape == (103, before.shape[1])
    after = model.get_input_embeddings().weight.detach()
    assert all(not torch.equal(after[row], before[row]) for row in NEW)
    tied = model.get_input_embeddings().weight is model.get_output_embeddings().weight
    assert tied == (name == "qwen2")
