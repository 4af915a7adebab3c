"""How the older wrapper gives a model its first values: from rank 0, from a function, in the right dtype and place."""

import pytest
import torch
import torch.distributed as dist
from torch import nn

from tests.support.engines import full_parameters
from tests.support.guards import assert_same_values
from tests.support.models import build_model, token_batches
from tests.support.recorder import BROADCAST, CollectiveRecorder
from tests.support.training import causal_loss
from tests.support.wrapping import wrap
from ya_fsdp import MixedPrecisionPolicy, YaFSDP, fully_shard


def on_meta(name):
    with torch.device("meta"):
        return build_model(name)


def add_buffers(model, value):
    model.get_submodule(model.base_model_prefix).register_buffer("extra", torch.full((5,), value))
    model.lm_head.register_buffer("hidden", torch.full((3,), value), persistent=False)
    return model


def take_values_from_rank_0(name):
    rank = dist.get_rank()
    expected = add_buffers(build_model(name), 7.0)
    for how in ("other values", "nothing", "a function"):
        if rank == 0:
            model = add_buffers(build_model(name), 7.0)
        elif how == "other values":
            model = add_buffers(build_model(name, seed=5), 1.0)
        else:
            model = add_buffers(on_meta(name), 1.0).to("meta")
        calls = []

        def init(module, calls=calls):
            calls.append(module)
            module.to_empty(device="cpu", recurse=False)

        with CollectiveRecorder() as recorder:
            options = {"param_init_fn": init} if how == "a function" else {}
            wrapped = wrap(model, sync_module_states=True, **options)
        what = f"{name}, rank {rank}, {how}"
        assert_same_values(full_parameters(wrapped.module), dict(expected.named_parameters()), what)
        assert_same_values(dict(wrapped.module.named_buffers()), dict(expected.named_buffers()), what)
        assert recorder.count(BROADCAST) > 0
        assert bool(calls) == (how == "a function" and rank == 1), what
        tied = wrapped.module.get_input_embeddings().weight is wrapped.module.get_output_embeddings().weight
        assert tied == (name == "gpt2"), what
        causal_loss(wrapped, token_batches(1, rows=2)[0]).backward()


@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_all_ranks_start_from_the_weights_and_buffers_of_rank_0(on_ranks, name):
    on_ranks(2, take_values_from_rank_0, name)


class Scaled(nn.Module):
    """A layer whose buffer is made from nothing, as a position table is."""

    def __init__(self, width=6):
        super().__init__()
        self.linear = nn.Linear(width, width)
        self.norm = nn.LayerNorm(width)
        self.register_buffer("table", torch.arange(width).float(), persistent=False)

    def forward(self, x):
        return x + self.linear(self.norm(x)) * self.table


def start_from_a_function():
    """Without a source every rank runs the function, on each module that owns something, once."""

    def init(module):
        seen.append(type(module).__name__)
        module.to_empty(device="cpu", recurse=False)
        for parameter in module._parameters.values():
            nn.init.constant_(parameter, 0.5)
        if isinstance(module, Scaled):
            module.table.copy_(torch.arange(6).float())

    seen = []
    with torch.device("meta"):
        model = nn.Sequential(Scaled(), Scaled())
    lists = {"modules_to_wrap_with_names": [(model[0], "0"), (model[1], "1")], "layer_norm_module_cls": nn.LayerNorm}
    wrapped = YaFSDP(model, zero_stage=3, param_init_fn=init, **lists)
    assert sorted(seen) == sorted(["LayerNorm", "Scaled", "Linear"] * 2)
    assert all((value == 0.5).all() for value in full_parameters(wrapped.module).values())
    assert torch.equal(model[1].table, torch.arange(6).float())
    wrapped(torch.ones(2, 6)).sum().backward()


def test_without_a_source_every_rank_runs_the_function(on_ranks):
    on_ranks(2, start_from_a_function)


def refuse_nothing_to_start_from():
    rank = dist.get_rank()
    with pytest.raises(
        ValueError, match=f"model.embed_tokens.weight is on the meta device on rank {rank}.*param_init_fn"
    ):
        wrap(on_meta("llama"))
    with pytest.raises(ValueError, match="on the meta device on rank 0"):  # on both ranks: nobody waits
        wrap(on_meta("llama") if rank == 0 else build_model("llama"), sync_module_states=True)
    with pytest.raises(ValueError, match=r"rank 1 has another model.*'lm_head.weight \[102, 40\] torch.float32'"):
        wrap(build_model("llama", vocab_size=101 + rank), sync_module_states=True)
    with pytest.raises(ValueError, match=r"rank 1 has another model.*lm_head.weight \[101, 40\] torch.bfloat16'"):
        wrap(build_model("llama", dtype=(torch.float32, torch.bfloat16)[rank]), sync_module_states=True)
    with pytest.raises(
        ValueError, match=r"rank \d: param_init_fn left model.layers.0.input_layernorm.weight on the meta device"
    ):
        wrap(on_meta("llama"), param_init_fn=lambda module: None)
    with pytest.raises(ValueError, match="device_id=0 names an accelerator and this machine has none"):
        wrap(device_id=0)
    with pytest.raises(ValueError, match=r"device_id must be an index or a torch\.device, got 1\.5"):
        wrap(device_id=1.5)
    for device in ("cpu", torch.device("cpu")):
        assert wrap(device_id=device).module.lm_head.weight.device.type == "cpu"
    with pytest.raises(ValueError, match="model_parallel_process_group with 2 ranks"):
        wrap(model_parallel_process_group=dist.group.WORLD)
    assert wrap(model_parallel_process_group=[dist.new_group([r]) for r in range(2)][rank])


def test_what_cannot_start_is_refused_on_all_ranks(on_ranks):
    on_ranks(2, refuse_nothing_to_start_from)


def compare_with_fully_shard():
    """The wrapper is a thin layer: the same units through fully_shard give the same bits."""
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    by_hand = build_model("llama")
    norms = [module for module in by_hand.modules() if isinstance(module, type(by_hand.model.norm))]
    fully_shard(
        norms,
        mp_policy=MixedPrecisionPolicy(torch.bfloat16, torch.float32, cast_forward_inputs=False),
        reshard_after_forward=False,
    )
    for unit in (by_hand.model.embed_tokens, *by_hand.model.layers, by_hand.lm_head):
        fully_shard(unit, mp_policy=policy)
    fully_shard(by_hand, mp_policy=policy)
    wrapped = wrap(param_dtype=torch.bfloat16)
    for tokens in token_batches(3, rows=2):
        losses = []
        for model in (by_hand, wrapped):
            loss = causal_loss(model, tokens)
            loss.backward()
            torch.optim.SGD(model.parameters(), lr=0.1).step()
            model.zero_grad()
            losses.append(loss.item())
        assert losses[0] == losses[1]
    assert_same_values(full_parameters(wrapped.module), full_parameters(by_hand), "weights")


def test_the_wrapper_gives_the_bits_of_fully_shard(on_ranks):
    on_ranks(2, compare_with_fully_shard)


def use_as_a_module():
    model = build_model("llama")
    wrapped = wrap(model)
    assert wrapped.module is model
    assert wrapped.config is model.config  # what the wrapper has not is the model's
    with pytest.raises(AttributeError, match="no_such_thing"):
        _ = wrapped.no_such_thing
    assert wrapped.eval().training is model.training is False
    assert {id(p) for p in wrapped.parameters()} == {id(p) for p in model.parameters()}
    with torch.no_grad():
        tokens = token_batches(1, rows=2)[0]
        expected = build_model("llama").eval().generate(tokens[:, :4], max_new_tokens=4, do_sample=False)
        assert torch.equal(wrapped.generate(tokens[:, :4], max_new_tokens=4, do_sample=False), expected)


def test_the_wrapper_is_a_module_that_shows_the_model(on_ranks):
    on_ranks(2, use_as_a_module)
