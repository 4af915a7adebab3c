"""Checkpoint folders on the disk: written aside, made durable, marked complete, and published by a rename.

A checkpoint ``run/checkpoint-4`` is written as ``run/.saving-checkpoint-4/checkpoint-4``. The name in front keeps it
away from everything that looks for checkpoints; the name at the end is the final one, so that what is written meanwhile
may look at it. Standard library only.
"""

import contextlib
import ctypes
import fnmatch
import json
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

__all__ = [
    "MARKER",
    "UNFINISHED",
    "IncompleteCheckpointError",
    "aside_of",
    "check_complete",
    "make_aside",
    "publish",
    "remove_aside",
    "sync",
    "why_incomplete",
]

MARKER = "ya_fsdp_complete.json"
"""Written last: which files the checkpoint has, and how long each one is."""
UNFINISHED = "ya_fsdp_unfinished.json"
"""Written first, and removed once the marker is there."""

_ASIDE = ".saving-"
_AT_FDCWD, _RENAME_EXCHANGE = -100, 2

# What accelerate, the Trainer and this package call the parts of a checkpoint. Other files in a folder that is written
# again belong to somebody else and are kept.
_PARTS = (
    "pytorch_model*",
    "model*.safetensors*",
    "adapter_*",
    "optimizer*",
    "scheduler*",
    "sampler*",
    "scaler*",
    "random_states_*",
    "rng_state*",
    "custom_checkpoint_*",
    "dl_state_dict*",
    "trainer_state.json",
    "training_args.bin",
    "*.distcp",
    ".metadata",
    "rank_*_of_*.bin",
    MARKER,
    UNFINISHED,
)


class IncompleteCheckpointError(RuntimeError):
    """A folder holds only part of a checkpoint."""


def aside_of(final: Path, place: Path | None = None) -> Path:
    """Where a checkpoint is written before it gets its name.

    Args:
        final: the checkpoint's folder (or file).
        place: the folder to write in, on the same file system; the one that ``final`` is in by default.
    """
    return (place if place is not None else final.parent) / f"{_ASIDE}{final.name}" / final.name


def make_aside(aside: Path, left_over: str | None = None) -> None:
    """Makes the folder, empty, and says in it that it is not finished.

    Args:
        aside: what :func:`aside_of` gave.
        left_over: remove what earlier, interrupted saves of names of this pattern left behind.
    """
    place = aside.parent.parent
    place.mkdir(parents=True, exist_ok=True)
    for old in place.glob(f"{_ASIDE}{left_over}" if left_over else aside.parent.name):
        shutil.rmtree(old, ignore_errors=True)
    aside.mkdir(parents=True)
    _write_json(aside / UNFINISHED, {"meaning": "this checkpoint is being written, or its save was interrupted"})


def remove_aside(aside: Path) -> None:
    """Gives the space of a failed save back, as far as that is possible."""
    shutil.rmtree(aside.parent, ignore_errors=True)


def sync(path: Path) -> None:
    """Waits until a file, or the list of names in a folder, is on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def publish(aside: Path, final: Path, facts: dict[str, object], *, is_folder: bool = True) -> None:
    """Makes what was written durable and gives it its name, in one step: there is never a half of it under that name.

    Args:
        aside: the finished folder, or the folder of the finished file.
        final: its name. What is there already is replaced; files in it that belong to nobody's checkpoint are kept.
        facts: what the marker says beside the list of files.
        is_folder: otherwise ``aside`` holds one file, of the final name, which is moved out of it.
    """
    final.parent.mkdir(parents=True, exist_ok=True)
    if not is_folder:
        sync(aside / final.name)
        os.replace(aside / final.name, final)
        sync(final.parent)
        remove_aside(aside)
        return
    files = {}
    for folder, _, names in os.walk(aside):
        for name in names:
            path = Path(folder, name)
            if name != UNFINISHED:
                sync(path)
                files[path.relative_to(aside).as_posix()] = path.stat().st_size
        sync(Path(folder))
    _keep_foreign(final, aside)
    _write_json(aside / MARKER, {**facts, "files": files})
    (aside / UNFINISHED).unlink()
    sync(aside)
    if final.is_dir() and any(final.iterdir()):
        _exchange(aside, final)
    else:
        os.rename(aside, final)
    sync(final.parent)
    remove_aside(aside)


def _write_json(path: Path, value: object) -> None:
    unfinished = path.with_name(path.name + ".part")
    with unfinished.open("w", encoding="utf-8") as file:
        json.dump(value, file, indent=1)
        file.flush()
        os.fsync(file.fileno())
    os.replace(unfinished, path)


def _keep_foreign(final: Path, aside: Path) -> None:
    """Brings along what somebody else put into the folder that is about to be replaced."""
    if not final.is_dir():
        return
    own = {name.partition("/")[0] for name in _marked_files(final) or ()}
    for path in final.iterdir():
        if path.name in own or (aside / path.name).exists() or any(fnmatch.fnmatch(path.name, p) for p in _PARTS):
            continue
        if path.is_dir():
            shutil.copytree(path, aside / path.name, copy_function=_link)
        else:
            _link(str(path), str(aside / path.name))


def _link(source: str, target: str) -> None:
    try:
        os.link(source, target)
    except OSError:
        shutil.copy2(source, target)


def _exchange(one: Path, other: Path) -> None:
    """Lets two folders swap their names, at once where the system can do that."""
    rename = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)
    names = os.fsencode(one), os.fsencode(other)
    if rename is not None and rename(_AT_FDCWD, names[0], _AT_FDCWD, names[1], _RENAME_EXCHANGE) == 0:
        return
    # Network file systems. Between the two renames both checkpoints are complete, and one has another name.
    spare = one.with_name(one.name + ".replaced")
    os.rename(other, spare)
    os.rename(one, other)
    os.rename(spare, one)


def _marked_files(folder: Path) -> dict[str, int] | None:
    with contextlib.suppress(OSError, ValueError):
        marked = json.loads((folder / MARKER).read_text(encoding="utf-8"))["files"]
        return {str(name): int(size) for name, size in marked.items()}
    return None


def why_incomplete(folder: Path) -> str | None:
    """What is missing in a checkpoint; None where it is complete, or where nothing says what it should have.

    Checkpoints of other programs have no marker; of those only an unfinished sharded part can be told.
    """
    if (folder / UNFINISHED).exists():
        return "its save was interrupted, or is still going on"
    marked = _marked_files(folder)
    if marked is None and (folder / MARKER).exists():
        return f"{MARKER} cannot be read"
    for name, size in (marked or {}).items():
        path = folder / name
        if not path.exists():
            return f"{name} is missing"
        if path.stat().st_size != size:
            return f"{name} has {path.stat().st_size} bytes instead of {size}"
    for part in _sharded_parts(folder) if marked is None else ():
        if not (part / ".metadata").exists():
            return f"{part.name} has no .metadata, which is written last"
    return None


def _sharded_parts(folder: Path) -> Iterator[Path]:
    for pattern in ("pytorch_model_fsdp_[0-9]", "optimizer_[0-9]"):
        yield from (path for path in folder.glob(pattern) if path.is_dir())


def check_complete(folder: Path) -> None:
    """Refuses a folder that holds only part of a checkpoint.

    Raises:
        IncompleteCheckpointError: naming the folder and what is missing.
    """
    reason = why_incomplete(folder)
    if reason is not None:
        raise IncompleteCheckpointError(
            f"{folder} is not a complete checkpoint: {reason}; nothing was loaded. Remove the folder and resume "
            "from an older one"
        )
