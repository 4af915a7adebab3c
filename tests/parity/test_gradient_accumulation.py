"""Accumulating gradients over micro-batches equals one big batch, with and without communication in between."""

import torch
import torch.distributed as dist

from tests.support.engines import ENGINE, full_gradients, full_parameters, shard
from tests.support.guards import assert_really_sharded, assert_same_numbers, assert_same_values
from tests.support.models import build_model, token_batches
from tests.support.recorder import REDUCE_SCATTER, CollectiveRecorder
from tests.support.training import causal_loss, mean_over_ranks, reference_run, sgd, total_norm

#: Micro-batches per optimizer step; the last window is incomplete.
WINDOWS = (4, 4, 2)
NUM_UNITS = 5  # embedding, three blocks, norm with head


def windows_of_rows(rank_count):
    """Return, per optimizer step, the micro-batches of each rank, one row each: ``[window][rank][1, length]``."""
    rows = iter(token_batches(1, rows=rank_count * sum(WINDOWS))[0].split(1))
    return [[[next(rows) for _ in range(rank_count)] for _ in range(window)] for window in WINDOWS]


def run_window(model, micro_batches, *, communicate_each, keep_gathered=False, recorder=None):
    total = torch.zeros(())
    for index, by_rank in enumerate(micro_batches):
        last = index == len(micro_batches) - 1
        model.set_requires_gradient_sync(last or communicate_each)
        model.set_is_last_backward(last)
        if keep_gathered:
            model.set_reshard_after_backward(last)
        if recorder is not None:
            recorder.phase = f"micro-batch {index}"
        loss = causal_loss(model, by_rank[dist.get_rank()]) / len(micro_batches)
        loss.backward()
        total += loss.detach()
    return mean_over_ranks(total)


def compare_with_big_batches(communicate_each, keep_gathered):
    windows = windows_of_rows(dist.get_world_size())
    big = [torch.cat([row for by_rank in window for row in by_rank]) for window in windows]
    expected = reference_run(build_model("llama"), sgd, big, max_norm=1.0)

    model = shard(build_model("llama"))
    optimizer = sgd(model.parameters())
    losses, norms = [], []
    recorder = CollectiveRecorder()
    for step, window in enumerate(windows):
        options = {"communicate_each": communicate_each, "keep_gathered": keep_gathered}
        if step == 0:
            with recorder:
                losses.append(run_window(model, window, **options, recorder=recorder))
            assert_really_sharded(model, recorder, ENGINE)
        else:
            losses.append(run_window(model, window, **options))
        norms.append(total_norm(model, 1.0))
        optimizer.step()
        optimizer.zero_grad()
    assert_same_numbers(losses, expected.losses, "loss", atol=1e-5)
    assert_same_numbers(norms, expected.norms, "gradient norm", atol=1e-5)
    assert_same_values(full_parameters(model), expected.parameters, "weights", atol=1e-5)
    counts = [recorder.count(REDUCE_SCATTER, f"micro-batch {index}") for index in range(WINDOWS[0])]
    assert counts == ([NUM_UNITS] * 4 if communicate_each else [0, 0, 0, NUM_UNITS]), f"reduce-scatters: {counts}"


def compare_all_ways():
    for communicate_each in (True, False):
        for keep_gathered in (True, False):
            compare_with_big_batches(communicate_each, keep_gathered)


def test_micro_batches_equal_the_big_batch(on_ranks):
    on_ranks(2, compare_all_ways)


def bf16_micro_gradients(window):
    """Return the sum over ``window`` of gradients computed by a bf16 model, kept in fp32, averaged over ranks."""
    replica = build_model("llama")
    for parameter in replica.parameters():
        parameter.data = parameter.data.bfloat16()
    totals = {name: torch.zeros(p.shape) for name, p in replica.named_parameters()}
    for by_rank in window:
        for tokens in by_rank:
            (causal_loss(replica, tokens) / len(window)).backward()
            for name, parameter in replica.named_parameters():
                totals[name] += parameter.grad.float() / len(by_rank)
                parameter.grad = None
    return totals


def distance(found, expected):
    return sum((found[name] - expected[name]).double().square().sum() for name in expected).sqrt().item()


def accumulate_in_bf16(communicate_each):
    world_size = dist.get_world_size()
    rows = iter(token_batches(1, rows=world_size * 8)[0].split(1))
    window = [[next(rows) for _ in range(world_size)] for _ in range(8)]
    policy = {"param_dtype": torch.bfloat16, "reduce_dtype": torch.float32}

    model = shard(build_model("llama"), mp=policy)
    run_window(model, window, communicate_each=communicate_each)
    accumulated = full_gradients(model)
    assert all(gradient.dtype == torch.float32 for gradient in accumulated.values())
    assert_same_values(accumulated, bf16_micro_gradients(window), "against the fp32 sum", atol=1e-7, rtol=1e-5)

    # The same rows as one batch, in bf16 and exactly: accumulation adds no error of its own.
    one_batch = [[torch.cat([by_rank[rank] for by_rank in window]) for rank in range(world_size)]]
    big = shard(build_model("llama"), mp=policy)
    run_window(big, one_batch, communicate_each=True)
    exact = build_model("llama")
    for parameter in exact.parameters():
        parameter.data = parameter.data.bfloat16().float()
    causal_loss(exact, torch.cat(one_batch[0])).backward()
    truth = {name: parameter.grad for name, parameter in exact.named_parameters()}
    error, big_error = distance(accumulated, truth), distance(full_gradients(big), truth)
    assert error <= 1.25 * big_error, f"accumulated: {error}, big batch: {big_error}"


def test_bf16_gradients_are_accumulated_in_fp32(on_ranks):
    for communicate_each in (True, False):
        on_ranks(2, accumulate_in_bf16, communicate_each)
