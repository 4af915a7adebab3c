"""What one rank process of the pool does: wait for a job, run it in a fresh process group, report, wait again."""

import contextlib
import datetime
import faulthandler
import gc
import os
import pickle
import signal
import threading
import traceback
import warnings
from multiprocessing import connection, parent_process
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

#: First message of a rank: it has started, so the time that a job may take begins now.
READY = b"ready"
# Longer than any job may take: the parent ends a job that hangs, with every rank's stack, before gloo gives up.
_GROUP_TIMEOUT = datetime.timedelta(minutes=10)


def log_path(folder: str, rank: int) -> Path:
    """File that receives everything rank ``rank`` prints, and its stacks when the parent asks for them."""
    return Path(folder) / f"rank{rank}.log"


def rank_main(rank: int, world_size: int, pipe: Connection, folder: str) -> None:
    """Entry point of a rank process; returns when the parent closes the pipe."""
    _leave_with_the_parent()
    _redirect_output(log_path(folder, rank))
    _prepare_torch()
    pipe.send_bytes(READY)
    while True:
        try:
            number, payload = pickle.loads(pipe.recv_bytes())
        except EOFError:
            return
        pipe.send_bytes(_run_job(rank, world_size, folder, number, payload))


def _leave_with_the_parent() -> None:
    """End this process when the parent is gone, even while a job hangs inside a collective."""
    parent = parent_process()
    assert parent is not None

    def watch() -> None:
        connection.wait([parent.sentinel])
        os._exit(1)

    threading.Thread(target=watch, name="parent-watch", daemon=True).start()


def _redirect_output(path: Path) -> None:
    stream = path.open("a", buffering=1)
    os.dup2(stream.fileno(), 1)
    os.dup2(stream.fileno(), 2)
    # A rank that hangs or crashes tells where: on the parent's signal, or on a fatal one.
    faulthandler.enable(stream)
    faulthandler.register(signal.SIGUSR1, file=stream, all_threads=True)


def _prepare_torch() -> None:
    import torch

    torch.set_num_threads(1)
    # The engine has to stay quiet on the torch it runs on: a deprecated call in it is a failure here.
    for category in (DeprecationWarning, FutureWarning):
        warnings.filterwarnings("error", category=category, module=r"ya_fsdp(\..*)?$")


def _run_job(rank: int, world_size: int, folder: str, number: int, payload: bytes) -> bytes:
    import torch
    import torch.distributed as dist

    torch.manual_seed(0)
    try:
        job, args, kwargs = pickle.loads(payload)
        store = dist.FileStore(str(Path(folder) / f"store{number}"), world_size)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size, timeout=_GROUP_TIMEOUT)
        outcome: tuple[bool, Any] = (True, job(*args, **kwargs))
        answer = pickle.dumps(outcome)
    except BaseException:
        # The group stays up: destroying it would break a peer's collective and bury the first cause under a second.
        return pickle.dumps((False, traceback.format_exc()))
    _clean_up()
    return answer


def _clean_up() -> None:
    import torch
    import torch.distributed as dist

    gc.collect()
    torch.set_default_dtype(torch.float32)
    with contextlib.suppress(AssertionError, ValueError):  # the job may have destroyed the group itself
        dist.destroy_process_group()
    _forget_meshes()


def _forget_meshes() -> None:
    """Empties what torch remembers of DTensor operators: it holds meshes, whose process groups are gone now."""
    from torch.distributed.tensor import _redistribute
    from torch.distributed.tensor.debug import _clear_sharding_prop_cache

    _redistribute._gen_transform_infos.cache_clear()
    _clear_sharding_prop_cache()
