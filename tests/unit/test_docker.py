"""The container's build: the script checks its arguments and docker, and the image is made of files that exist."""

import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = ROOT / "docker" / "build.sh"

#: Stands for docker: notes each call, and answers as a daemon that is there, or not.
FAKE = """#!/bin/sh
echo "$PWD: $*" >> "{log}"
[ "$1" != info ] || exit {answer}
"""


@pytest.fixture
def tools(tmp_path: Path) -> Path:
    """A folder to be the whole PATH, with what the script needs besides docker."""
    folder = tmp_path / "bin"
    folder.mkdir()
    for name in ("bash", "cat", "dirname"):
        found = shutil.which(name)
        assert found is not None
        (folder / name).symlink_to(found)
    return folder


def install_docker(tools: Path, *, answers: bool = True) -> Path:
    log = tools.parent / "calls"
    docker = tools / "docker"
    docker.write_text(FAKE.format(log=log, answer=0 if answers else 1))
    docker.chmod(0o755)
    return log


def build(tools: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [str(tools / "bash"), str(SCRIPT), *arguments],
        env={"PATH": str(tools)},
        cwd=tools.parent,
        capture_output=True,
        text=True,
        timeout=30,
        check=False,
    )


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ([], "--tag ya-fsdp:latest"),
        (["--tag", "me/ya-fsdp:1.0"], "--tag me/ya-fsdp:1.0"),
        (
            ["--base", "nvcr.io/nvidia/pytorch:26.04-py3", "--tag", "x"],
            "--tag x --build-arg BASE_IMAGE=nvcr.io/nvidia/pytorch:26.04-py3",
        ),
    ],
)
def test_the_script_builds_from_the_repository_wherever_it_is_called(
    tools: Path, arguments: list[str], expected: str
) -> None:
    log = install_docker(tools)
    done = build(tools, *arguments)
    assert done.returncode == 0, done.stderr
    assert log.read_text().splitlines()[-1] == f"{ROOT}: build --file docker/Dockerfile {expected} ."


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (["--tags", "x"], "unknown argument '--tags'"),
        (["x"], "unknown argument 'x'"),
        (["--tag"], "--tag needs a value"),
        (["--tag", ""], "--tag: '' is not the name of an image"),
        (["--base", "--tag"], "--base: '--tag' is not the name of an image"),
        (["--tag", "a b"], "--tag: 'a b' is not the name of an image"),
        (["--tag", "x;reboot"], "--tag: 'x;reboot' is not the name of an image"),
    ],
)
def test_wrong_arguments_are_refused_before_docker_is_asked(tools: Path, arguments: list[str], reason: str) -> None:
    log = install_docker(tools)
    done = build(tools, *arguments)
    assert done.returncode == 2
    assert reason in done.stderr
    assert "Usage: docker/build.sh" in done.stderr
    assert not log.exists()


def test_a_missing_docker_and_a_silent_daemon_are_told_apart(tools: Path) -> None:
    done = build(tools)
    assert (done.returncode, done.stdout) == (1, "")
    assert "docker is not installed" in done.stderr
    log = install_docker(tools, answers=False)
    done = build(tools)
    assert done.returncode == 1
    assert "docker does not answer" in done.stderr
    assert "build --file" not in log.read_text()


def test_help_is_shown_without_docker(tools: Path) -> None:
    done = build(tools, "--help")
    assert done.returncode == 0
    assert set(re.findall(r"--[a-z]+", done.stdout)) == {"--tag", "--base", "--help"}


def test_the_image_copies_all_that_the_package_is_built_from() -> None:
    lines = (ROOT / "docker" / "Dockerfile").read_text().splitlines()
    copied = [name for line in lines if line.startswith("COPY ") for name in line.split()[1:-1]]
    assert [name for name in copied if not (ROOT / name).exists()] == []
    assert {"pyproject.toml", "README.md", "LICENSE", "build_support", "ya_fsdp", "accelerate_plugin"} <= set(copied)
    assert os.access(SCRIPT, os.X_OK)
