"""The engine under test and PyTorch's FSDP2, behind one calling pattern."""

import os
from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from tests.support.models import units_of

YA_FSDP, FSDP2 = "ya_fsdp", "fsdp2"
#: Engine that the tests examine. Pointing them at ``fsdp2`` shows where the two engines are meant to differ.
ENGINE = os.environ.get("YA_FSDP_TESTED_ENGINE", YA_FSDP)


def engine_module(engine: str = ENGINE) -> Any:
    """Return the module that exports ``fully_shard``, ``MixedPrecisionPolicy`` and so on."""
    if engine == YA_FSDP:
        import ya_fsdp

        return ya_fsdp
    assert engine == FSDP2, f"unknown engine {engine!r}"
    from torch.distributed import fsdp

    return fsdp


def mesh_1d() -> DeviceMesh:
    """Return a mesh over all ranks."""
    return init_device_mesh("cpu", (dist.get_world_size(),))


def shard(
    model: nn.Module,
    engine: str = ENGINE,
    units: Iterable[nn.Module | list[nn.Module]] | None = None,
    *,
    mesh: DeviceMesh | None = None,
    mp: dict[str, Any] | None = None,
    **options: Any,
) -> nn.Module:
    """Shard each unit, then the root.

    Args:
        model: The root.
        engine: ``ya_fsdp`` or ``fsdp2``.
        units: Units in bottom-up order; by default those of :func:`tests.support.models.units_of`.
        mesh: Mesh; by default all ranks.
        mp: Arguments of ``MixedPrecisionPolicy``.
        **options: Further arguments of ``fully_shard``, for every unit and the root.
    """
    module = engine_module(engine)
    options["mesh"] = mesh if mesh is not None else mesh_1d()
    if mp is not None:
        options["mp_policy"] = module.MixedPrecisionPolicy(**mp)
    for unit in units_of(model) if units is None else units:
        module.fully_shard(unit, **options)
    return module.fully_shard(model, **options)


def full(tensor: torch.Tensor) -> torch.Tensor:
    """Return the full value of a tensor, sharded or not, as a detached copy (collective)."""
    if hasattr(tensor, "full_tensor"):
        tensor = tensor.full_tensor()
    if hasattr(tensor, "wait"):
        tensor = tensor.wait()
    return tensor.detach().clone()


def full_parameters(model: nn.Module) -> dict[str, torch.Tensor]:
    """Return every parameter's full value, by name (collective)."""
    return {name: full(parameter) for name, parameter in model.named_parameters()}


def full_gradients(model: nn.Module) -> dict[str, torch.Tensor | None]:
    """Return every parameter's full gradient, by name, None where there is none (collective)."""
    return {
        name: None if parameter.grad is None else full(parameter.grad) for name, parameter in model.named_parameters()
    }


def plain_gradients(model: nn.Module) -> dict[str, torch.Tensor | None]:
    """Return the gradients of an unsharded model, by name."""
    return {
        name: None if parameter.grad is None else parameter.grad.clone() for name, parameter in model.named_parameters()
    }


def local(tensor: torch.Tensor) -> torch.Tensor:
    """Return this rank's part of a sharded tensor."""
    return tensor.to_local().detach()
