"""A weight under two names is one parameter: before, during and after training."""

import torch
import torch.distributed as dist

from tests.support.engines import engine_module, full, full_gradients, mesh_1d, shard
from tests.support.guards import assert_same_numbers, assert_same_values
from tests.support.models import build_model, my_rows, token_batches
from tests.support.training import adamw, causal_loss, reference_run, sharded_run


def tied_in_one_list(model):
    """Put embedding, final norm and head in one unit, given as a list."""
    fully_shard = engine_module().fully_shard
    mesh = mesh_1d()
    backbone = model.model
    for block in backbone.layers:
        fully_shard(block, mesh=mesh)
    fully_shard([backbone.embed_tokens, backbone.norm, model.lm_head], mesh=mesh)
    return fully_shard(model, mesh=mesh)


def is_tied(model):
    return model.get_input_embeddings().weight is model.get_output_embeddings().weight


def check_tie(name, wrap):
    tokens = token_batches(1)[0]
    plain = build_model(name)
    causal_loss(plain, tokens).backward()
    model = build_model(name)
    num_parameters = len(list(model.parameters()))
    assert is_tied(model)
    model = wrap(model)
    assert is_tied(model), "the tie was lost by sharding"
    assert len(list(model.parameters())) == num_parameters
    seen = []
    for module in (model.get_input_embeddings(), model.get_output_embeddings()):
        module.register_forward_hook(lambda *_: seen.append((is_tied(model), type(model.lm_head.weight))))
    causal_loss(model, my_rows(tokens, dist.get_rank(), dist.get_world_size())).backward()
    assert len(seen) == 2
    assert all(tied for tied, _ in seen), "the tie was lost during forward"
    assert is_tied(model), "the tie was lost after backward"
    expected = {key: parameter.grad for key, parameter in plain.named_parameters()}
    assert_same_values(full_gradients(model), expected, f"{name}, rank {dist.get_rank()}", atol=1e-6)
    optimizer = adamw(model.parameters())
    optimizer.step()
    assert is_tied(model), "the tie was lost by the optimizer"
    assert sum(len(group["params"]) for group in optimizer.param_groups) == num_parameters
    return full(model.lm_head.weight)


def check_root():
    for name in ("gpt2", "qwen2"):
        check_tie(name, shard)


def check_list():
    check_tie("qwen2", tied_in_one_list)
    batches = token_batches(2) * 4
    found = sharded_run(tied_in_one_list(build_model("qwen2")), adamw, batches, max_norm=1.0)
    expected = reference_run(build_model("qwen2"), adamw, batches, max_norm=1.0)
    assert_same_numbers(found.losses, expected.losses, "loss", atol=1e-5)
    assert_same_numbers(found.norms, expected.norms, "gradient norm", atol=1e-5)


def test_tied_weights_in_the_root_stay_one_parameter(on_ranks):
    on_ranks(2, check_root)


def test_tied_weights_in_a_list_unit_stay_one_parameter(on_ranks):
    on_ranks(2, check_list)


class SharedLinear(torch.nn.Module):
    """Two layers of one unit share a weight but not a bias."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.first = torch.nn.Linear(10, 10)
        self.second = torch.nn.Linear(10, 10)
        self.second.weight = self.first.weight

    def forward(self, x):
        return self.second(torch.tanh(self.first(x)))


def check_inside():
    features = torch.randn(8, 10, generator=torch.Generator().manual_seed(1))
    plain = SharedLinear()
    plain(features).square().mean().backward()
    model = shard(SharedLinear(), units=[])
    model(my_rows(features, dist.get_rank(), dist.get_world_size())).square().mean().backward()
    assert model.first.weight is model.second.weight
    expected = {name: parameter.grad for name, parameter in plain.named_parameters()}
    assert_same_values(full_gradients(model), expected, "gradients", atol=1e-6)


def test_a_weight_used_twice_in_a_unit_gets_both_gradients(on_ranks):
    on_ranks(2, check_inside)
