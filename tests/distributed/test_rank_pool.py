"""The pool that runs the other distributed tests: it must report a fault with its rank, and never leave a process."""

import os
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from tests.support.pool import MAX_RANKS, JobFailedError, RankPools

REPOSITORY = Path(__file__).resolve().parents[2]


def add_ranks(offset):
    total = torch.tensor(float(dist.get_rank() + offset))
    dist.all_reduce(total)
    return dist.get_rank(), total.item(), os.getpid()


def hang_on(rank):
    if dist.get_rank() != rank:
        dist.barrier()
    else:
        time.sleep(600)


def raise_on(rank):
    if dist.get_rank() == rank:
        raise RuntimeError("a fault of this rank only")
    dist.barrier()


def crash_on(rank):
    if dist.get_rank() == rank:
        os._exit(7)
    dist.barrier()


def is_alive(pid):
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"


def wait_until_gone(pids, seconds=10):
    deadline = time.monotonic() + seconds
    while any(map(is_alive, pids)) and time.monotonic() < deadline:
        time.sleep(0.05)
    return [pid for pid in pids if is_alive(pid)]


def test_processes_are_kept_between_jobs(on_ranks):
    first, second = on_ranks(2, add_ranks, 1), on_ranks(2, add_ranks, 2)
    assert [row[:2] for row in first] == [(0, 3.0), (1, 3.0)]
    assert [row[:2] for row in second] == [(0, 5.0), (1, 5.0)]
    assert [row[2] for row in first] == [row[2] for row in second]


def test_faults_name_the_rank_and_the_next_job_works():
    pools = RankPools()
    try:
        pids = [row[2] for row in pools.run(2, add_ranks, 1)]
        with pytest.raises(JobFailedError, match=r"did not finish within 1 s") as caught:
            pools.run(2, hang_on, 1, limit=1.0)
        message = str(caught.value)
        assert "rank 0: still running" in message
        assert "rank 1: still running" in message
        assert "in hang_on" in message
        assert "barrier" in message
        assert not wait_until_gone(pids)

        with pytest.raises(JobFailedError, match=r"rank 1 failed") as caught:
            pools.run(2, raise_on, 1)
        assert "a fault of this rank only" in str(caught.value)

        with pytest.raises(JobFailedError, match=r"rank 0 failed") as caught:
            pools.run(2, crash_on, 0)
        assert "exit code 7" in str(caught.value)

        assert [row[1] for row in pools.run(2, add_ranks, 1)] == [3.0, 3.0]
    finally:
        pools.close()


def test_number_of_ranks_alive_is_bounded():
    pools = RankPools()
    try:
        pids = []
        for world_size in (2, 1, MAX_RANKS):
            pids += [row[2] for row in pools.run(world_size, add_ranks, 0)]
        assert not wait_until_gone(pids[:3])
        assert all(map(is_alive, pids[3:]))
    finally:
        pools.close()
    assert not wait_until_gone(pids)


def test_ranks_end_when_the_parent_is_killed(tmp_path):
    script = """
        from tests.distributed.test_rank_pool import add_ranks, hang_on
        from tests.support.pool import RankPools
        if __name__ == "__main__":
            pools = RankPools()
            print(*[row[2] for row in pools.run(2, add_ranks, 0)], flush=True)
            pools.run(2, hang_on, 0)
    """
    process = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(script)],
        cwd=REPOSITORY,
        env={**os.environ, "TMPDIR": str(tmp_path)},  # a killed parent cannot clean up after itself
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        pids = [int(word) for word in process.stdout.readline().split()]
        assert len(pids) == 2
        time.sleep(0.2)  # let the ranks enter the job that hangs
    finally:
        process.kill()
        process.wait()
        process.stdout.close()
    assert not wait_until_gone(pids)
