"""Other backends keep streams in order: collectives in two stages, and gather buffers that a backend owns."""

import pytest
import torch

from tests.schedule.fake_accelerator import NAME
from tests.schedule.scenarios import BF16, UNITS, sharded
from tests.schedule.timeline import GATHER, REDUCE
from ya_fsdp import HierarchicalBackend
from ya_fsdp.comm import ProcessGroupCollectives


class OwnedMemory(ProcessGroupCollectives):
    """Collectives that want gathers to land in memory of their own."""

    allocated = 0

    def allocate(self, nbytes, device):
        self.allocated += 1
        return torch.empty(nbytes, dtype=torch.uint8, device=device)


class OwningBackend:
    def __init__(self):
        self.made = None

    def collectives(self, group):
        if self.made is None:
            self.made = OwnedMemory(group)
        return self.made


def run_steps(options, backend, kept):
    """Return the timeline of three steps, and the gather buffers that are freed then, after a look at races."""
    with sharded(NAME, policy=options, kept=kept, backend=backend) as run:
        with run.watched() as timeline:
            run.step()
            run.step()
            with torch.no_grad():
                run.model(run.tokens)
            run.model.release_buffers()
            run.step()
        freed = [memory for memory in timeline.memories if memory.written_by(GATHER) and memory.freed is not None]
        races = timeline.races()
        assert not races, f"{len(races)} races, among them:\n" + "\n".join(races[:8])
        return timeline, freed


def check_two_stages(colors, policy, kept):
    timeline, _ = run_steps(policy, HierarchicalBackend(colors), kept)
    num_units = len(UNITS)
    # A gather is one collective between the nodes and one for each node inside of them; so is a reduction.
    num_nodes = 2
    # Three steps and an evaluation; the embedding is not gathered for its backward.
    gathers = 4 * num_units if kept else 7 * (num_units - 1) + 4
    assert len(timeline.of(GATHER)) == gathers * (1 + num_nodes)
    wide = policy.get("bit32_acc_for_bit16_reduce_scatter", False)
    assert len(timeline.of(REDUCE)) == 3 * num_units * (1 if wide else 1 + num_nodes)


@pytest.mark.parametrize("colors", ["rank // 4, rank % 4", "rank % 2, rank // 2"])
@pytest.mark.parametrize(
    "policy",
    [BF16, {"param_dtype": torch.bfloat16, "bit32_acc_for_bit16_reduce_scatter": True}],
    ids=["fp32 reduction", "bf16 sent, fp32 sums"],
)
def test_two_stages_do_not_race(in_helper, colors, policy):
    in_helper(check_two_stages, colors, policy, ())
    in_helper(check_two_stages, colors, policy, tuple(UNITS))


def check_owned_memory(kept):
    backend = OwningBackend()
    timeline, freed = run_steps(BF16, backend, kept)
    # Embedding and head have buffers of their own, four blocks share two unless they are kept.
    assert backend.made.allocated == (len(UNITS) if kept else 4)
    assert len([memory for memory in timeline.memories if memory.written_by(GATHER)]) == backend.made.allocated
    assert not freed, f"memory of the backend was given back: {freed}"


def test_memory_that_a_backend_owns_is_kept_and_entered_in_order(in_helper):
    in_helper(check_owned_memory, ())
    in_helper(check_owned_memory, tuple(UNITS))
