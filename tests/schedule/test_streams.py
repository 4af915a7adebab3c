"""On an accelerator: what must wait does, and what may overlap can."""

from itertools import pairwise

import pytest
import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import FakeTensorMode

from tests.schedule.fake_accelerator import HOST, NAME, Event, Stream, default_stream, fake_ranks, on_stream
from tests.schedule.scenarios import BF16, UNITS, sharded
from tests.schedule.timeline import GATHER, REDUCE, Timeline, before, concurrent
from ya_fsdp.comm import ProcessGroupCollectives, plan_reduction
from ya_fsdp.runtime.comm_context import YaFSDPCommContext
from ya_fsdp.runtime.device import DeviceRuntime


def uses_of(buffer):
    """Yield each gather into a buffer, and what computes with it until the next one."""
    compute = default_stream().number
    accesses = buffer.accesses
    places = [i for i, (op, writes) in enumerate(accesses) if writes and op.name == GATHER]
    for place, following in zip(places, [*places[1:], len(accesses)], strict=True):
        yield accesses[place][0], [op for op, _ in accesses[place + 1 : following] if op.stream == compute]


def run_steps(num_steps=3, **options):
    with sharded(NAME, **options) as run, run.watched() as timeline:
        for _ in range(num_steps):
            run.step()
        return timeline


def check_uses_wait():
    timeline = run_steps(policy=BF16)
    num_uses = 0
    for buffer in timeline.gather_buffers():
        for gather, uses in uses_of(buffer):
            assert uses, f"{gather} is for nothing"
            for use in uses:
                num_uses += 1
                assert before(gather, use), f"{use} need not see what {gather} brings"
    assert num_uses >= 3 * (2 * len(UNITS) - 2)


def test_whatever_computes_with_parameters_waits_for_their_gather(in_helper):
    in_helper(check_uses_wait)


def check_gathers_wait(policy):
    timeline = run_steps(policy=policy)
    num_waits = 0
    for buffer in timeline.gather_buffers():
        for place, (op, writes) in enumerate(buffer.accesses):
            if not (writes and op.stream != default_stream().number):
                continue
            for earlier, _ in buffer.accesses[:place]:
                num_waits += earlier.stream != op.stream
                assert before(earlier, op), f"{op} may overwrite what {earlier} still reads"
    assert num_waits > 10, "buffers are shared, so gathers must have met earlier readers"


@pytest.mark.parametrize("policy", [{}, BF16], ids=["fp32", "bf16"])
def test_a_gather_waits_until_its_buffer_has_been_vacated(in_helper, policy):
    in_helper(check_gathers_wait, policy)


def check_staging_outlives(policy):
    timeline = run_steps(policy=policy)
    stagings = timeline.stagings()
    assert len(stagings) == 3 * len(UNITS)
    for staging in stagings:
        (reduction,) = [op for op, _ in staging.accesses if op.name == REDUCE]
        fills = [op for op, writes in staging.accesses if writes]
        assert fills, "nothing fills the input of a reduction"
        assert all(before(fill, reduction) for fill in fills), f"{reduction} may read half-written gradients"
        assert staging.freed is not None, "staging outlives the step"
        assert staging.freed_clock[reduction.stream] >= reduction.clock[reduction.stream], (
            f"the memory that {reduction} reads returns while it may still run"
        )


@pytest.mark.parametrize("policy", [{}, BF16], ids=["fp32", "bf16"])
def test_the_input_of_a_reduction_lives_until_the_reduction_is_done(in_helper, policy):
    in_helper(check_staging_outlives, policy)


def check_end_of_backward():
    with sharded(NAME, policy=BF16) as run, run.watched() as timeline:
        for _ in range(2):
            run.forward_backward()
            clock = dict(default_stream().clock)
            reductions = timeline.of(REDUCE)
            assert len(reductions) == len(UNITS)
            side = reductions[0].stream
            last = [op for op in timeline.ops if op.stream == side][-1]
            assert clock[side] >= last.clock[side], f"the optimizer may read gradients ahead of {last}"
            run.optimizer.step()
            run.optimizer.zero_grad()
            timeline.ops.clear()


def test_work_behind_the_backward_waits_for_the_last_reduction(in_helper):
    in_helper(check_end_of_backward)


def check_gathers_wait_for_optimizer():
    with sharded(NAME, policy=BF16) as run, run.watched() as timeline:
        run.step()
        write = [op for op in timeline.ops if op.stream == default_stream().number][-1]
        since = len(timeline.ops)
        run.forward_backward()
        gathers = [op for op in timeline.of(GATHER) if op.index >= since]
        assert gathers
        assert all(before(write, gather) for gather in gathers), f"a gather may read weights from before {write}"


def test_gathers_wait_for_the_optimizer(in_helper):
    in_helper(check_gathers_wait_for_optimizer)


def check_post_optim_event():
    with sharded(NAME, kept=()) as run, run.watched() as timeline:
        run.step()
        run.step()
        side = Stream()
        run.forward_backward()
        done = Event()
        with on_stream(side):
            side.wait_stream(default_stream())
            run.optimizer.step()
            done.record(side)
        run.model.set_post_optim_event(done)
        update = [op for op in timeline.ops if op.stream == side.number][-1]
        torch.ones(4, device=NAME)  # goes on while the optimizer runs, and the gathers need not wait for it
        unrelated = timeline.ops[-1]
        assert unrelated.stream == default_stream().number
        since = len(timeline.ops)
        run.model.blocks[0].release_buffers()
        with torch.no_grad():
            run.model(run.tokens)
        gathers = [op for op in timeline.of(GATHER) if op.index >= since]
        assert len(gathers) == len(UNITS)
        assert all(before(update, gather) for gather in gathers), "a gather may read weights from before the optimizer"
        # Given once, it holds for one forward.
        torch.ones(4, device=NAME)
        later, since = timeline.ops[-1], len(timeline.ops)
        with torch.no_grad():
            run.model(run.tokens)
        gathers = [op for op in timeline.of(GATHER) if op.index >= since]
        assert all(before(later, gather) for gather in gathers)


def test_gathers_wait_for_the_event_of_an_optimizer_on_another_stream(in_helper):
    in_helper(check_post_optim_event)


def check_overlap():
    timeline = run_steps(policy=BF16)
    compute = default_stream().number
    names = timeline.names
    gathers = timeline.of(GATHER)[-(2 * len(UNITS) - 2) :]  # of the last step
    reductions = timeline.of(REDUCE)[-len(UNITS) :]
    assert len({compute, gathers[0].stream, reductions[0].stream}) == 3
    assert {op.stream for op in timeline.ops} == {compute, gathers[0].stream, reductions[0].stream}
    uses = {gather: ops for buffer in timeline.gather_buffers() for gather, ops in uses_of(buffer)}
    forward, backward = gathers[: len(UNITS)], gathers[len(UNITS) :]
    for gather, following in pairwise(forward):
        alone = [use for use in uses[gather] if not concurrent(use, following)]
        assert len(alone) < len(uses[gather]), f"the forward of {names[gather.numel]} waits for the next gather"
    for gather, following in pairwise(backward):
        assert any(concurrent(use, following) for use in uses[gather]), (
            f"the backward of {names[gather.numel]} cannot overlap with the gather of {names[following.numel]}"
        )
    for gather in backward:
        own = next(op for op in reductions if op.numel == gather.numel)
        above = reductions[reductions.index(own) - 1]
        assert any(concurrent(use, above) for use in uses[gather]), (
            f"the backward of {names[gather.numel]} cannot overlap with the reduction of {names[above.numel]}"
        )


def test_gathers_and_reductions_can_overlap_with_the_units_beside_them(in_helper):
    in_helper(check_overlap)


def check_host_never_waits():
    before_ = HOST.num_waits
    timeline = run_steps(policy=BF16)
    assert HOST.num_waits == before_, "the host waited for the device"
    reads = [op for op in timeline.ops if op.name in ("_local_scalar_dense", "item", "nonzero")]
    assert not reads, f"the host read results: {reads}"


def test_the_host_never_waits_for_the_device(in_helper):
    in_helper(check_host_never_waits)


def check_reset():
    timeline = Timeline()
    with fake_ranks(8):
        collectives = ProcessGroupCollectives(dist.group.WORLD)
        comm = YaFSDPCommContext(DeviceRuntime(torch.device(NAME, 0)))
        with FakeTensorMode(), timeline:
            output, staging = torch.zeros(16, device=NAME), torch.zeros(128, device=NAME)
            flight = comm.reduce_scatter(collectives, output, staging, plan_reduction(8, torch.float32))
            comm.defer_reduction(flight.wait)
            del staging, flight
            comm.reset()
            del output
            torch.ones(16, device=NAME)
    assert len(timeline.of(REDUCE)) == 1
    assert not timeline.races(), timeline.races()


def test_a_reduction_left_by_a_broken_backward_keeps_its_memory_until_it_is_done(in_helper):
    in_helper(check_reset)
