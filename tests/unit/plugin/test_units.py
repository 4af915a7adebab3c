"""Units are found in the model: embedding, each block, final norm with head; tied weights in one."""

from typing import Any

import pytest
import torch
from torch import nn

from accelerate_plugin.keys import SettingsError
from accelerate_plugin.settings import Settings
from accelerate_plugin.units import find_blocks, find_units
from tests.support.models import build_model


def labels(model: nn.Module, **settings: Any) -> list[str]:
    return [unit.label for unit in find_units(model, Settings(**settings))]


def test_llama_has_embedding_head_and_blocks() -> None:
    model = build_model("llama")
    assert labels(model) == ["model.embed_tokens", "model.norm + lm_head", *(f"model.layers.{i}" for i in range(3))]


def test_tied_gpt2_has_embedding_norm_and_head_in_one_unit() -> None:
    units = find_units(build_model("gpt2"), Settings())
    assert [unit.label for unit in units] == [
        "transformer.wte + transformer.ln_f + lm_head",
        "transformer.h.0",
        "transformer.h.1",
    ]
    assert units[0].kind == "tied"
    assert [unit.class_name for unit in units[1:]] == ["GPT2Block", "GPT2Block"]


@pytest.mark.parametrize("name", ["llama", "gpt2", "qwen2", "mixtral"])
@pytest.mark.parametrize("settings", [{}, {"auto_wrap_policy": "SIZE_BASED_WRAP", "min_num_params": 2000}])
def test_no_parameter_is_in_two_units_and_no_unit_contains_a_module_of_its_own(name: str, settings: Any) -> None:
    model = build_model(name)
    seen: set[nn.Parameter] = set()
    sharded: set[nn.Module] = set()
    for unit in find_units(model, Settings(**settings)):
        own = {
            p for m in unit.modules for inner in m.modules() if inner not in sharded for p in inner._parameters.values()
        }
        own.discard(None)
        assert not own & seen, f"{unit.label} repeats a parameter"
        seen |= own
        for module in unit.modules:
            assert not any(other is not module and other in set(module.modules()) for other in unit.modules)
            sharded.update(module.modules())


def test_named_classes_replace_the_models_own_list() -> None:
    model = build_model("llama")
    found = [name for name, _ in find_blocks(model, ("LlamaMLP", "LlamaAttention"))]
    assert found == [f"model.layers.{i}.{part}" for i in range(3) for part in ("self_attn", "mlp")]


def test_a_wrong_class_name_lists_the_classes_of_the_model_and_the_nearest() -> None:
    with pytest.raises(SettingsError) as caught:
        labels(build_model("llama"), wrap_classes=("LlamaDecoderLayr", "LlamaMLP"))
    message = str(caught.value)
    assert "no module of class LlamaDecoderLayr (did you mean LlamaDecoderLayer?)" in message
    assert "LlamaMLP" in message.split("classes with parameters in it")[1]


def test_no_wrap_leaves_everything_to_the_root() -> None:
    assert labels(build_model("llama"), auto_wrap_policy="NO_WRAP") == []


def test_units_by_size_reach_the_size_with_what_they_hold_beyond_inner_units() -> None:
    class Half(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.big = nn.Linear(10, 10, bias=False)
            self.small = nn.Linear(2, 2, bias=False)

    model = nn.Sequential(Half(), Half())
    assert labels(model, auto_wrap_policy="SIZE_BASED_WRAP", min_num_params=100) == ["0.big", "1.big"]
    assert labels(model, auto_wrap_policy="SIZE_BASED_WRAP", min_num_params=104) == ["0", "1"]


def test_a_plain_module_without_hints_is_split_at_its_largest_list() -> None:
    class Plain(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.small = nn.ModuleList(nn.Linear(2, 2) for _ in range(3))
            self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(2))
            self.norm = nn.LayerNorm(8)

    assert labels(Plain()) == ["layers.0", "layers.1"]


def test_a_parameter_shared_with_a_module_outside_draws_that_module_in() -> None:
    class Shared(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(nn.Linear(4, 4, bias=False) for _ in range(2))
            self.outside = nn.Linear(4, 4, bias=False)
            self.outside.weight = self.layers[0].weight

    assert labels(Shared()) == ["layers.0 + outside", "layers.1"]


def test_a_module_drawn_in_takes_the_place_of_what_lies_in_it() -> None:
    class Head(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.decoder = nn.Linear(4, 4)
            self.bias = self.decoder.bias  # registered a second time, one level up

    class Masked(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(2))
            self.head = Head()

        def get_output_embeddings(self) -> nn.Module:
            return self.head.decoder

    assert labels(Masked()) == ["head", "layers.0", "layers.1"]


def test_what_shares_a_parameter_with_the_whole_model_is_left_to_the_root() -> None:
    class Direct(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(2))
            self.weight = self.layers[0].weight

    assert labels(Direct()) == ["layers.1"]


def test_a_unit_inside_another_one_comes_first() -> None:
    class Outer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(2))
            self.embed = nn.Embedding(3, 4)
            self.weight = self.embed.weight

    class Whole(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = Outer()

        def get_input_embeddings(self) -> nn.Module:
            return self.inner.embed

    assert labels(Whole()) == ["inner.layers.0", "inner.layers.1", "inner"]


def test_peft_models_are_split_like_their_base() -> None:
    peft = pytest.importorskip("peft")
    model = peft.get_peft_model(
        build_model("llama"), peft.LoraConfig(r=2, target_modules=["q_proj"], task_type="CAUSAL_LM")
    )
    prefix = "base_model.model."
    assert labels(model) == [
        f"{prefix}model.embed_tokens",
        f"{prefix}model.norm + {prefix}lm_head",
        *(f"{prefix}model.layers.{i}" for i in range(3)),
    ]


def test_finding_units_changes_nothing() -> None:
    model = build_model("gpt2")
    before = {name: parameter.clone() for name, parameter in model.named_parameters()}
    find_units(model, Settings())
    assert all(torch.equal(before[name], parameter) for name, parameter in model.named_parameters())
