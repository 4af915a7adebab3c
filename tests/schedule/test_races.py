"""No schedule lets two streams meet in the same memory, and no memory returns while a stream may still touch it."""

from contextlib import contextmanager

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

from tests.schedule.fake_accelerator import NAME, Event, Stream, default_stream, on_stream
from tests.schedule.scenarios import BF16, UNITS, sharded
from tests.schedule.timeline import GATHER, REDUCE, Timeline
from ya_fsdp.runtime import reducer


def steps(run):
    """Two steps: from the second on, the forward gathers ahead and buffers have been used before."""
    run.step()
    run.step()


def reduced_micro_batches(run):
    for _ in range(2):
        run.forward_backward()
        run.step()


def unreduced_micro_batches(run):
    for _ in range(2):
        run.model.set_requires_gradient_sync(False)
        run.forward_backward()
        run.forward_backward()
        run.model.set_requires_gradient_sync(True)
        run.step()


def micro_batches_between_replicas(run):
    for _ in range(2):
        run.model.set_requires_all_reduce(False)
        run.forward_backward()
        run.model.set_requires_all_reduce(True)
        run.step()


def evaluation_between_steps(run):
    for _ in range(2):
        run.step()
        with torch.no_grad():
            run.model(run.tokens)
            run.model(run.tokens)


def recorded_backwards(run):
    """A gradient penalty on what the embedding gives: a backward that is differentiated."""
    for _ in range(2):
        seen = []
        handle = run.model.embedding.register_forward_hook(lambda module, args, output, seen=seen: seen.append(output))
        out = run.model(run.tokens).float()
        handle.remove()
        (slope,) = torch.autograd.grad(out.square().sum(), seen, create_graph=True)
        (out.sum() + slope.float().square().sum()).backward()
        run.optimizer.step()
        run.optimizer.zero_grad()


def clipped_steps(run):
    for _ in range(2):
        run.forward_backward()
        torch.nn.utils.clip_grad_norm_(run.model.parameters(), 1.0)
        run.optimizer.step()
        run.optimizer.zero_grad()


def two_forwards_before_backward(run):
    for _ in range(2):
        loss = run.model(run.tokens).float().sum() + run.model(run.tokens).float().sum()
        loss.backward()
        run.optimizer.step()
        run.optimizer.zero_grad()


def unshard_by_hand(run):
    for _ in range(2):
        handle = run.model.blocks[1].unshard(async_op=True)
        handle.wait()
        torch.nn.utils.parameters_to_vector(run.model.blocks[1].parameters())
        run.model.blocks[1].reshard()
        run.model.blocks[0].unshard()
        run.step()


def lists_of_two(run):
    units = list(run.model.units().values())
    for index, unit in enumerate(units):
        unit.set_modules_to_forward_prefetch(units[index + 1 : index + 3])
        unit.set_modules_to_backward_prefetch(units[max(0, index - 2) : index][::-1])
    steps(run)


def released_buffers(run):
    for _ in range(2):
        run.step()
        run.model.release_buffers()


def switched_resharding(run):
    for value in (True, False, True):
        run.model.set_reshard_after_forward(value)
        run.step()


def checkpointed_blocks(run):
    for index, block in enumerate(run.model.blocks):
        run.model.blocks[index] = checkpoint_wrapper(block, preserve_rng_state=False)
    steps(run)


def optimizer_on_another_stream(run):
    side = Stream()
    for _ in range(3):
        run.forward_backward()
        side.wait_stream(default_stream())
        with on_stream(side):
            run.optimizer.step()
            done = Event()
            done.record(side)
        run.model.set_post_optim_event(done)
        default_stream().wait_event(done)
        run.optimizer.zero_grad()


@contextmanager
def small_stagings(limit=1024):
    """Make every unit of the small model too large to be reduced whole."""
    before = reducer.MAX_STAGING_BYTES
    reducer.MAX_STAGING_BYTES = limit
    try:
        yield
    finally:
        reducer.MAX_STAGING_BYTES = before


SAME_DTYPE = {"param_dtype": torch.bfloat16}  # and so is the reduction, but not the sharded parameters
FP16 = {"param_dtype": torch.float16, "reduce_dtype": torch.float16}
SCENARIOS = {
    "fp32": (steps, {}),
    "bf16": (steps, {"policy": BF16}),
    "bf16 reduced in bf16": (steps, {"policy": SAME_DTYPE}),
    "fp16 scaled on both sides": (steps, {"policy": FP16}),
    "nothing kept": (steps, {"kept": ()}),
    "everything kept": (steps, {"kept": tuple(UNITS)}),
    "reduced micro-batches": (reduced_micro_batches, {"policy": BF16}),
    "unreduced micro-batches": (unreduced_micro_batches, {"policy": BF16}),
    "replicas": (steps, {"policy": BF16, "mesh_shape": (2, 4)}),
    "replicas, micro-batches": (micro_batches_between_replicas, {"policy": BF16, "mesh_shape": (2, 4)}),
    "evaluation between steps": (evaluation_between_steps, {"policy": BF16}),
    "recorded backwards": (recorded_backwards, {"policy": BF16, "kept": ()}),
    "clipping": (clipped_steps, {}),
    "two forwards": (two_forwards_before_backward, {"kept": ()}),
    "unshard by hand": (unshard_by_hand, {"policy": BF16}),
    "prefetch lists": (lists_of_two, {"policy": BF16}),
    "released buffers": (released_buffers, {"policy": BF16}),
    "switched resharding": (switched_resharding, {"policy": BF16}),
    "activation checkpointing": (checkpointed_blocks, {"policy": BF16}),
    "frozen parameters": (steps, {"policy": BF16, "frozen": True}),
    "optimizer on another stream": (optimizer_on_another_stream, {"policy": BF16}),
}


def check_no_race(name, in_pieces):
    scenario, options = SCENARIOS[name]
    with small_stagings(1024 if in_pieces else reducer.MAX_STAGING_BYTES), sharded(NAME, **options) as run:
        with run.watched() as timeline:
            scenario(run)
        assert len(timeline.of(GATHER)) >= 2 * len(UNITS)
        assert len(timeline.of(REDUCE)) >= (4 if in_pieces else 2) * len(UNITS)
        races = timeline.races()
        assert not races, f"{len(races)} races, among them:\n" + "\n".join(races[:8])


@pytest.mark.parametrize("name", list(SCENARIOS))
def test_streams_do_not_race(in_helper, name):
    in_helper(check_no_race, name, False)


@pytest.mark.parametrize(
    "name", ["bf16", "bf16 reduced in bf16", "fp16 scaled on both sides", "reduced micro-batches", "replicas"]
)
def test_streams_do_not_race_where_buckets_are_reduced_in_pieces(in_helper, name):
    in_helper(check_no_race, name, True)


# ---- the check itself ------------------------------------------------------------------------------------------------


def check_finds(breach):
    """Two streams, one breach of order; the same with the breach mended has none."""
    for is_broken in (True, False):
        side, compute, timeline = Stream(), default_stream(), Timeline()
        with FakeTensorMode(), timeline:
            tensor = torch.empty(8, device=NAME)
            if not (is_broken and breach == "unordered write"):
                tensor.zero_()
            if not (is_broken and breach == "allocation"):
                side.wait_stream(compute)
            if is_broken and breach == "unordered write":
                tensor.zero_()
            with on_stream(side):
                tensor.add_(1)
            if not (is_broken and breach in ("early free", "unordered read")):
                compute.wait_stream(side)
            if breach != "early free":
                tensor.sum()
                compute.wait_stream(side)
            del tensor
            torch.empty(8, device=NAME).zero_()
        assert bool(timeline.races()) == is_broken, f"{breach}: {timeline.races()}"


@pytest.mark.parametrize("breach", ["allocation", "unordered write", "unordered read", "early free"])
def test_the_check_finds_a_breach_of_order(in_helper, breach):
    in_helper(check_finds, breach)


def check_resized():
    """Memory that a storage gives back and takes again is not the same memory."""
    side, timeline = Stream(), Timeline()
    with FakeTensorMode(), timeline:
        tensor = torch.zeros(8, device=NAME)
        side.wait_stream(default_stream())
        with on_stream(side):
            tensor.add_(1)
        tensor.untyped_storage().resize_(0)
        tensor.untyped_storage().resize_(32)
        tensor.zero_()
        assert [memory.nbytes for memory in timeline.memories] == [32, 32]
        assert len(timeline.races()) == 1, timeline.races()
        assert "freed" in timeline.races()[0]


def test_the_check_sees_a_storage_give_its_memory_back(in_helper):
    in_helper(check_resized)
