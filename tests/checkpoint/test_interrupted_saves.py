"""A save that is killed, or that cannot write, leaves older checkpoints as they were, and nobody takes it for one."""

import errno
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.checkpoint.kill_main import FULL_DISK
from tests.checkpoint.runs import (
    FULL,
    LOCAL,
    SHARDED,
    assert_equal,
    contents,
    forms_by_step,
    launched,
    model_of,
    trainer_of,
    watcher,
)
from tests.huggingface.test_launch import launch

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
        if facts["round"] == FULL_DISK:
            assert facts["statuses"] == [256, 256], f"all ranks leave with an error: {facts}"
            assert facts["newest"] == facts["before"]
        killed += 9 in facts["statuses"]
    assert done.stderr.count(f"checkpoint-{FULL_DISK} failed on rank") == 2, done.stderr[-3000:]
    assert done.stderr.count("File too large") >= 2, "the system's own words"
    assert killed >= rounds // 4, "hardly any kill came before the end of its save"


def _no_space(folder: str, form: str) -> None:
    kept: list[Any] = []
    with launched(form):
        callbacks = [forms_by_step({2: form, 4: form}), watcher(on_step_end=lambda t: _break_disk(t, kept))]
        trainer = trainer_of(model_of("llama"), folder, callbacks=callbacks, max_steps=6, save_total_limit=1)
        callbacks[1].trainer = trainer
        write = torch.save
        try:
            with pytest.raises(
                RuntimeError, match=r"rank \d: saving .*checkpoint-4 failed .*on rank 1: OSError: .*No space"
            ):
                trainer.train()
        finally:
            torch.save = write
    dist.barrier()  # rank 0 removes what was written
    assert sorted(path.name for path in Path(folder).iterdir()) == ["checkpoint-2"], "older ones stay, no half stays"
    with launched(form):
        loaded: list[Any] = []
        callbacks = [watcher(on_train_begin=lambda t: loaded.append(contents(t)))]
        again = trainer_of(model_of("llama", seed=5), folder, callbacks=callbacks, max_steps=3)
        callbacks[0].trainer = again
        again.train(resume_from_checkpoint=True)
        assert_equal(loaded[0], kept[0], "resumed from the older one")


def _break_disk(trainer: Any, kept: list[Any]) -> None:
    if trainer.state.global_step == 2:
        kept.append(contents(trainer))
    if trainer.state.global_step == 4 and dist.get_rank() == 1:

        def no_space(*_: Any, **__: Any) -> None:
            raise OSError(errno.ENOSPC, "No space left on device")

        torch.save = no_space


@pytest.mark.parametrize("form", [SHARDED, LOCAL])
def test_a_rank_without_space_ends_the_trainers_save_on_all_ranks_and_a_restart_takes_the_older_one(
    on_ranks: OnRanks, form: str, tmp_path: Path
) -> None:
    on_ranks(2, _no_space, str(tmp_path), form)


def _damaged(folder: str, form: str) -> None:
    from transformers import trainer_utils

    rank = dist.get_rank()
    with launched(form):
        trainer = trainer_of(model_of("llama"), folder, max_steps=4, save_steps=2)
        trainer.train()
        dist.barrier()
        newest, older = Path(folder, "checkpoint-4"), str(Path(folder, "checkpoint-2"))
        assert trainer_utils.get_last_checkpoint(folder) == str(newest)
        dist.barrier()
        if rank == 0:
            (victim,) = newest.glob("optimizer*/*0*") if form != FULL else newest.glob("optimizer.bin")
            with victim.open("r+b") as file:
                file.truncate(victim.stat().st_size - 1)
        dist.barrier()
        assert trainer_utils.get_last_checkpoint(folder) == older
        again = trainer_of(model_of("llama"), folder, max_steps=4)
        message = (
            rf"rank {rank}: resuming from .* failed on rank 0: .*checkpoint-4 is not a complete checkpoint: optimizer"
        )
        with pytest.raises(RuntimeError, match=message):
            again.train(resume_from_checkpoint=str(newest))
        dist.barrier()
        if rank == 0:
            Path(folder, "checkpoint-4").rename(Path(folder, "aside"))
            Path(folder, "checkpoint-9").mkdir()
        dist.barrier()
        assert trainer_utils.get_last_checkpoint(folder) == older, "a folder without state is no checkpoint"


@pytest.mark.parametrize("form", [FULL, LOCAL])
def test_a_damaged_checkpoint_is_passed_over_and_refused_by_name(on_ranks: OnRanks, form: str, tmp_path: Path) -> None:
    on_ranks(2, _damaged, str(tmp_path), form)


def _states(folder: str) -> None:
    from accelerate import Accelerator
    from accelerate.utils import ProjectConfiguration

    with launched(SHARDED):
        configuration = ProjectConfiguration(folder, automatic_checkpoint_naming=True, total_limit=2)
        accelerator = Accelerator(project_config=configuration)
        model = model_of("llama")
        model, _ = accelerator.prepare(model, torch.optim.AdamW(model.parameters()))
        weight = model.lm_head.weight
        for step in range(4):
            weight.to_local().detach().fill_(step)
            saved = accelerator.save_state()
        dist.barrier()
        assert saved == Path(folder, "checkpoints", "checkpoint_3")
        assert sorted(path.name for path in saved.parent.iterdir()) == ["checkpoint_2", "checkpoint_3"]
        accelerator.load_state()
        assert (weight.to_local() == 3).all()
        dist.barrier()
        if dist.get_rank() == 0:
            (saved / "ya_fsdp_unfinished.json").touch()
        dist.barrier()
        accelerator.load_state()
        assert (weight.to_local() == 2).all(), "the newest complete one"
        with pytest.raises(RuntimeError, match="checkpoint_3 is not a complete checkpoint: its save was interrupted"):
            accelerator.load_state(str(saved))
        # One name, used again and again, in a folder that holds other things too.
        configuration.automatic_checkpoint_naming = False
        latest = Path(folder, "latest")
        if dist.get_rank() == 0:
            latest.mkdir()
            (latest / "notes.txt").write_text("mine")
        dist.barrier()
        for step in (7, 8):
            weight.to_local().detach().fill_(step)
            accelerator.save_state(str(latest))
        assert (latest / "notes.txt").read_text() == "mine"
        weight.to_local().detach().fill_(0)
        accelerator.load_state(str(latest))
        assert (weight.to_local() == 8).all()


def test_numbered_and_repeated_states_replace_each_other_only_when_whole(on_ranks: OnRanks, tmp_path: Path) -> None:
    on_ranks(2, _states, str(tmp_path))


@pytest.mark.slow
def test_a_launched_job_that_loses_a_rank_while_it_saves_goes_on_from_the_older_checkpoint(tmp_path: Path) -> None:
    script = Path(__file__).parent / "scripts/preempted.py"
    words = ["--num_processes", "2", "--fsdp_ya_fsdp_enabled", "true", "--fsdp_state_dict_type", SHARDED, script]
    lost = launch(*words, tmp_path, "killed")
    assert lost.returncode != 0
    assert "RAN" not in lost.stdout
    assert {path.name for path in tmp_path.glob("checkpoint-*")} == {"checkpoint-2"}
    assert "SIGKILL" in lost.stderr
    resumed = launch(*words, tmp_path, "undisturbed")
    assert resumed.returncode == 0, resumed.stdout + resumed.stderr
    assert "RAN 3 TO 6" in resumed.stdout
    assert {path.name for path in tmp_path.iterdir()} == {"checkpoint-6"}, "and what the lost save left behind is gone"
