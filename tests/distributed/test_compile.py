"""torch.compile on blocks and on whole models, before and after sharding: same numbers, few graphs, plain names."""

import shutil

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.checkpoint import checkpoint

from tests.support.engines import full_parameters, shard
from tests.support.guards import assert_really_sharded, assert_same_numbers, assert_same_values
from tests.support.models import Mlp, MlpStack, float_batches, my_rows, tiny_llama, token_batches, units_of
from tests.support.training import RunResult, adamw, causal_loss, mean_over_ranks, square_loss
from ya_fsdp import get_full_state_dict, load_full_state_dict

STEPS = 4


def plain_name(name):
    return name.replace("_orig_mod.", "")


class CountingBackend:
    """Counts graphs and their runs, and hands them on to one of torch's backends."""

    def __init__(self, name):
        self.graphs = self.runs = 0
        self._compile = torch._dynamo.lookup_backend(name)

    def __call__(self, graph, inputs):
        self.graphs += 1
        compiled = self._compile(graph, inputs)

        def run(*args):
            self.runs += 1
            return compiled(*args)

        return run


def compile_blocks(blocks, way, **options):
    for index, block in enumerate(list(blocks)):
        if way == "wrapped":
            blocks[index] = torch.compile(block, **options)
        else:
            block.compile(**options)


def compile_and_shard(model, blocks, way, order, **options):
    """Return the model to train and the one that was sharded."""
    units = units_of(model) if blocks is None else list(blocks)
    whole = way.startswith("whole")
    if order == "sharded first":
        shard(model, units=units)
    if not whole:
        compile_blocks(model.model.layers if blocks is None else blocks, way, **options)
    elif way == "whole in place":
        model.compile(**options)
    else:
        model = torch.compile(model, **options)
    if order == "compiled first":
        shard(model, units=units)
    return model


def train(model, batches, backend=None, loss_fn=causal_loss):
    """Train for some steps; check that no graph is added after the second one, and that graphs do run.

    The recorder of collectives stays out: compilers leave code alone that runs under such a mode.
    """
    rank, world_size = dist.get_rank(), dist.get_world_size()
    optimizer, result, graphs = adamw(model.parameters()), RunResult(), []
    for batch in batches:
        loss = loss_fn(model, my_rows(batch, rank, world_size))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        result.losses.append(mean_over_ranks(loss))
        if backend is not None:
            graphs.append((backend.graphs, backend.runs))
    assert_really_sharded(model, None, "ya_fsdp")
    result.parameters = {plain_name(name): value for name, value in full_parameters(model).items()}
    if backend is not None:
        assert graphs[1][0] == graphs[-1][0], f"compiled again after step 2; graphs and runs after each step: {graphs}"
        assert graphs[-1][1] > graphs[-2][1], f"no graph ran in the last step: {graphs}"
    return result


def check_llama(way, order, backend_name):
    torch._dynamo.reset()
    batches = token_batches(STEPS)
    expected = train(shard(tiny_llama(num_layers=2)), batches)
    backend = CountingBackend(backend_name)
    plain = tiny_llama(num_layers=2)
    names = list(plain.state_dict())
    model = compile_and_shard(plain, None, way, order, backend=backend)
    found = train(model, batches, backend)
    what = f"{way}, {order}, {backend_name}"
    assert_same_numbers(found.losses, expected.losses, f"loss ({what})", atol=1e-5)
    assert_same_values(found.parameters, expected.parameters, f"weights ({what})", atol=1e-5)
    if not way.startswith("whole"):
        assert backend.graphs <= 2, f"{backend.graphs} graphs for blocks that are all alike"
    weights = get_full_state_dict(model, rank0_only=False)
    assert list(weights) == names
    assert_same_values(weights, expected.parameters, f"state dict ({what})", atol=1e-5)
    load_full_state_dict(model, {name: torch.zeros_like(value) for name, value in weights.items()})
    assert not any(value.any() for value in get_full_state_dict(model, rank0_only=False).values())


@pytest.mark.parametrize(
    ("way", "order", "backend"),
    [
        ("in place", "compiled first", "aot_eager"),
        ("in place", "sharded first", "aot_eager"),
        ("wrapped", "compiled first", "eager"),
        ("wrapped", "sharded first", "eager"),
        ("whole", "compiled first", "eager"),
        ("whole", "sharded first", "aot_eager"),
        ("whole in place", "sharded first", "eager"),
    ],
)
def test_compiled_training_gives_the_same_numbers_and_names(on_ranks, way, order, backend):
    on_ranks(2, check_llama, way, order, backend, limit=120)


def check_names():
    plain = {name: torch.randn_like(value) for name, value in MlpStack().state_dict().items()}
    for order in ("sharded first", "compiled first"):
        model = MlpStack()
        compile_and_shard(model, model.blocks, "wrapped", order, backend="eager")
        assert any("_orig_mod" in name for name, _ in model.named_parameters()), "the blocks are not wrapped"
        sharded = model.state_dict()
        assert list(sharded) == list(plain), order
        model.load_state_dict({name: value.new_zeros(value.shape) for name, value in sharded.items()})
        assert not any(value.full_tensor().any() for value in model.state_dict().values())
        missing, unexpected = model.load_state_dict({"blocks.0.up.bias": sharded["blocks.0.up.bias"]}, strict=False)
        assert (len(missing), unexpected) == (len(plain) - 1, [])
        with pytest.raises(RuntimeError, match=r"Unexpected key\(s\) in state_dict: \"blocks.7.up.bias\""):
            model.load_state_dict({**sharded, "blocks.7.up.bias": sharded["blocks.0.up.bias"]})


def test_state_dicts_of_a_model_with_compiled_blocks_speak_of_the_plain_model(on_ranks):
    on_ranks(2, check_names)


class CheckpointedMlp(Mlp):
    """Runs its two layers again in the backward."""

    def forward(self, x):
        return checkpoint(super().forward, x, use_reentrant=False)


def checkpointed_stack():
    model = MlpStack()
    for block in model.blocks:
        block.__class__ = CheckpointedMlp
    return model


def check_checkpointing():
    torch._dynamo.reset()
    batches = float_batches(STEPS)
    expected = train(shard(MlpStack(), units=[]), batches, loss_fn=square_loss)
    model, backend = checkpointed_stack(), CountingBackend("aot_eager")
    compile_and_shard(model, model.blocks, "in place", "sharded first", backend=backend)
    found = train(model, batches, backend, loss_fn=square_loss)
    assert_same_values(found.parameters, expected.parameters, "checkpoint inside of a block", atol=1e-5)
    batches = token_batches(STEPS)
    expected = train(shard(tiny_llama(num_layers=2)), batches)
    for reentrant in (False, True):
        backend = CountingBackend("aot_eager")
        model = shard(tiny_llama(num_layers=2))
        model.gradient_checkpointing_enable({"use_reentrant": reentrant})
        compile_blocks(model.model.layers, "in place", backend=backend)
        found = train(model, batches, backend)
        assert_same_values(found.parameters, expected.parameters, f"Llama, reentrant={reentrant}", atol=1e-5)


def test_activation_checkpointing_inside_of_compiled_blocks(on_ranks):
    on_ranks(2, check_checkpointing, limit=120)


def check_inductor():
    torch._dynamo.reset()
    batches = float_batches(STEPS)
    expected = train(shard(MlpStack(), units=[]), batches, loss_fn=square_loss)
    model, backend = MlpStack(), CountingBackend("inductor")
    shard(model, units=list(model.blocks))
    compile_blocks(model.blocks[1:], "in place", backend=backend, fullgraph=True)
    found = train(model, batches, backend, loss_fn=square_loss)
    assert_same_values(found.parameters, expected.parameters, "inductor", atol=1e-5)
    with torch.no_grad():
        out = model(batches[0])
    assert not out.requires_grad


@pytest.mark.skipif(shutil.which("g++") is None, reason="torch's own compiler makes C++")
def test_torchs_own_compiler_gives_the_same_numbers(on_ranks):
    on_ranks(2, check_inductor, limit=150)


def check_mixed_precision():
    torch._dynamo.reset()
    batches = float_batches(STEPS)
    mp = {"param_dtype": torch.bfloat16, "reduce_dtype": torch.float32}
    stacks = [shard(stack, units=list(stack.blocks), mp=mp) for stack in (MlpStack(), MlpStack())]
    expected = train(stacks[0], batches, loss_fn=square_loss)
    backend = CountingBackend("aot_eager")
    compile_blocks(stacks[1].blocks, "in place", backend=backend)
    found = train(stacks[1], batches, backend, loss_fn=square_loss)
    assert_same_numbers(found.losses, expected.losses, "loss in bf16", atol=1e-5)


def test_compiled_blocks_in_bf16_equal_uncompiled_ones(on_ranks):
    on_ranks(2, check_mixed_precision)


def check_compiled_step():
    """Forward, backward and the optimizer's step in one compiled function."""
    torch._dynamo.reset()
    batches = float_batches(3)
    runs = {}
    for is_compiled in (False, True):
        model = shard(MlpStack(), units=[]) if not is_compiled else MlpStack()
        if is_compiled:
            shard(model, units=list(model.blocks))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

        def step(rows, model=model, optimizer=optimizer):
            loss = model(rows).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            return loss

        run = torch.compile(step, backend="eager") if is_compiled else step
        runs[is_compiled] = [run(my_rows(x, dist.get_rank(), dist.get_world_size())).item() for x in batches]
    assert_same_numbers(runs[True], runs[False], "loss of a compiled step", atol=1e-5)

    model = shard(MlpStack(), units=[])
    weight = model.blocks[0].up.weight.full_tensor()

    @torch.compile(backend="eager")
    def read(rows):
        model.unshard()
        result = rows @ model.blocks[0].up.weight.t()
        model.reshard()
        return result

    torch.testing.assert_close(read(batches[0]), batches[0] @ weight.t())


def test_a_whole_step_may_be_compiled(on_ranks):
    on_ranks(2, check_compiled_step)


def check_refusals():
    torch._dynamo.reset()
    x = float_batches(1)[0]
    model = MlpStack()
    shard(model, units=list(model.blocks))
    model.compile(backend="eager", fullgraph=True)
    with pytest.raises(Exception, match=r"ya_fsdp gathers .* outside of graphs.*block.compile\(fullgraph=True\)"):
        model(x)

    torch._dynamo.reset()
    model = nn.Sequential(nn.Linear(10, 10), nn.Linear(10, 10))
    shard(model, units=list(model))
    loss = model(x).sum()
    tracing = torch._dynamo.compiled_autograd._enable(torch.compile(backend="eager"))
    with pytest.raises(NotImplementedError, match="compiled autograd traces the whole backward"), tracing:
        loss.backward()


def test_what_cannot_be_traced_says_what_to_do_instead(on_ranks):
    on_ranks(2, check_refusals)
