"""Frozen parameters stay as they are, cost no gradient memory and no reduction."""

import torch.distributed as dist

from tests.support.engines import ENGINE, FSDP2, full_parameters, local, shard
from tests.support.guards import assert_same_numbers, assert_same_values
from tests.support.models import build_model, my_rows, token_batches
from tests.support.recorder import REDUCE_SCATTER, CollectiveRecorder
from tests.support.training import adamw, causal_loss, reference_run, sharded_run


def build_frozen():
    """Freeze the embedding, the whole first block, and the attention of the other blocks."""
    model = build_model("llama")
    model.model.embed_tokens.requires_grad_(False)
    model.model.layers[0].requires_grad_(False)
    for block in model.model.layers[1:]:
        block.self_attn.requires_grad_(False)
    return model


def trainable(parameters):
    return adamw([parameter for parameter in parameters if parameter.requires_grad])


def compare_with_one_process():
    batches = token_batches(2) * 4
    model = shard(build_frozen())
    frozen = {name: local(p).clone() for name, p in model.named_parameters() if not p.requires_grad}
    found = sharded_run(model, trainable, batches, max_norm=1.0)
    expected = reference_run(build_frozen(), trainable, batches, max_norm=1.0)
    assert_same_numbers(found.losses, expected.losses, "loss", atol=1e-5)
    assert_same_numbers(found.norms, expected.norms, "gradient norm", atol=1e-5)
    assert_same_values(found.parameters, expected.parameters, "weights", atol=1e-4)
    after = {name: local(p) for name, p in model.named_parameters() if not p.requires_grad}
    assert_same_values(after, frozen, "frozen weights")


def count_costs():
    model = shard(build_frozen())
    with CollectiveRecorder() as recorder:
        causal_loss(model, my_rows(token_batches(1)[0], dist.get_rank(), dist.get_world_size())).backward()
    assert recorder.count(REDUCE_SCATTER) == 3, "two blocks and the head have something to reduce"
    num_trainable = sum(p.numel() for p in model.parameters() if p.requires_grad)
    num_all = sum(p.numel() for p in model.parameters())
    reduced = sum(event.num_bytes for event in recorder.of(REDUCE_SCATTER))
    assert reduced < 1.1 * 4 * num_trainable < 0.9 * 4 * num_all, f"{reduced} bytes reduced"
    for name, parameter in model.named_parameters():
        assert (parameter.grad is not None) == parameter.requires_grad, f"gradient of {name}"
    if ENGINE != FSDP2:
        from ya_fsdp import memory_report

        report = memory_report(model)
        limit = 4 * num_trainable / dist.get_world_size() * 1.1
        assert 0 < report.gradients <= limit, f"{report.gradients} bytes of gradients, expected at most {limit}"


def test_training_equals_one_process_and_frozen_weights_keep_their_bits(on_ranks):
    on_ranks(2, compare_with_one_process)


def test_frozen_parameters_are_not_reduced(on_ranks):
    on_ranks(2, count_costs)


def all_parameters_in_the_norm():
    model = shard(build_frozen())
    full_parameters(model)
    for parameter in model.parameters():
        parameter.requires_grad_(False)
    with CollectiveRecorder() as recorder:
        loss = causal_loss(model, token_batches(1)[0])
    assert not loss.requires_grad
    assert recorder.count(REDUCE_SCATTER) == 0


def test_a_model_frozen_after_sharding_still_evaluates(on_ranks):
    on_ranks(2, all_parameters_in_the_norm)
