"""What ``import ya_fsdp`` offers and what it brings along."""

import json
import subprocess
import sys
from pathlib import Path

import ya_fsdp

REPOSITORY = Path(__file__).resolve().parents[2]
PUBLIC = {
    "Activations",
    "CPUOffloadPolicy",
    "HierarchicalBackend",
    "MemoryEstimate",
    "MemoryReport",
    "MixedPrecisionPolicy",
    "OffloadPolicy",
    "RaggedShard",
    "RaggedShardDTensor",
    "Stage",
    "SymmetricMemoryBackend",
    "UnitSpec",
    "UnshardHandle",
    "YCCLBackend",
    "YaFSDP",
    "YaFSDPModule",
    "describe_unit",
    "estimate_memory",
    "fully_shard",
    "get_full_optimizer_state_dict",
    "get_full_state_dict",
    "get_local_optimizer_state_dict",
    "get_local_state_dict",
    "get_sharded_optimizer_state_dict",
    "get_sharded_state_dict",
    "load_full_optimizer_state_dict",
    "load_full_state_dict",
    "load_local_optimizer_state_dict",
    "load_local_state_dict",
    "load_sharded_checkpoint",
    "load_sharded_optimizer_state_dict",
    "load_sharded_state_dict",
    "memory_report",
    "parameter_names",
    "save_sharded_checkpoint",
    "set_debug",
    "share_comm_ctx",
}


def in_fresh_interpreter(code: str) -> list[str]:
    """Run code in a new interpreter and return the list of strings that it prints as JSON."""
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=120, cwd=REPOSITORY, check=False
    )
    assert result.returncode == 0, result.stderr
    names: list[str] = json.loads(result.stdout.splitlines()[-1])
    return names


def test_public_names_are_the_promised_ones_and_sorted() -> None:
    assert set(ya_fsdp.__all__) == PUBLIC
    assert len(ya_fsdp.__all__) == len(PUBLIC)
    assert ya_fsdp.__all__ == sorted(ya_fsdp.__all__, key=lambda name: (name.islower(), name))


def test_every_public_name_exists_and_is_documented() -> None:
    for name in ya_fsdp.__all__:
        value = getattr(ya_fsdp, name)
        assert value.__doc__, f"{name} has no docstring"
        assert value.__module__.startswith("ya_fsdp."), f"{name} comes from {value.__module__}"


def test_star_import_gives_the_public_names_only() -> None:
    names = in_fresh_interpreter(
        "import json; before = set(globals()); from ya_fsdp import *; "
        "print(json.dumps(sorted(set(globals()) - before - {'before'})))"
    )
    assert set(names) == PUBLIC


def test_importing_the_engine_brings_no_other_library_and_starts_nothing() -> None:
    names = in_fresh_interpreter(
        "import json, sys, torch, torch.distributed as dist\n"
        "before = set(sys.modules)\n"
        "import ya_fsdp\n"
        "heavy = {'accelerate', 'transformers', 'wrapt', 'accelerate_plugin', 'trl', 'peft', 'yaml'}\n"
        "found = sorted(heavy & set(sys.modules) - before)\n"
        "found += ['a process group'] if dist.is_initialized() else []\n"
        "print(json.dumps(found))"
    )
    assert names == []
