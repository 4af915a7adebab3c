"""Prints what accelerate made of the launch, without training."""

import json
import os

from accelerate import Accelerator

accelerator = Accelerator()
plugin = getattr(accelerator.state, "fsdp_plugin", None)
if accelerator.is_main_process:
    facts = {
        "type": str(accelerator.distributed_type),
        "plugin": type(plugin).__name__,
        "processes": accelerator.num_processes,
        "variables": sorted(name for name in os.environ if name.startswith("FSDP_")),
        "replaced": hasattr(Accelerator.prepare, "__ya_fsdp__"),
    }
    print("FACTS " + json.dumps(facts), flush=True)
