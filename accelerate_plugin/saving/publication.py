"""A save as a whole: all ranks write aside, agree that everything was written, and one of them publishes it."""

import contextlib
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch.distributed as dist

from accelerate_plugin.saving import folder
from accelerate_plugin.saving.ranks import agree

__all__ = ["Publication", "active", "publication", "writing"]

_active: list["Publication"] = []


@dataclass
class Publication:
    """A save that is going on.

    Attributes:
        final: the name that the checkpoint will have.
        aside: where it is written.
        publishes: this rank makes the folder and publishes it: rank 0, and one rank of each host that does not see
            rank 0's disk.
        problems: what went wrong on this rank so far.
        afterwards: what is to be done once the checkpoint has its name.
    """

    final: Path
    aside: Path
    publishes: bool = False
    problems: list[Exception] = field(default_factory=list)
    afterwards: list[Callable[[str], Any]] = field(default_factory=list)

    @contextlib.contextmanager
    def deferring(self) -> Iterator[None]:
        """Keeps an error for the end: a rank that cannot write still takes part in what the others wait for."""
        try:
            yield
        except Exception as error:
            self.problems.append(error)


def active() -> Publication | None:
    """The save that is going on in this process."""
    return _active[-1] if _active else None


@contextlib.contextmanager
def publication(
    final: str | os.PathLike[str],
    *,
    place: str | os.PathLike[str] | None = None,
    left_over: str | None = None,
    is_folder: bool = True,
    facts: dict[str, object] | None = None,
) -> Iterator[Publication]:
    """Writes a checkpoint safely: the block writes to ``aside``, which gets its name afterwards. A collective.

    Args:
        final: the checkpoint's folder, or its file.
        place: where to write meanwhile; see :func:`folder.aside_of`.
        left_over: pattern of names whose interrupted saves are removed; ``final``'s by default.
        is_folder: otherwise the block writes one file into ``aside``.
        facts: what the completeness marker says.

    Raises:
        CheckpointError: on every rank, where anything failed on any of them; what was there before is untouched.
    """
    path = Path(os.path.abspath(final))
    saving = Publication(path, folder.aside_of(path, None if place is None else Path(os.path.abspath(place))))
    doing = f"saving {path}"
    _begin(saving, doing, left_over)
    _active.append(saving)
    try:
        with saving.deferring():
            yield saving
    finally:
        _active.pop()
    problem = saving.problems[0] if saving.problems else None
    try:
        agree(problem, doing)
        with saving.deferring():
            if saving.publishes:
                folder.publish(saving.aside, path, facts or {}, is_folder=is_folder)
        agree(saving.problems[0] if saving.problems else None, doing)
    except Exception:
        if saving.publishes:
            folder.remove_aside(saving.aside)
        raise


def _begin(saving: Publication, doing: str, left_over: str | None) -> None:
    rank = dist.get_rank() if dist.is_initialized() else 0
    saving.publishes = rank == 0
    with saving.deferring():
        if rank == 0:
            folder.make_aside(saving.aside, left_over)
    agree(saving.problems[0] if saving.problems else None, doing)
    if rank != 0 and int(os.environ.get("LOCAL_RANK", rank)) == 0 and not saving.aside.is_dir():
        saving.publishes = True
        with saving.deferring():
            folder.make_aside(saving.aside, left_over)
    agree(saving.problems[0] if saving.problems else None, doing)


@contextlib.contextmanager
def writing(final: Path, *, is_folder: bool) -> Iterator[tuple[Publication, Path]]:
    """Where one part of a checkpoint is written: inside the save that is going on, or else in a save of its own.

    Args:
        final: the part's folder or file, under the name that the caller asked for.
        is_folder: what it is.

    Yields:
        The save, and the path to write to.
    """
    saving = active()
    if saving is not None and final.parent.resolve() == saving.aside.resolve():
        yield saving, final
        return
    with publication(final, is_folder=is_folder) as own:
        yield own, own.aside if is_folder else own.aside / final.name
