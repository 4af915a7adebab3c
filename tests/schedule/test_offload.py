"""Shards in host memory: what the host reads and writes is ordered against copies of the accelerator."""

import torch

from tests.schedule.fake_accelerator import HOST, NAME
from tests.schedule.scenarios import BF16, UNITS, sharded
from tests.schedule.timeline import GATHER, REDUCE
from ya_fsdp import CPUOffloadPolicy


def check_host_waits(policy):
    offload = CPUOffloadPolicy(pin_memory=False)
    with sharded(NAME, policy=policy, offload=offload) as run, run.watched() as timeline:
        places = {parameter.device.type for parameter in run.model.parameters()}
        assert places == {"cpu"}, places
        for step in range(3):
            before, waits = len(timeline.ops), HOST.num_waits
            run.forward_backward()
            assert HOST.num_waits == waits + 1, "the host waits once, at the end of the backward"
            for parameter in run.model.parameters():
                assert parameter.grad is not None
                assert parameter.grad.device.type == "cpu"
                assert parameter.grad.dtype == torch.float32
            copies = [op for op in timeline.ops[before:] if op.name in (GATHER, REDUCE, "copy_")]
            assert len(copies) > 4 * len(UNITS)
            for op in copies:
                seen = HOST.clock.get(op.stream, 0) >= op.clock[op.stream]
                assert seen, f"step {step}: the optimizer on the host need not come behind {op}"
            gathers = [op for op in timeline.ops[before:] if op.name == GATHER]
            assert len(gathers) == 2 * len(UNITS) - 2, "all twice but the kept head and the embedding"
            run.optimizer.step()
            run.optimizer.zero_grad()
        assert timeline.races() == []


def test_host_steps_behind_all_copies_and_waits_once(in_helper):
    in_helper(check_host_waits, BF16)


def test_host_steps_behind_all_copies_without_casts(in_helper):
    in_helper(check_host_waits, {})


def check_accumulation():
    """A second backward adds to gradients in host memory, which the host may do only behind the copy."""
    with sharded(NAME, policy=BF16, offload=CPUOffloadPolicy(pin_memory=False)) as run, run.watched() as timeline:
        run.forward_backward()
        run.forward_backward()
        assert timeline.races() == []
        assert all(parameter.grad.device.type == "cpu" for parameter in run.model.parameters())


def test_gradients_in_host_memory_are_added_up(in_helper):
    in_helper(check_accumulation)
