"""Parameters of two floating dtypes in one unit."""

import torch
import torch.distributed as dist
from torch import nn

from tests.support.engines import full_parameters, shard
from tests.support.guards import assert_same_numbers, assert_same_values
from tests.support.models import build_model, float_batches, token_batches
from tests.support.training import adamw, reference_run, sgd, sharded_run, square_loss


def bf16_with_fp32_norms():
    """GPT-2 in bf16, its layer norms in fp32; torch computes such a layer norm natively."""
    model = build_model("gpt2", dtype=torch.bfloat16)
    for module in model.modules():
        if isinstance(module, nn.LayerNorm):
            module.float()
            # Values that bf16 cannot hold: a trip through it would show.
            torch.nn.init.normal_(module.weight, mean=1.0, std=0.1)
    return model


def train_bf16_with_fp32_norms(policy):
    original = {name: parameter.detach().clone() for name, parameter in bf16_with_fp32_norms().named_parameters()}
    dtypes = {parameter.dtype for parameter in original.values()}
    assert dtypes == {torch.bfloat16, torch.float32}
    model = shard(bf16_with_fp32_norms(), mp=policy)
    assert {name: p.dtype for name, p in model.named_parameters()} == {name: p.dtype for name, p in original.items()}
    assert_same_values(full_parameters(model), original, "values after sharding")
    seen = {}
    model.transformer.h[0].register_forward_pre_hook(
        lambda block, _: seen.update({name: p.detach().clone() for name, p in block.named_parameters()})
    )
    batches = token_batches(2) * 4
    found = sharded_run(model, sgd, batches)
    if policy is None:
        first = {f"transformer.h.0.{name}": value.dtype for name, value in seen.items()}
        assert first == {name: original[name].dtype for name in first}, "dtypes during forward"
        expected = reference_run(bf16_with_fp32_norms(), sgd, batches)
    else:
        assert {value.dtype for value in seen.values()} == {torch.bfloat16}
        expected = reference_run(bf16_with_fp32_norms().bfloat16(), sgd, batches)
    assert_same_numbers(found.losses, expected.losses, "loss", atol=1e-2)
    assert found.losses[6] < found.losses[0] - 1e-2, "the model did not learn"


def test_bf16_model_with_fp32_norms_trains(on_ranks):
    on_ranks(2, train_bf16_with_fp32_norms, None)
    on_ranks(2, train_bf16_with_fp32_norms, {"param_dtype": torch.bfloat16, "reduce_dtype": torch.float32})


def check_gathered_bits():
    model = bf16_with_fp32_norms()
    original = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    shard(model)
    for module in [model, *model.transformer.h]:
        module.unshard()
    gathered = {name: parameter.detach() for name, parameter in model.named_parameters()}
    assert_same_values(gathered, original, f"gathered on rank {dist.get_rank()}")
    for module in [model, *model.transformer.h]:
        module.reshard()


def test_gathered_values_have_the_original_bits(on_ranks):
    on_ranks(2, check_gathered_bits)


class MixedBlock(nn.Module):
    """fp32 linear layers, and a fp64 norm and scale that are applied in fp64."""

    def __init__(self, width):
        super().__init__()
        self.norm = nn.LayerNorm(width, dtype=torch.float64)
        self.up = nn.Linear(width, 9)
        self.scale = nn.Parameter(torch.full((9,), 1.1, dtype=torch.float64))
        self.down = nn.Linear(9, width)

    def forward(self, x):
        hidden = torch.tanh(self.up(self.norm(x.double()).float()))
        return x + self.down((hidden * self.scale).float())


def mixed_model():
    torch.manual_seed(0)
    return nn.Sequential(MixedBlock(10), MixedBlock(10), MixedBlock(10))


def train_fp32_with_fp64():
    batches = float_batches(8)
    for make_optimizer in (sgd, adamw):
        model = mixed_model()
        shard(model, units=list(model))
        found = sharded_run(model, make_optimizer, batches, loss_fn=square_loss, max_norm=1.0)
        expected = reference_run(mixed_model(), make_optimizer, batches, loss_fn=square_loss, max_norm=1.0)
        assert_same_numbers(found.losses, expected.losses, "loss", atol=1e-5)
        assert_same_numbers(found.norms, expected.norms, "gradient norm", atol=1e-5)
        assert_same_values(found.parameters, expected.parameters, "weights", atol=1e-5)


def test_fp32_and_fp64_in_one_unit_train_like_one_process(on_ranks):
    on_ranks(2, train_fp32_with_fp64)
