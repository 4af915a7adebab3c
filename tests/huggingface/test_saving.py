"""Checkpoints are plain full files, what is loaded back is what was saved, and recomputation changes no number."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.huggingface.session import accelerated_steps, session, two_groups
from tests.support.models import build_model, token_batches
from tests.support.training import causal_loss

OnRanks = Callable[..., list[Any]]


def _save_and_go_on(name: str, folder: str) -> list[float]:
    model = build_model(name)
    with session() as accelerator:
        model, optimizer = accelerator.prepare(model, torch.optim.AdamW(two_groups(model), lr=1e-2))
        batches = token_batches(6)
        accelerated_steps(accelerator, model, optimizer, batches[:3])
        accelerator.save_state(folder)
        return accelerated_steps(accelerator, model, optimizer, batches[3:])


def _load_and_go_on(name: str, folder: str) -> list[float]:
    model = build_model(name, seed=7)
    with session() as accelerator:
        model, optimizer = accelerator.prepare(model, torch.optim.AdamW(two_groups(model), lr=5e-1))
        accelerator.load_state(folder)
        assert [group["lr"] for group in optimizer.param_groups] == [2e-3, 1e-2]
        return accelerated_steps(accelerator, model, optimizer, token_batches(6)[3:])


@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_a_run_that_was_saved_and_loaded_goes_on_bit_for_bit(on_ranks: OnRanks, name: str, tmp_path: Path) -> None:
    straight = on_ranks(2, _save_and_go_on, name, str(tmp_path))
    assert on_ranks(2, _load_and_go_on, name, str(tmp_path)) == straight
    state = torch.load(tmp_path / "optimizer.bin", weights_only=True)
    shapes = {key: value.shape for key, value in build_model(name).named_parameters()}
    assert set(state["state"]) == set(shapes)
    assert all(values["exp_avg"].shape == shapes[key] for key, values in state["state"].items())
    assert not list(tmp_path.parent.glob(".saving*"))


def _failed_save(folder: str) -> None:
    with session() as accelerator:
        accelerator.prepare(build_model("llama"))
        with pytest.raises(RuntimeError, match=rf"rank {dist.get_rank()}: saving .*/state failed on rank 0: \w+Error"):
            accelerator.save_state(f"{folder}/state")


def test_a_save_that_fails_on_rank_zero_fails_on_every_rank_and_keeps_the_older_file(
    on_ranks: OnRanks, tmp_path: Path
) -> None:
    (tmp_path / "state").mkdir()
    older = tmp_path / "state" / "pytorch_model_fsdp.bin"
    older.write_bytes(b"older")
    (tmp_path / ".saving-state").write_text("a file where the new checkpoint would be written")
    on_ranks(2, _failed_save, str(tmp_path))
    assert older.read_bytes() == b"older"


def _other_optimizer(folder: str) -> None:
    model = build_model("llama")
    with session() as accelerator:
        model, _ = accelerator.prepare(model, torch.optim.AdamW(model.parameters()))
        with pytest.raises(RuntimeError, match=r"state of AdamW does not fit: it has 2 groups"):
            accelerator.load_state(folder)


def test_an_optimizer_with_other_groups_is_refused(on_ranks: OnRanks, tmp_path: Path) -> None:
    on_ranks(2, _save_and_go_on, "llama", str(tmp_path))
    on_ranks(2, _other_optimizer, str(tmp_path))


def _save_pretrained(folder: str) -> torch.Tensor:
    model = build_model("llama", seed=3)
    with session() as accelerator:
        model = accelerator.prepare(model)
        with pytest.raises(ValueError, match="all ranks have to call it"):
            model.save_pretrained(folder)
        accelerator.unwrap_model(model).save_pretrained(folder, is_main_process=accelerator.is_main_process)
        accelerator.save_model(model, f"{folder}/plain")
        dist.barrier()
        with torch.no_grad():
            logits: torch.Tensor = model(input_ids=token_batches(1)[0]).logits
        return logits


def test_save_pretrained_writes_an_ordinary_model(on_ranks: OnRanks, tmp_path: Path) -> None:
    from transformers import LlamaForCausalLM

    live = on_ranks(2, _save_pretrained, str(tmp_path))[0]
    from safetensors.torch import load_file

    live_names = set(build_model("llama").state_dict())
    assert set(load_file(tmp_path / "plain" / "model.safetensors")) == live_names
    model, info = LlamaForCausalLM.from_pretrained(tmp_path, output_loading_info=True)
    assert not info["missing_keys"]
    assert not info["unexpected_keys"]
    assert model.config.architectures == ["LlamaForCausalLM"]
    with torch.no_grad():
        torch.testing.assert_close(model(input_ids=token_batches(1)[0]).logits, live, atol=1e-6, rtol=0)


def _checkpointed(count: str | None) -> tuple[list[float], int]:
    variables = {} if count is None else {"FSDP_NUM_LAYERS_TO_CHECKPOINT": count}
    if count == "all":
        variables = {"FSDP_ACTIVATION_CHECKPOINTING": "true"}
    model = build_model("llama")
    with session(**variables) as accelerator:
        model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
        runs = [0]

        def count_run(*_: Any) -> None:
            runs[0] += 1

        for layer in model.model.layers:
            layer.mlp.register_forward_pre_hook(count_run)
        losses = accelerated_steps(accelerator, model, optimizer, token_batches(2))
    return losses, runs[0] // 2


@pytest.mark.parametrize(("count", "runs"), [("0", 3), ("1", 4), ("3", 6), ("all", 6)])
def test_exactly_the_asked_layers_run_twice_and_no_number_changes(on_ranks: OnRanks, count: str, runs: int) -> None:
    expected, once = on_ranks(2, _checkpointed, None)[0]
    assert once == 3
    for losses, seen in on_ranks(2, _checkpointed, count):
        assert seen == runs
        assert losses == pytest.approx(expected, abs=1e-6)


def _wrong_checkpointing() -> None:
    with (
        session(FSDP_NUM_LAYERS_TO_CHECKPOINT="4") as accelerator,
        pytest.raises(
            ValueError, match="fsdp_num_layers_to_checkpoint: 4 was asked for, and LlamaForCausalLM has 3 blocks"
        ),
    ):
        accelerator.prepare(build_model("llama"))
    model = build_model("llama")
    model.gradient_checkpointing_enable()
    with (
        session(FSDP_ACTIVATION_CHECKPOINTING="true") as accelerator,
        pytest.raises(ValueError, match="switched on twice"),
    ):
        accelerator.prepare(model)


def test_impossible_checkpointing_is_one_clear_error(on_ranks: OnRanks) -> None:
    on_ranks(2, _wrong_checkpointing)


def _evaluation_model_stays_whole() -> None:
    model = build_model("llama")
    with session() as accelerator:
        whole = accelerator.prepare_model(model, evaluation_mode=True)
        assert all(type(parameter) is torch.nn.Parameter for parameter in whole.parameters())
        causal_loss(whole, token_batches(1)[0])


def test_a_model_for_evaluation_only_stays_whole(on_ranks: OnRanks) -> None:
    on_ranks(2, _evaluation_model_stays_whole)
