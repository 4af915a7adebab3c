"""What rank 0 prints once per model: the effective settings, the units, and the bytes on each rank."""

import dataclasses
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

import ya_fsdp
from accelerate_plugin.settings import YaFSDPPlugin
from accelerate_plugin.units import Unit, count_by_class

__all__ = ["Facts", "describe", "describe_checkpointing", "print_report"]


@dataclass(frozen=True, slots=True)
class Facts:
    """What only the preparation knows.

    Attributes:
        class_name: the model's class before it was sharded.
        raised: parameters that were raised to fp32.
        checkpointed: blocks under activation checkpointing.
    """

    class_name: str
    raised: int = 0
    checkpointed: int = 0


def print_report(accelerator: Any, model: nn.Module, units: list[Unit], facts: Facts) -> None:
    """Prints the block on rank 0. A collective, because bytes are asked of every rank."""
    bytes_here = ya_fsdp.memory_report(model).parameters
    everywhere = torch.tensor([bytes_here], dtype=torch.int64, device=accelerator.device)
    gathered = [torch.empty_like(everywhere) for _ in range(dist.get_world_size())]
    dist.all_gather(gathered, everywhere)
    if accelerator.process_index == 0:
        per_rank = [int(value.item()) for value in gathered]
        print(describe(accelerator, model, units, per_rank, facts), flush=True)


def describe(accelerator: Any, model: nn.Module, units: list[Unit], per_rank: list[int], facts: Facts) -> str:
    """The text of the block.

    Units:
        per_rank: bytes of sharded parameters.
    """
    plugin: YaFSDPPlugin = accelerator.state.fsdp_plugin
    total = sum(parameter.numel() for parameter in model.parameters())
    trainable = sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)
    compute = "as stored" if plugin.param_dtype is None else str(plugin.param_dtype).removeprefix("torch.")
    precision = f"compute {compute}, reduce {_reduce_name(plugin)}"
    if facts.raised:
        precision += f"; {facts.raised} parameters raised to fp32 master weights"
    lines = [
        f"ya-fsdp manages {facts.class_name} on {len(per_rank)} process{'es' if len(per_rank) > 1 else ''} "
        f"({accelerator.device.type}, {dist.get_backend()})",
        f"  parameters      {total:,} ({trainable:,} trainable)",
        f"  units           {_describe_units(model, units)}",
        f"  bytes per rank  parameters {_range(per_rank)}",
        f"  precision       {precision}",
        f"  checkpointing   {describe_checkpointing(model, facts.checkpointed)}",
        f"  settings        {_describe_settings(plugin)}",
    ]
    return "\n".join(lines)


def describe_checkpointing(model: nn.Module, count: int) -> str:
    """Who runs blocks forward again in backward: the engine, for so many blocks, or the model itself."""
    if not count and any(getattr(module, "gradient_checkpointing", False) for module in model.modules()):
        return "none by the engine; the model's own is switched on"
    return f"{count} blocks run forward again in backward"


def _describe_units(model: nn.Module, units: list[Unit]) -> str:
    blocks = [f"{count} {name}" for name, count in count_by_class(units).items()]
    others = [unit.label for unit in units if unit.kind != "block"]
    inside = {parameter for unit in units for module in unit.modules for parameter in module.parameters()}
    rest = sum(parameter not in inside for parameter in model.parameters())
    root = f"root with {rest} parameter{'s' if rest != 1 else ''}" if rest else "root without parameters"
    number = len(units) + (1 if rest else 0)
    return f"{number}: " + ", ".join([*others, *blocks, root])


def _describe_settings(plugin: YaFSDPPlugin) -> str:
    shown = {field.name: getattr(plugin.settings, field.name) for field in dataclasses.fields(plugin.settings)}
    return ", ".join(f"{name}={value}" for name, value in shown.items() if value not in (None, ()))


def _reduce_name(plugin: YaFSDPPlugin) -> str:
    if plugin.settings.reduce_dtype is not None:
        return plugin.settings.reduce_dtype
    return "fp32" if plugin.param_dtype is not None else "as computed"


def _range(values: list[int]) -> str:
    low, high = min(values), max(values)
    return f"{high:,}" if low == high else f"{low:,} to {high:,}"
