"""Arguments of the older wrapper that contradict one another or the model are refused by name, before anything runs."""

import inspect
import sys
from typing import Any

import pytest
import torch
from torch import nn

from tests.support.models import build_model
from tests.support.wrapping import lists_of, wrap
from ya_fsdp import HierarchicalBackend, YaFSDP
from ya_fsdp.comm.colors import ColorExpressionError
from ya_fsdp.wrapper.units import ModuleNames, find_units

BF16 = torch.bfloat16


def refused(reason: str, model: nn.Module | None = None, **options: Any) -> None:
    with pytest.raises(ValueError, match=reason) as caught:
        wrap(model or build_model("llama"), **options)
    assert "process group" not in str(caught.value), "refused only because there is none"


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"zero_stage": 0}, "zero_stage must be 1, 2 or 3, got 0"),
        ({"zero_stage": True}, "zero_stage must be 1, 2 or 3, got True"),
        ({"zero_stage": "3"}, "zero_stage must be 1, 2 or 3, got '3'"),
        ({"gradient_accumulation_steps": 0}, "gradient_accumulation_steps must be a positive integer, got 0"),
        ({"gradient_accumulation_steps": 2.0}, "gradient_accumulation_steps must be a positive integer, got 2.0"),
        ({"param_dtype": "bf16"}, "param_dtype must be a floating-point torch.dtype or None, got 'bf16'"),
        ({"param_dtype": torch.int8}, "param_dtype must be a floating-point"),
        ({"bit16_reduce_scatter": True}, "bit16_reduce_scatter=True needs param_dtype=torch.bfloat16.*got None"),
        (
            {"bit16_reduce_scatter": True, "param_dtype": torch.float32},
            "bit16_reduce_scatter=True needs param_dtype=torch.bfloat16.*got torch.float32",
        ),
        (
            {"bit32_acc_for_bit16_reduce_scatter": True, "param_dtype": BF16},
            "bit32_acc_for_bit16_reduce_scatter=True has no meaning without bit16_reduce_scatter=True",
        ),
        ({"use_yccl": True}, "use_yccl=True is for 16-bit gathers and needs param_dtype"),
        ({"profile": True}, "profile=True turns on events of yccl and needs use_yccl=True"),
        ({"zero_stage": 1, "reduce_every_micro_batch": True}, "reduce_every_micro_batch=True contradicts zero_stage=1"),
        ({"hpz_first_layers_num": 4, "zero_stage": 2}, "hpz_first_layers_num=4 contradicts zero_stage=2"),
        ({"hpz_first_layers_num": -1}, "hpz_first_layers_num must be a number of modules, got -1"),
        (
            {"hpz_first_layers_num": 1, "use_yccl": True, "param_dtype": BF16},
            "use_yccl=True contradicts hpz_first_layers_num=1",
        ),
        ({"all_reduce_grads_across_model_parallel_group": True}, "all_reduce_grads_across_model_parallel_group"),
        (
            {"backend": HierarchicalBackend("0, rank"), "yccl_intra_inter_expr": "0, rank"},
            "yccl_intra_inter_expr='0, rank' contradicts backend=",
        ),
        (
            {"backend": HierarchicalBackend("0, rank"), "use_yccl": True, "param_dtype": BF16},
            "use_yccl=True contradicts backend=",
        ),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, dict) else "",
)
def test_switches_that_contradict_one_another_are_refused(options: dict[str, Any], reason: str) -> None:
    refused(reason, **options)


def test_an_expression_for_colours_is_refused_with_its_position() -> None:
    with pytest.raises(ColorExpressionError, match="at position 10: '/' is not part") as caught:
        wrap(yccl_intra_inter_expr="rank + 1, / 8")
    assert caught.value.position == 10


def test_a_missing_yccl_is_said_with_the_alternatives(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "yccl", None)
    with pytest.raises(ModuleNotFoundError, match=r"yccl is not installed.*leave use_yccl out.*HierarchicalBackend"):
        wrap(use_yccl=True, param_dtype=BF16)


def test_without_a_process_group_the_wrapper_says_so() -> None:
    with pytest.raises(ValueError, match="needs a process group"):
        wrap()


def test_lists_are_checked_against_the_model() -> None:
    model = build_model("llama")
    blocks, embedding = model.model.layers, model.model.embed_tokens
    listed = "modules_to_wrap_with_names"
    refused(f"{listed} must list at least one", model, **{listed: []})
    refused(f"{listed} must list at least one", model, **{listed: {embedding: "e"}})
    refused(
        rf"{listed}\[1\]: expected \(module, name\), got Linear", model, **{listed: [(embedding, "e"), model.lm_head]}
    )
    refused(rf"{listed}\[0\]: expected \(module, name\), got \(", model, **{listed: [("e", embedding)]})
    refused(rf"{listed}\[0\]: expected \(module, name\), got \(", model, **{listed: [(embedding, "")]})
    refused(rf"{listed}\[0\]: 'm' \(LlamaForCausalLM\) is the model itself", model, **{listed: [(model, "m")]})
    stranger = nn.Linear(2, 2)
    refused(
        rf"{listed}\[1\]: 's' \(Linear\) is no module of the model",
        model,
        **{listed: [(embedding, "e"), (stranger, "s")]},
    )
    refused("named 'b' is given as 'a' already", model, **{listed: [(embedding, "a"), (embedding, "b")]})
    refused("the name 'a' is given to two modules", model, **{listed: [(embedding, "a"), (model.lm_head, "a")]})
    rogue = "rogue_layer_norm_modules_with_names"
    refused(f"{rogue} must map modules to names, got list", model, **{rogue: [model.model.norm]})
    refused(rf"{rogue}, entry 0: 's' \(Linear\) is no module", model, **{rogue: {stranger: "s"}})
    refused("named 'n' is given as 'e' already", model, **{listed: [(embedding, "e")], rogue: {embedding: "n"}})
    refused("'model.layers.0' lies inside of the norm 'model.layers'", model, **{rogue: {blocks: "norms"}})
    refused(
        r"'n' \(LlamaRMSNorm\) has no parameters besides those of norms.*belongs into rogue_layer_norm",
        model,
        **{listed: [(embedding, "e"), (model.model.norm, "n")], rogue: {}},
    )
    refused(
        "the names make two entries of the state dict equal, 'model.layers.1.self_attn",
        model,
        **{listed: [(blocks[0], "model.layers.1")]},
    )


def test_a_norm_class_that_the_model_has_not_is_refused_with_those_it_has() -> None:
    refused(r"LlamaForCausalLM has no LayerNorm;.*\['LlamaRMSNorm'\]", layer_norm_module_cls=nn.LayerNorm)
    refused("must be a class of modules or a tuple of them", layer_norm_module_cls="LlamaRMSNorm")
    refused("must be a class of modules or a tuple of them", layer_norm_module_cls=(nn.LayerNorm(3),))


def test_arguments_stand_in_the_order_of_the_original() -> None:
    names = list(inspect.signature(YaFSDP).parameters)
    assert names[:6] == [
        "module",
        "zero_stage",
        "param_dtype",
        "modules_to_wrap_with_names",
        "layer_norm_module_cls",
        "gradient_accumulation_steps",
    ]
    documented = YaFSDP.__doc__ or ""
    assert [name for name in names if f"        {name}: " not in documented] == []


def units_and_tree(name: str = "llama", **changes: Any) -> tuple[nn.Module, list[set[str]]]:
    model = build_model(name)
    lists = {**lists_of(model), **changes}
    paths = {module: path for path, module in model.named_modules()}
    found = find_units(
        model,
        lists["modules_to_wrap_with_names"],
        lists["rogue_layer_norm_modules_with_names"],
        lists["layer_norm_module_cls"],
    )
    return model, [{paths[module] for module in unit.modules} for unit in found.units]


def test_norms_make_the_first_unit_and_the_model_the_last() -> None:
    _, units = units_and_tree()
    norms = {f"model.layers.{i}.{n}_layernorm" for i in range(3) for n in ("input", "post_attention")}
    assert units[0] == {*norms, "model.norm"}
    assert units[-1] == {""}
    assert sorted(units[1:-1], key=str) == sorted(
        [{"lm_head"}, {"model.layers.2"}, {"model.layers.1"}, {"model.layers.0"}, {"model.embed_tokens"}], key=str
    )


@pytest.mark.parametrize("with_head", [True, False])
def test_tied_modules_make_one_unit_even_if_one_of_them_is_not_listed(with_head: bool) -> None:
    model = build_model("gpt2")
    lists = lists_of(model)
    listed = [entry for entry in lists["modules_to_wrap_with_names"] if with_head or entry[1] != "lm_head"]
    found = find_units(model, listed, {}, nn.LayerNorm)
    (tied,) = [unit.modules for unit in found.units if model.lm_head in unit.modules]
    assert set(tied) == {model.lm_head, model.transformer.wte}


def test_modules_inside_of_listed_modules_are_sharded_first() -> None:
    model = build_model("llama")
    block = model.model.layers[0]
    found = find_units(model, [(block, "outer"), (block.mlp, "inner"), (block.mlp.up_proj, "core")], {}, None)
    assert [unit.modules for unit in found.units] == [[block.mlp.up_proj], [block.mlp], [block], [model]]
    assert found.names.given("model.layers.0.mlp.up_proj.weight") == "core.weight"
    assert found.names.given("model.layers.0.mlp.down_proj.weight") == "inner.down_proj.weight"
    assert found.names.given("model.layers.0.self_attn.q_proj.weight") == "outer.self_attn.q_proj.weight"
    assert found.names.given("lm_head.weight") == "lm_head.weight"


def test_names_pass_by_the_wrapper_of_activation_checkpointing() -> None:
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

    model = nn.Sequential(checkpoint_wrapper(nn.Sequential(nn.Linear(2, 2))), nn.Linear(2, 2))
    names = ModuleNames(model, {model[0]: "block"})
    assert [names.given(own) for own in model.state_dict()] == ["block.0.weight", "block.0.bias", "1.weight", "1.bias"]
    names = ModuleNames(model, {model[0]._checkpoint_wrapped_module[0]: "core"})
    assert [names.given(own) for own in model.state_dict()][:2] == ["core.weight", "core.bias"]
