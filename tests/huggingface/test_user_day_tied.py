"""Tied embeddings through a whole run: one parameter under two names, from loading to the reloaded file."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.huggingface.session import session
from tests.support.engines import full, full_gradients, plain_gradients
from tests.support.guards import assert_really_sharded, assert_same_values
from tests.support.models import build_model, my_rows, token_batches
from tests.support.training import causal_loss, mean_over_ranks, total_norm

OnRanks = Callable[..., list[Any]]


def _is_tied(model: Any) -> bool:
    return model.get_input_embeddings().weight is model.get_output_embeddings().weight


def _trains(name: str, rank_zero_loads: bool, folder: str) -> None:
    rank, world_size = dist.get_rank(), dist.get_world_size()
    reference: Any = build_model(name)
    variables = {
        "FSDP_CPU_RAM_EFFICIENT_LOADING": str(rank_zero_loads).lower(),
        "FSDP_TRANSFORMER_CLS_TO_WRAP": {"gpt2": "GPT2Block", "qwen2": "Qwen2DecoderLayer"}[name],
    }
    with session(**variables) as accelerator:
        from transformers import AutoModelForCausalLM

        model = AutoModelForCausalLM.from_pretrained(f"{folder}/first", attn_implementation="eager").train()
        plain = torch.optim.SGD(reference.parameters(), lr=0.1)
        model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
        seen: list[bool] = []
        model.get_output_embeddings().register_forward_hook(lambda *_: seen.append(_is_tied(model)))
        for step, batch in enumerate(token_batches(8)):
            expected = causal_loss(reference, batch)
            expected.backward()
            loss = causal_loss(model, my_rows(batch, rank, world_size))
            accelerator.backward(loss)
            assert mean_over_ranks(loss) == pytest.approx(expected.item(), rel=1e-5), f"loss of step {step}"
            assert total_norm(model) == pytest.approx(total_norm(reference), rel=1e-5), "counted once in the norm"
            assert_same_values(full_gradients(model), plain_gradients(reference), "gradients", atol=1e-6, rtol=1e-5)
            for one in (plain, optimizer):
                one.step()
                one.zero_grad()
        assert seen == [True] * 8
        assert _is_tied(model)
        assert sum(len(group["params"]) for group in optimizer.param_groups) == len(list(reference.parameters()))
        assert_really_sharded(model, None, "ya_fsdp")
        weight = full(model.get_output_embeddings().weight)
        model.save_pretrained(f"{folder}/sharded", is_main_process=rank == 0)
    if rank == 0:
        _check_file(reference, weight, folder)


def _check_file(reference: Any, weight: torch.Tensor, folder: str) -> None:
    from safetensors.torch import load_file
    from transformers import AutoModelForCausalLM

    reference.save_pretrained(f"{folder}/plain")
    files = [load_file(f"{folder}/{kind}/model.safetensors") for kind in ("sharded", "plain")]
    assert set(files[0]) == set(files[1]), "the file holds what a plain save holds"
    again = AutoModelForCausalLM.from_pretrained(f"{folder}/sharded")
    assert _is_tied(again)
    assert torch.equal(again.get_output_embeddings().weight, weight)


@pytest.mark.parametrize("rank_zero_loads", [True, False])
@pytest.mark.parametrize("name", ["gpt2", "qwen2"])
def test_tied_embeddings_stay_one_parameter_from_loading_to_the_saved_file(
    on_ranks: OnRanks, name: str, rank_zero_loads: bool, tmp_path: Path
) -> None:
    build_model(name).save_pretrained(tmp_path / "first")
    on_ranks(2, _trains, name, rank_zero_loads, str(tmp_path))
