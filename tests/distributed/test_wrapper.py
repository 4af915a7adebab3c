"""The older wrapper trains like one process in every stage, and communicates as often as it says."""

from functools import partial

import pytest
import torch
import torch.distributed as dist
from torch.utils.checkpoint import checkpoint

from tests.support.engines import full, full_gradients, full_parameters
from tests.support.guards import assert_really_sharded, assert_same_numbers, assert_same_values
from tests.support.models import build_model, my_rows, token_batches
from tests.support.recorder import GATHER, REDUCE_SCATTER, CollectiveRecorder
from tests.support.training import causal_loss, mean_over_ranks, reference_run, sgd
from tests.support.wrapping import lists_of, wrap
from ya_fsdp import RaggedShardDTensor

STEPS = 8
#: Units of the untied Llama: embedding, three blocks, head, and the norms; of the tied GPT-2: the embedding with the
#: head, positions, two blocks, and the norms.
NUM_UNITS = {"llama": 6, "gpt2": 5}
ROWS = 16


def micro_batches(batch, steps):
    return my_rows(batch, dist.get_rank(), dist.get_world_size()).chunk(steps)


def train(model, batches, steps, recorders=()):
    """Train; return losses (averaged over ranks and micro-batches) and gradient norms. Losses are not divided."""
    optimizer = sgd(model.parameters())
    losses, norms = [], []
    for place, batch in enumerate(batches):
        total = torch.zeros(())
        recorder = recorders[place] if place < len(recorders) else CollectiveRecorder()
        for index, rows in enumerate(micro_batches(batch, steps)):
            with recorder:
                recorder.phase = str(index)
                loss = causal_loss(model, rows)
                loss.backward()
            total += loss.detach() / steps
        losses.append(mean_over_ranks(total))
        norms.append(model.clip_grad_norm_(1.0).item())
        optimizer.step()
        optimizer.zero_grad()
    return losses, norms


def gathers_per_micro_batch(stage, steps, units):
    """What the wrapper's documentation says; every module of these models is listed, so nothing is left to the root."""
    if stage < 3:
        return [units] + [0] * (steps - 1)
    # All but the norms: twice, and once what only looks rows up (Llama's embedding, GPT-2's positions).
    each = 2 * (units - 1) - 1
    return [each + 1] + [each] * (steps - 1)


def compare_with_one_process(name, stage, steps):
    batches = token_batches(STEPS, rows=ROWS)
    expected = reference_run(build_model(name), sgd, batches, max_norm=1.0)
    model = wrap(name, zero_stage=stage, gradient_accumulation_steps=steps)
    recorders = [CollectiveRecorder(), CollectiveRecorder()]
    losses, norms = train(model, batches, steps, recorders)
    what = f"{name}, stage {stage}, {steps} micro-batches, rank {dist.get_rank()}"
    assert_same_numbers(losses, expected.losses, f"loss ({what})", atol=1e-5)
    assert_same_numbers(norms, expected.norms, f"gradient norm ({what})", atol=1e-5)
    assert_same_values(full_parameters(model.module), expected.parameters, f"weights ({what})", atol=1e-5)
    assert losses[-1] < losses[0], "the model did not learn"
    assert_really_sharded(model.module, recorders[0], "ya_fsdp")

    units = NUM_UNITS[name]
    for step, recorder in enumerate(recorders):
        gathers = [recorder.count(GATHER, str(index)) for index in range(steps)]
        reductions = [recorder.count(REDUCE_SCATTER, str(index)) for index in range(steps)]
        assert gathers == gathers_per_micro_batch(stage, steps, units), f"{what}, step {step}: {gathers} gathers"
        assert reductions == [0] * (steps - 1) + [units], f"{what}, step {step}: {reductions} reductions"


def compare_stages(name):
    for stage in (1, 2, 3):
        for steps in (1, 4):
            compare_with_one_process(name, stage, steps)


@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_every_stage_matches_one_process_with_the_documented_collectives(on_ranks, name):
    on_ranks(2, compare_stages, name)


def count_norms():
    """Recognise the norms' collectives by their bytes: four of 40 elements and three of another size do not mix."""
    steps = 4
    model = wrap(zero_stage=3, gradient_accumulation_steps=steps)
    norm_bytes = 4 * sum(p.numel() for n, p in build_model("llama").named_parameters() if "norm" in n)
    for batch in token_batches(2, rows=ROWS):
        recorder = CollectiveRecorder()
        train(model, [batch], steps, [recorder])
        limit = norm_bytes + 4 * 8 * (7 + 2 * dist.get_world_size())
        for kind, phase in ((GATHER, "0"), (REDUCE_SCATTER, str(steps - 1))):
            of_norms = [event for event in recorder.of(kind) if norm_bytes <= event.num_bytes <= limit]
            assert [event.phase for event in of_norms] == [phase], f"{kind}: {of_norms}"
        first = recorder.of(GATHER)[:4]  # embedding, first block, norms, second block
        assert any(norm_bytes <= event.num_bytes <= limit for event in first), "norms are not gathered at the start"
        last = recorder.of(REDUCE_SCATTER)[-3:]  # norms, first block, embedding
        assert any(norm_bytes <= event.num_bytes <= limit for event in last), "norms are not reduced at the end"


def test_norms_are_gathered_once_at_the_start_and_reduced_once_at_the_end_of_an_iteration(on_ranks):
    on_ranks(2, count_norms)


def reduce_each(stage):
    steps, batches = 4, token_batches(4, rows=ROWS)
    expected = reference_run(build_model("llama"), sgd, batches, max_norm=1.0)
    model = wrap(zero_stage=stage, gradient_accumulation_steps=steps, reduce_every_micro_batch=True)
    recorders = [CollectiveRecorder() for _ in range(2)]
    losses, norms = train(model, batches, steps, recorders)
    assert_same_numbers(losses, expected.losses, f"loss (stage {stage})", atol=1e-5)
    assert_same_numbers(norms, expected.norms, f"gradient norm (stage {stage})", atol=1e-5)
    for recorder in recorders:
        assert [recorder.count(REDUCE_SCATTER, str(i)) for i in range(steps)] == [6] * steps
        assert [recorder.count(GATHER, str(i)) for i in range(steps)] == gathers_per_micro_batch(stage, steps, 6)


def test_gradients_stay_sharded_between_micro_batches_when_asked(on_ranks):
    for stage in (2, 3):
        on_ranks(2, reduce_each, stage)


def disturb_a_cycle():
    """Between micro-batches: an evaluation, a full state dict, and a backward that is given up."""
    steps, batches = 2, token_batches(3, rows=ROWS)
    for stage in (2, 3):
        calm = wrap(zero_stage=stage, gradient_accumulation_steps=steps)
        expected = train(calm, batches, steps)
        model = wrap(zero_stage=stage, gradient_accumulation_steps=steps)
        optimizer = sgd(model.parameters())
        for place, batch in enumerate(batches):
            first, second = micro_batches(batch, steps)
            causal_loss(model, first).backward()
            model.reset_iter_state()  # what was added up so far is dropped, and the cycle begins anew
            causal_loss(model, first).backward()
            model.eval()
            with torch.no_grad():
                assert causal_loss(model, second).isfinite()
            model.train()
            assert len(model.state_dict(rank0_only=False)) == 30
            causal_loss(model, second).backward()
            assert abs(model.clip_grad_norm_(1.0).item() - expected[1][place]) < 1e-6, f"stage {stage}, step {place}"
            optimizer.step()
            optimizer.zero_grad()


def test_evaluations_state_dicts_and_restarts_between_micro_batches_change_nothing(on_ranks):
    on_ranks(2, disturb_a_cycle)


def run_with_checkpointing(use_reentrant):
    batches = token_batches(2, rows=ROWS)
    for steps in (1, 2):
        expected = train(wrap(gradient_accumulation_steps=steps), batches, steps)
        model = wrap(gradient_accumulation_steps=steps)
        for block in model.module.model.layers:
            run = block.forward
            block.forward = lambda *args, run=run, **kwargs: checkpoint(
                partial(run, **kwargs), *args, use_reentrant=use_reentrant
            )
        found = train(model, batches, steps)
        assert_same_numbers(found[0], expected[0], f"loss, {steps} micro-batches", atol=1e-6)
        assert_same_numbers(found[1], expected[1], f"norm, {steps} micro-batches", atol=1e-6)


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_norms_take_part_in_activation_checkpointing(on_ranks, use_reentrant):
    on_ranks(2, run_with_checkpointing, use_reentrant)


def two_forwards_one_backward():
    tokens = token_batches(2, rows=4)
    plain = build_model("llama")
    (causal_loss(plain, tokens[0]) + causal_loss(plain, tokens[1])).backward()
    expected = {name: parameter.grad for name, parameter in plain.named_parameters()}
    for stage in (2, 3):
        model = wrap(zero_stage=stage)
        (causal_loss(model, tokens[0]) + causal_loss(model, tokens[1])).backward()
        assert_same_values(full_gradients(model.module), expected, f"stage {stage}", atol=1e-6, rtol=1e-5)


def test_two_forwards_and_one_backward(on_ranks):
    on_ranks(2, two_forwards_one_backward)


def without_rogue_norm():
    """The last norm is found by its class; without any class, norms ride with their blocks and the root's rest."""
    batches = token_batches(2, rows=ROWS)
    expected = reference_run(build_model("llama"), sgd, batches, max_norm=1.0)
    for changes, units in (
        ({"rogue_layer_norm_modules_with_names": None}, 6),
        ({"rogue_layer_norm_modules_with_names": None, "layer_norm_module_cls": None}, 6),
        ({"layer_norm_module_cls": None}, 6),
    ):
        model = wrap(**changes)
        recorder = CollectiveRecorder()
        losses, norms = train(model, batches, 1, [recorder])
        assert_same_numbers(losses, expected.losses, f"loss ({changes})", atol=1e-5)
        assert_same_numbers(norms, expected.norms, f"norm ({changes})", atol=1e-5)
        assert recorder.count(REDUCE_SCATTER) == units, changes


def test_norms_are_found_by_class_and_are_not_a_unit_without_one(on_ranks):
    on_ranks(2, without_rogue_norm)


def leave_the_rest_to_the_model():
    """What nobody lists is the model's own unit: kept from forward to backward, reduced once per cycle."""
    steps, batches = 2, token_batches(2, rows=ROWS)
    expected = reference_run(build_model("llama"), sgd, batches, max_norm=1.0)
    model = build_model("llama")
    blocks = [(block, f"b{place}") for place, block in enumerate(model.model.layers)]
    model = wrap(model, modules_to_wrap_with_names=blocks, gradient_accumulation_steps=steps)
    recorder = CollectiveRecorder()
    losses, norms = train(model, batches, steps, [recorder])
    assert_same_numbers(losses, expected.losses, "loss", atol=1e-5)
    assert_same_numbers(norms, expected.norms, "norm", atol=1e-5)
    assert [recorder.count(GATHER, str(index)) for index in range(steps)] == [2 * 3 + 1 + 1, 2 * 3 + 1]
    assert [recorder.count(REDUCE_SCATTER, str(index)) for index in range(steps)] == [0, 3 + 1 + 1]


def test_what_nobody_lists_is_the_models_own_unit(on_ranks):
    on_ranks(2, leave_the_rest_to_the_model)


def check_dtypes():
    tokens = token_batches(1, rows=4)[0]
    bf16, fp32 = torch.bfloat16, torch.float32
    for options, reduced in (
        ({}, fp32),
        ({"bit16_reduce_scatter": True}, bf16),
        ({"bit16_reduce_scatter": True, "bit32_acc_for_bit16_reduce_scatter": True}, None),
    ):
        model = wrap(build_model("llama", dtype=bf16), param_dtype=bf16, **options)
        with CollectiveRecorder() as recorder:
            causal_loss(model, tokens).backward()
        assert {event.dtype for event in recorder.of(GATHER)} == {bf16}
        assert {event.dtype for event in recorder.of(REDUCE_SCATTER)} == ({reduced} if reduced else set())
        assert {p.dtype for p in model.parameters()} == {p.grad.dtype for p in model.parameters()} == {fp32}
        exact = build_model("llama", dtype=bf16).float()
        causal_loss(exact, tokens).backward()
        for name, parameter in model.module.named_parameters():
            expected = exact.get_parameter(name).grad
            error = (full(parameter.grad) - expected).norm() / expected.norm()
            assert error < 0.05, f"{options}: {name} is off by {error:.3f}"

    frozen = wrap(param_dtype=bf16, is_trainable=False)
    assert {(p.dtype, p.requires_grad, type(p)) for p in frozen.parameters()} == {(bf16, False, RaggedShardDTensor)}
    assert not frozen(input_ids=tokens).logits.requires_grad


def test_weights_are_kept_in_fp32_and_travel_as_asked(on_ranks):
    on_ranks(2, check_dtypes)


def hold_in_nodes():
    """The first two listed modules are held by each half of the ranks between forward and backward."""
    batches = token_batches(3, rows=ROWS)
    expected = reference_run(build_model("llama"), sgd, batches, max_norm=1.0)
    rank = dist.get_rank()
    nodes = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    model = wrap(hpz_first_layers_num=2, intra_node_data_parallel_process_group=nodes[rank // 2])
    recorder = CollectiveRecorder()
    losses, norms = train(model, batches, 1, [recorder])
    assert_same_numbers(losses, expected.losses, "loss", atol=1e-5)
    assert_same_numbers(norms, expected.norms, "norm", atol=1e-5)
    assert recorder.count(GATHER) == 10, "five units twice and the norms once, less the embedding in the backward"
    listed = [module for module, _ in lists_of(model.module)["modules_to_wrap_with_names"]]
    assert [module._get_fsdp_state().settings.reshard_group_size for module in listed] == [2, 2, None, None, None]


@pytest.mark.parametrize("world", [4])
def test_the_first_modules_are_held_within_nodes_until_the_backward(on_ranks, world):
    on_ranks(world, hold_in_nodes)
