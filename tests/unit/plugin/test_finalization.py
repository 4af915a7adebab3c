"""A process that ends while gloo's threads hold the last references to tensors ends well."""

import subprocess
import sys

SCRIPT = """
import os, sys, tempfile
import torch, torch.distributed as dist
from accelerate_plugin.finalization import let_gloo_finish

torch.set_num_threads(1)
store = tempfile.mktemp()
child = os.fork()
let_gloo_finish()
dist.init_process_group("gloo", init_method=f"file://{store}", rank=int(not child), world_size=2)
sys.setswitchinterval(1)  # gloo's threads get the interpreter's lock only when this thread waits
tensors = [torch.ones(100_000) for _ in range(20)]
works = [dist.all_reduce(tensor, async_op=True) for tensor in tensors]
works[0].wait()
del tensors, works
if child:
    assert os.waitpid(child, 0)[1] == 0
"""


def test_process_ends_well_while_gloo_still_holds_tensors() -> None:
    for _ in range(2):
        done = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True, timeout=120)
        assert done.returncode == 0, done.stderr
