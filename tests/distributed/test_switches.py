"""The switches of a sharded module, one by one."""

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule, register_fsdp_forward_method
from torch.distributed.tensor import DTensor

from tests.support.engines import ENGINE, FSDP2, engine_module, full, full_gradients, mesh_1d, shard
from tests.support.guards import assert_same_values
from tests.support.models import MlpStack, build_model, float_batches, my_rows, token_batches
from tests.support.recorder import GATHER, REDUCE_SCATTER, CollectiveRecorder
from tests.support.training import causal_loss


def sharded_stack(**options):
    model = MlpStack()
    shard(model, units=list(model.blocks), **options)
    return model


def backward(model, batch):
    model(my_rows(batch, dist.get_rank(), dist.get_world_size())).square().mean().backward()


def gradients_of(batches):
    plain = MlpStack()
    for batch in batches:
        plain(batch).square().mean().backward()
    return {name: parameter.grad for name, parameter in plain.named_parameters()}


def check_no_sync():
    batches = float_batches(3)
    model = sharded_stack()
    count = len(model.blocks)
    for _ in range(2):
        for index, batch in enumerate(batches):
            model.set_requires_gradient_sync(index == 2)
            with CollectiveRecorder() as recorder:
                backward(model, batch)
            assert recorder.count(REDUCE_SCATTER) == (count if index == 2 else 0)
            if index < 2:
                assert all(parameter.grad is None for parameter in model.parameters())
        assert_same_values(full_gradients(model), gradients_of(batches), "accumulated", atol=1e-6)
        model.zero_grad()

    # For one unit only.
    model.blocks[1].set_requires_gradient_sync(False, recurse=False)
    with CollectiveRecorder() as recorder:
        backward(model, batches[0])
    assert recorder.count(REDUCE_SCATTER) == count - 1
    model.blocks[1].set_requires_gradient_sync(True)
    with CollectiveRecorder() as recorder:
        backward(model, batches[1])
    assert recorder.count(REDUCE_SCATTER) == count
    assert_same_values(full_gradients(model), gradients_of(batches[:2]), "one unit without", atol=1e-6)


def test_gradients_are_kept_back_without_sync_in_several_units(on_ranks):
    on_ranks(2, check_no_sync)


def check_reshard_after_backward():
    batches = float_batches(2)
    model = sharded_stack()
    model.set_reshard_after_backward(False)
    parameters = dict(model.named_parameters())
    backward(model, batches[0])
    assert [name for name, p in model.named_parameters() if isinstance(p, DTensor)] == [], "resharded after backward"
    with CollectiveRecorder() as recorder:
        model.set_reshard_after_backward(True)
        backward(model, batches[1])
    assert recorder.count(GATHER) < 6, "kept units were gathered again"
    assert all(isinstance(parameter, DTensor) for parameter in model.parameters())
    found = {name: full(parameter.grad) for name, parameter in parameters.items()}
    assert_same_values(found, gradients_of(batches), "gradients", atol=1e-6)


def test_units_stay_gathered_after_backward_if_told_so(on_ranks):
    on_ranks(2, check_reshard_after_backward)


def check_kept_and_stepped():
    """Units kept after backward see the optimizer step all the same."""
    batches = float_batches(4)
    plain, model = MlpStack(), sharded_stack()
    model.set_reshard_after_backward(False)
    optimizers = [torch.optim.SGD(each.parameters(), lr=0.1) for each in (plain, model)]
    for batch in batches:
        plain(batch).square().mean().backward()
        backward(model, batch)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        model.reshard()
    for block in model.blocks:
        block.reshard()
    expected = {name: parameter.detach() for name, parameter in plain.named_parameters()}
    assert_same_values({name: full(p) for name, p in model.named_parameters()}, expected, "weights", atol=1e-6)


@pytest.mark.skipif(ENGINE == FSDP2, reason="PyTorch's engine goes on with the kept weights")
def test_units_kept_after_backward_follow_the_optimizer(on_ranks):
    on_ranks(2, check_kept_and_stepped)


def check_unshard_in_backward():
    tokens = token_batches(1)[0]
    plain = build_model("llama")
    causal_loss(plain, tokens).backward()
    model = shard(build_model("llama"), reshard_after_forward=True)
    model.model.embed_tokens.set_unshard_in_backward(False)
    with CollectiveRecorder() as recorder:
        causal_loss(model, my_rows(tokens, dist.get_rank(), dist.get_world_size())).backward()
    assert recorder.count(GATHER) == 9, "five units in forward, all but the embedding in backward"
    expected = {name: parameter.grad for name, parameter in plain.named_parameters()}
    assert_same_values(full_gradients(model), expected, "gradients", atol=1e-6)


def test_an_embedding_need_not_be_gathered_for_backward(on_ranks):
    on_ranks(2, check_unshard_in_backward)


def check_ignored():
    model = MlpStack()
    ignored = set(model.blocks[1].down.parameters())
    expected = gradients_of([float_batches(1)[0]])
    mesh = mesh_1d()
    for block in model.blocks:
        engine_module().fully_shard(block, mesh=mesh, ignored_params=ignored)
    engine_module().fully_shard(model, mesh=mesh, ignored_params=ignored)
    backward(model, float_batches(1)[0])
    for name, parameter in model.named_parameters():
        is_ignored = name.startswith("blocks.1.down")
        assert isinstance(parameter, DTensor) != is_ignored, name
        if not is_ignored:
            torch.testing.assert_close(full(parameter.grad), expected[name], atol=1e-6, rtol=0)


def test_ignored_parameters_are_left_alone(on_ranks):
    on_ranks(2, check_ignored)


class WithMethod(MlpStack):
    def encode(self, x):
        return self.blocks[0](x) + self.bias

    def __init__(self):
        super().__init__()
        self.bias = nn.Parameter(torch.ones(10))

    def forward(self, x):
        return super().forward(x) + self.bias


def check_method():
    batch = float_batches(1)[0]
    model = WithMethod()
    shard(model, units=list(model.blocks), reshard_after_forward=True)
    assert isinstance(model, FSDPModule)
    assert isinstance(model, WithMethod)
    register_fsdp_forward_method(model, "encode")
    plain = WithMethod()
    torch.testing.assert_close(model.encode(batch), plain.encode(batch), atol=1e-6, rtol=0)
    assert isinstance(model.bias, DTensor)
    rows = my_rows(batch, dist.get_rank(), dist.get_world_size())
    for _ in range(2):
        (plain.encode(batch).square().mean() + plain(batch).square().mean()).backward()
        (model.encode(rows).square().mean() + model(rows).square().mean()).backward()
    expected = {name: parameter.grad for name, parameter in plain.named_parameters()}
    assert_same_values(full_gradients(model), expected, "gradients", atol=1e-6)
    assert isinstance(model.bias, DTensor)


def test_methods_can_be_registered_as_forwards(on_ranks):
    on_ranks(2, check_method)


class Fragile(MlpStack):
    fail = False

    def forward(self, x):
        x = self.blocks[1](self.blocks[0](x))
        if self.fail:
            raise KeyError("a fault in the user's model")
        return self.blocks[2](x)


def check_recovery():
    batch = float_batches(1)[0]
    for reshard_after_forward in (True, False):
        model = Fragile()
        shard(model, units=list(model.blocks), reshard_after_forward=reshard_after_forward)
        for _ in range(2):
            model.fail = True
            with pytest.raises(KeyError):
                model(batch)
            model.reset_iter_state()
            model.fail = False
            backward(model, batch)
            assert_same_values(full_gradients(model), gradients_of([batch]), "after a failed forward", atol=1e-6)
            model.zero_grad()

        def refuse(_):
            raise ValueError("a fault in backward")

        output = model(batch)
        output.register_hook(lambda grad: grad)
        hidden = []
        handle = model.blocks[1].register_forward_hook(lambda module, args, out: out.register_hook(refuse) and None)
        hidden.append(model(batch))
        handle.remove()
        with pytest.raises(ValueError, match="a fault in backward"):
            hidden[0].square().mean().backward()
        del output, hidden
        model.reset_iter_state()
        model.zero_grad()
        backward(model, batch)
        assert_same_values(full_gradients(model), gradients_of([batch]), "after a failed backward", atol=1e-6)


def test_training_goes_on_after_an_exception_and_a_reset(on_ranks):
    on_ranks(2, check_recovery)


class Nested(MlpStack):
    """Takes keyword arguments in containers, and returns containers."""

    def forward(self, *, inputs):
        x = inputs["x"] * inputs["pair"][1]
        states = []
        for block in self.blocks:
            x = block(x)
            states.append(x)
        return {"last": states[-1], "states": tuple(states), "number": 3}


def check_containers():
    batch = float_batches(1)[0]

    def loss_of(model, rows):
        outputs = model(inputs={"x": rows, "pair": [None, torch.tensor(2.0)]})
        assert outputs["number"] == 3
        return outputs["last"].square().mean() + outputs["states"][0].square().mean()

    plain = Nested()
    loss_of(plain, batch).backward()
    expected = {name: parameter.grad for name, parameter in plain.named_parameters()}
    for policy in (None, {"param_dtype": torch.float32, "output_dtype": torch.float32}):
        model = Nested()
        shard(model, units=list(model.blocks), mp=policy)
        loss_of(model, my_rows(batch, dist.get_rank(), dist.get_world_size())).backward()
        assert_same_values(full_gradients(model), expected, f"policy {policy}", atol=1e-6)


def test_keyword_arguments_and_containers_pass_through(on_ranks):
    on_ranks(2, check_containers)


def check_meta():
    """A model built on the meta device gets its memory after sharding."""
    batch = float_batches(1)[0]
    with torch.device("meta"):
        model = MlpStack()
    shard(model, units=list(model.blocks))
    if ENGINE != FSDP2:
        with pytest.raises(RuntimeError, match="meta"):
            model(batch)
    model.to_empty(device="cpu")
    source = MlpStack(seed=3)
    with torch.no_grad():
        for parameter, value in zip(model.parameters(), source.parameters(), strict=True):
            parameter.zero_()
            assert torch.equal(full(parameter), torch.zeros_like(value))
    if ENGINE != FSDP2:
        from ya_fsdp import load_full_state_dict

        load_full_state_dict(model, source.state_dict())
        torch.testing.assert_close(model(batch), source(batch), atol=1e-6, rtol=0)


def test_a_model_on_the_meta_device_is_filled_after_sharding(on_ranks):
    on_ranks(2, check_meta)


def check_mistakes():
    fully_shard = engine_module().fully_shard
    mesh = mesh_1d()
    model = MlpStack()
    fully_shard(model.blocks[0], mesh=mesh)
    with pytest.raises((ValueError, AssertionError, RuntimeError)):
        fully_shard(model.blocks[0], mesh=mesh)
    with pytest.raises(ValueError, match="ModuleList"):
        fully_shard(model.blocks, mesh=mesh)
    with pytest.raises((ValueError, AttributeError)):
        fully_shard("a string", mesh=mesh)


def test_wrong_arguments_are_refused(on_ranks):
    on_ranks(2, check_mistakes)


def check_switches_of_torch():
    model = sharded_stack()
    for name, way_out in {
        "set_custom_all_gather": r"backend=\.\.\.",
        "set_custom_reduce_scatter": r"backend=\.\.\.",
        "set_symm_mem_for_comm": "SymmetricMemoryBackend",
        "set_all_reduce_hook": "leave the call out",
    }.items():
        with pytest.raises(NotImplementedError, match=rf"FSDPMlpStack\.{name}: .*{way_out}"):
            getattr(model, name)(None)


@pytest.mark.skipif(ENGINE == FSDP2, reason="they are that engine's own")
def test_switches_of_pytorchs_engine_are_refused_with_the_way_out(on_ranks):
    on_ranks(2, check_switches_of_torch)
