"""16-bit compute keeps fp32 master weights, fp32 gradients and fp32 optimizer state."""

import copy

import pytest
import torch
import torch.distributed as dist

from tests.support.engines import ENGINE, FSDP2, engine_module, local, mesh_1d, shard
from tests.support.guards import assert_same_numbers, assert_same_values
from tests.support.models import MlpStack, build_model, my_rows, token_batches
from tests.support.training import RunResult, adamw, causal_loss, sgd, sharded_run


def master_weight_run(name, dtype, make_optimizer, batches):
    """One process: 16-bit copies compute each rank's gradient, the fp32 mean of these updates fp32 weights."""
    master = build_model(name)
    optimizer = make_optimizer(master.parameters())
    world_size = dist.get_world_size()
    result = RunResult()
    for batch in batches:
        loss_sum = torch.zeros(())
        for rank in range(world_size):
            replica = copy.deepcopy(master)
            for parameter in replica.parameters():
                parameter.data, parameter.grad = parameter.data.to(dtype), None
            loss = causal_loss(replica, my_rows(batch, rank, world_size))
            loss.backward()
            loss_sum += loss.detach()
            for parameter, source in zip(master.parameters(), replica.parameters(), strict=True):
                gradient = source.grad.float() / world_size
                parameter.grad = gradient if rank == 0 else parameter.grad + gradient
        result.losses.append(loss_sum.item() / world_size)
        optimizer.step()
        optimizer.zero_grad()
    result.parameters = {key: parameter.detach() for key, parameter in master.named_parameters()}
    return result


def compare_bits(name, dtype):
    policy = {"param_dtype": dtype, "reduce_dtype": torch.float32}
    batches = token_batches(4) * 2
    for make_optimizer in (sgd, adamw):
        found = sharded_run(shard(build_model(name), mp=policy), make_optimizer, batches)
        others = {"one process": master_weight_run(name, dtype, make_optimizer, batches)}
        if ENGINE != FSDP2:
            model = shard(build_model(name), FSDP2, mp=policy)
            others["FSDP2"] = sharded_run(model, make_optimizer, batches, engine=FSDP2)
        for other, expected in others.items():
            what = f"{name} in {dtype}, {make_optimizer.__name__}, against {other}"
            assert_same_numbers(found.losses, expected.losses, f"loss ({what})")
            assert_same_values(found.parameters, expected.parameters, f"weights ({what})")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_two_ranks_are_bit_equal_to_master_weights_in_one_process(on_ranks, name, dtype):
    on_ranks(2, compare_bits, name, dtype)


def check_dtypes():
    model = shard(build_model("llama"), mp={"param_dtype": torch.bfloat16, "reduce_dtype": torch.float32})
    seen = []
    for block in model.model.layers:
        block.register_forward_pre_hook(
            lambda module, args: seen.append((args[0].dtype, module.mlp.up_proj.weight.dtype))
        )
    before = {name: local(parameter).clone() for name, parameter in model.named_parameters()}
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5, weight_decay=0.0)
    causal_loss(model, token_batches(1)[0]).backward()
    assert all(parameter.grad.dtype == torch.float32 for parameter in model.parameters())
    optimizer.step()
    assert [found[1] for found in seen] == [torch.bfloat16] * 3, f"weights during forward: {seen}"
    assert [found[0] for found in seen[1:]] == [torch.bfloat16] * 2, f"inputs of the blocks: {seen}"
    for name, parameter in model.named_parameters():
        assert parameter.dtype == torch.float32, f"{name} is {parameter.dtype}"
        for key in ("exp_avg", "exp_avg_sq"):
            assert optimizer.state[parameter][key].dtype == torch.float32, f"{key} of {name}"
        moved = (local(parameter) - before[name]).abs()
        if "embed" not in name and moved.numel():  # tokens that were not seen have no gradient
            assert 0.2e-5 < moved.mean().item() < 1.2e-5, f"{name} moved by {moved.mean().item()}, expected about 1e-5"


def test_shards_moments_and_gradients_stay_fp32(on_ranks):
    on_ranks(2, check_dtypes)


def check_output_and_input_dtypes():
    module = engine_module()
    features = torch.randn(4, 10)
    seen = []

    def outputs(**policy):
        model = MlpStack(2)
        for block in model.blocks:
            module.fully_shard(block, mesh=mesh_1d(), mp_policy=module.MixedPrecisionPolicy(param_dtype=torch.bfloat16))
        model.blocks[0].register_forward_pre_hook(lambda _, args: seen.append(args[0].dtype))
        module.fully_shard(model, mesh=mesh_1d(), mp_policy=module.MixedPrecisionPolicy(**policy))
        return model(features).dtype

    assert outputs(param_dtype=torch.bfloat16, output_dtype=torch.float32) == torch.float32
    assert outputs(param_dtype=torch.bfloat16) == torch.bfloat16
    # The root's policy decides about the inputs of the model; the blocks cast theirs in any case.
    assert outputs(param_dtype=torch.bfloat16, cast_forward_inputs=False) == torch.bfloat16


def test_output_dtype_is_honoured(on_ranks):
    on_ranks(2, check_output_and_input_dtypes)
