"""A save that is killed, or that cannot write, leaves older checkpoints as they were, and nobody takes it for one."""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.checkpoint.runs import FULL, LOCAL, SHARDED

OnRanks = Callable[..., list[Any]]
ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize(("form", "rounds"), [(SHARDED, 30), (FULL, 15), (LOCAL, 15)])
def test_after_a_kill_at_a_random_moment_the_newest_complete_checkpoint_is_what_was_saved(
    form: str, rounds: int, tmp_path: Path
) -> None:
    command = [sys.executable, "-m", "tests.checkpoint.kill_main", str(tmp_path), str(rounds), form]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=170)
    assert done.returncode == 0, done.stderr[-3000:]
    found = [json.loads(line) for line in done.stdout.splitlines()]
    assert len(found) == rounds
    killed = 0
    for facts in found:
        assert facts["loaded"] == [0, 0], facts
        assert facts["incomplete"] == [], f"half a checkpoint has a checkpoint's name: {facts}"
        assert facts["newest"] in (facts["before"], facts["round"]), facts
        assert None not in facts["statuses"], f"the surviving rank hung: {facts}"
        if facts["undisturbed"]:
            assert facts["statuses"] == [0, 0], facts
            assert facts["newest"] == facts["round"], facts
        killed += 9 in facts["statuses"]
    assert killed >= rounds // 4, "hardly any kill came before the end of its save"
