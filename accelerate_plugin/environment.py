"""What a bug report should say of the machine: versions, devices, backends, and settings from the environment."""

import importlib.metadata
import os
import platform
from typing import Any

import torch
import torch.distributed as dist

__all__ = ["describe_environment"]

_PACKAGES = ("ya-fsdp", "torch", "accelerate", "transformers", "trl", "peft", "datasets", "wrapt", "safetensors")
# Settings only: other variables may hold what nobody should paste into a report.
_PREFIXES = ("FSDP_", "YA_FSDP_", "ACCELERATE_", "NCCL_", "TORCH_NCCL_", "GLOO_", "PYTORCH_CUDA_ALLOC_CONF")
_NAMES = ("CUDA_VISIBLE_DEVICES", "OMP_NUM_THREADS", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "HF_HUB_OFFLINE")
_SECRETS = ("TOKEN", "KEY", "SECRET", "PASSWORD")


def describe_environment() -> dict[str, dict[str, Any]]:
    """The report, by section."""
    return {
        "versions": _versions(),
        "devices": _devices(),
        "backends": _backends(),
        "settings": _settings(),
    }


def _versions() -> dict[str, Any]:
    versions: dict[str, Any] = {"python": platform.python_version(), "system": platform.platform()}
    for name in _PACKAGES:
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            versions[name] = None
    versions["cuda"] = torch.version.cuda
    return versions


def _devices() -> dict[str, Any]:
    devices: dict[str, Any] = {"processors": os.cpu_count()}
    if torch.accelerator.is_available():
        devices["accelerator"] = str(torch.accelerator.current_accelerator())
        for index in range(torch.accelerator.device_count()):
            devices[f"device {index}"] = _device(index)
    return devices


def _device(index: int) -> str:
    if not torch.cuda.is_available():
        return "present"
    found = torch.cuda.get_device_properties(index)
    return f"{found.name}, {found.total_memory / 2**30:.1f} GiB, compute capability {found.major}.{found.minor}"


def _backends() -> dict[str, Any]:
    if not dist.is_available():
        return {"torch.distributed": False}
    backends: dict[str, Any] = {name: dist.is_backend_available(name) for name in ("gloo", "nccl", "mpi", "ucc")}
    if backends["nccl"] and torch.cuda.is_available():
        backends["nccl version"] = ".".join(map(str, torch.cuda.nccl.version()))  # type: ignore[no-untyped-call]
    return backends


def _settings() -> dict[str, Any]:
    return {
        name: value
        for name, value in sorted(os.environ.items())
        if (name.startswith(_PREFIXES) or name in _NAMES) and not any(word in name for word in _SECRETS)
    }
