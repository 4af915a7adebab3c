"""``from_pretrained`` under rank-0 loading: the other ranks hold nothing until they get their shards."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from tests.huggingface.session import session
from tests.huggingface.stock_trainers import with_lora
from tests.support.engines import full_parameters
from tests.support.guards import assert_really_sharded, assert_same_values
from tests.support.memory import PeakBytes
from tests.support.models import build_model, token_batches
from tests.support.training import causal_loss

OnRanks = Callable[..., list[Any]]
READS_ON_RANK_ZERO = {"FSDP_CPU_RAM_EFFICIENT_LOADING": "true", "ACCELERATE_USE_FSDP": "true"}


def _load(folder: str, **options: Any) -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager", **options)


def _stored(model: nn.Module) -> int:
    return sum({p.untyped_storage()._cdata: p.untyped_storage().nbytes() for p in model.parameters()}.values())


def _starts_from_the_file(folder: str, dtype: torch.dtype) -> None:
    rank = dist.get_rank()
    plain = _load(folder, dtype=dtype)
    with session(**READS_ON_RANK_ZERO) as accelerator, PeakBytes() as peak:
        model = _load(folder, dtype=dtype)
        count = len(list(model.parameters()))
        assert count == len(list(plain.parameters())), "tied where the file is tied"
        assert {p.dtype for p in model.parameters()} == {dtype}
        assert not any(p.is_meta for p in model.parameters())
        assert rank == 0 or _stored(model) <= count * dtype.itemsize
        model = accelerator.prepare(model)
    total = sum(p.numel() for p in plain.parameters()) * dtype.itemsize
    blocks = next(list(m) for m in plain.modules() if isinstance(m, nn.ModuleList) and len(m) > 1)
    largest = max(_stored(m) for m in [*blocks, plain.get_input_embeddings()])
    if rank:
        assert peak.peak < 0.62 * total + 2 * largest, "half of the model, and a unit on its way there"
    assert_same_values(full_parameters(model), dict(plain.named_parameters()), "weights after prepare")
    found, expected = dict(model.named_buffers()), dict(plain.named_buffers())
    assert_same_values(found, expected, "buffers after prepare")
    assert_really_sharded(model, None, "ya_fsdp")
    with torch.no_grad():
        batch = token_batches(1)[0]
        assert causal_loss(model, batch).item() == pytest.approx(causal_loss(plain, batch).item(), rel=1e-6)


@pytest.mark.parametrize(
    ("name", "dtype"), [("llama", torch.float32), ("qwen2", torch.bfloat16), ("mixtral", torch.float32)]
)
def test_only_rank_zero_holds_the_whole_model_and_all_start_from_it(
    on_ranks: OnRanks, name: str, dtype: torch.dtype, tmp_path: Path
) -> None:
    build_model(name, seed=3).save_pretrained(tmp_path)  # type: ignore[operator]
    on_ranks(2, _starts_from_the_file, str(tmp_path), dtype)


def _changed_before_prepare(folder: str) -> None:
    with session(**READS_ON_RANK_ZERO) as accelerator:
        torch.manual_seed(dist.get_rank())
        model = _load(folder)
        model.resize_token_embeddings(109)
        expected = [model.get_input_embeddings().weight[:101].clone() if dist.get_rank() == 0 else None]
        model = with_lora(model)
        model, _ = accelerator.prepare(model, torch.optim.SGD([p for p in model.parameters() if p.requires_grad]))
        accelerator.backward(causal_loss(model, token_batches(1)[0]))
        weights = full_parameters(model)
        name = next(name for name in weights if name.endswith("embed_tokens.weight"))
        dist.broadcast_object_list(expected, src=0)
        assert weights[name].shape[0] == 109
        assert torch.equal(weights[name][:101], expected[0])
        assert weights[name][101:].abs().sum(1).min() > 0, "new rows are drawn"


def test_embeddings_can_be_resized_and_adapters_added_before_prepare(on_ranks: OnRanks, tmp_path: Path) -> None:
    build_model("qwen2").save_pretrained(tmp_path)  # type: ignore[operator]
    on_ranks(2, _changed_before_prepare, str(tmp_path))


def _beside_the_model(folder: str) -> None:
    batch = token_batches(1)[0]
    expected = causal_loss(_load(folder), batch).item()
    with session(**READS_ON_RANK_ZERO) as accelerator:
        scorer = _load(folder)
        if dist.get_rank():
            with pytest.raises(
                RuntimeError, match=r"rank 1: LlamaForCausalLM was loaded by rank 0 only .*evaluation_mode"
            ):
                causal_loss(scorer, batch)
        scorer = accelerator.prepare_model(scorer, evaluation_mode=True)
        assert causal_loss(scorer, batch).item() == pytest.approx(expected, rel=1e-6)
        assert not hasattr(next(scorer.parameters()), "full_tensor"), "models for evaluation stay whole"
    with session(**{**READS_ON_RANK_ZERO, "FSDP_CPU_RAM_EFFICIENT_LOADING": "false"}):
        assert causal_loss(_load(folder), batch).item() == pytest.approx(expected, rel=1e-6)


def test_a_model_that_was_never_prepared_does_not_run_on_nothing(on_ranks: OnRanks, tmp_path: Path) -> None:
    build_model("llama").save_pretrained(tmp_path)  # type: ignore[operator]
    on_ranks(2, _beside_the_model, str(tmp_path))


def _before_the_process_group(folder: str) -> list[Any]:
    rank, world = dist.get_rank(), dist.get_world_size()
    plain = _load(folder)
    dist.destroy_process_group()
    places = {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(world), "LOCAL_WORLD_SIZE": str(world)}
    with pytest.MonkeyPatch.context() as patch:
        for name, value in {**READS_ON_RANK_ZERO, **places, "FSDP_YA_FSDP_ENABLED": "true"}.items():
            patch.setenv(name, value)
        import accelerate_plugin

        accelerate_plugin.install()
        loaded = _load(folder)
        built = build_model("llama", seed=rank)
        stored = _stored(loaded)
    store = dist.FileStore(f"{folder}/store", world)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world)
    with session(**READS_ON_RANK_ZERO) as accelerator:
        loaded, built = accelerator.prepare(loaded, built)
    assert_same_values(full_parameters(loaded), dict(plain.named_parameters()), "loaded weights")
    assert_same_values(full_parameters(built), dict(build_model("llama", seed=0).named_parameters()), "built weights")
    return [stored, sum(p.numel() * 4 for p in plain.parameters())]


def test_a_model_made_before_the_process_group_starts_from_rank_zero_too(on_ranks: OnRanks, tmp_path: Path) -> None:
    build_model("llama", seed=4).save_pretrained(tmp_path)  # type: ignore[operator]
    (first, total), (second, _) = on_ranks(2, _before_the_process_group, str(tmp_path))
    assert first == total
    assert second < 1000
