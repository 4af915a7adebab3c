"""How ranks agree that something worked everywhere, so that all of them leave where it failed on one."""

import datetime
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

__all__ = ["CheckpointError", "agree", "describe", "on_rank_zero", "root_of"]

# A rank that has failed waits so long for the others to hear of it. One that has not waits as long as the others write.
_PATIENCE = datetime.timedelta(seconds=30)
_WRITING = datetime.timedelta(hours=2)
# A rank that died before the group was there must not be waited for as long as one that writes.
CONNECTING = datetime.timedelta(seconds=60)

_side_group: list[Any] = []


class CheckpointError(RuntimeError):
    """Saving or loading a checkpoint failed on some rank; raised on all of them."""


def root_of(error: Exception) -> Exception:
    """The system's own error where a library has wrapped it in another one; otherwise the error itself."""
    seen: list[BaseException] = []
    waiting: list[BaseException | None] = [error]
    while waiting:
        one = waiting.pop(0)
        if isinstance(one, OSError):
            return one
        if one is not None and one not in seen:
            seen.append(one)
            waiting += [one.__cause__, one.__context__]
    return error


def describe(error: Exception) -> str:
    """What went wrong, in one line."""
    if isinstance(error, CheckpointError):
        return str(error)
    root = root_of(error)
    texts = [f"{type(one).__name__}: {str(one).splitlines()[0] if str(one) else ''}" for one in (root, error)]
    return " <- ".join(dict.fromkeys(texts))


def _group() -> Any:
    """A process group of our own, on the CPU: a message about a failure never meets a collective of the training."""
    world = dist.group.WORLD
    if not _side_group or _side_group[0] is not world:
        group = dist.new_group(backend="gloo", timeout=CONNECTING)
        dist.distributed_c10d._set_pg_timeout(_WRITING, group)
        _side_group[:] = [world, group]
    return _side_group[1]


def _alone() -> bool:
    return not dist.is_initialized() or dist.get_world_size() == 1


def agree(problem: Exception | None, doing: str) -> None:
    """Raises on every rank if any rank has a problem. A collective, but one that has a problem never waits for long.

    Args:
        problem: what went wrong on this rank.
        doing: what was being done, for the message.

    Raises:
        CheckpointError: naming the ranks that failed and why.
    """
    if _alone():
        if problem is not None:
            raise CheckpointError(f"rank 0: {doing} failed on rank 0: {describe(problem)}") from problem
        return
    rank = dist.get_rank()
    failed = torch.tensor([problem is not None], dtype=torch.int32)
    try:
        work = dist.all_reduce(failed, op=dist.ReduceOp.MAX, group=_group(), async_op=True)
        if problem is None:
            work.wait()
        else:
            work.wait(_PATIENCE)
        if not failed.item():
            return
        texts: list[str | None] = [None] * dist.get_world_size()
        dist.all_gather_object(texts, None if problem is None else describe(problem), group=_group())
    except RuntimeError as error:
        if problem is not None:
            raise CheckpointError(
                f"rank {rank}: {doing} failed on rank {rank}: {describe(problem)} (the other ranks did not answer)"
            ) from problem
        raise CheckpointError(f"rank {rank}: {doing} failed: another rank has gone ({describe(error)})") from error
    told: dict[str, list[str]] = {}
    for other, text in enumerate(texts):
        if text is not None:
            told.setdefault(text, []).append(str(other))
    parts = [f"on rank {', '.join(ranks)}: {text}" for text, ranks in list(told.items())[:4]]
    raise CheckpointError(f"rank {rank}: {doing} failed {'; '.join(parts)}") from problem


def on_rank_zero(action: Callable[[], Any], doing: str) -> Any:
    """Runs an action on rank 0, and lets every rank fail if it failed there. A collective; returns None elsewhere."""
    result, problem = None, None
    if _alone() or dist.get_rank() == 0:
        try:
            result = action()
        except Exception as error:
            problem = error
    agree(problem, doing)
    return result
