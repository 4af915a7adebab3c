"""``fully_shard``: shards a module in place."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, TypeVar, overload

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from ya_fsdp._torch_compat import get_module_state
from ya_fsdp.comm import Backend
from ya_fsdp.module import UnshardHandle, YaFSDPModule, attach_state
from ya_fsdp.policy import MixedPrecisionPolicy, OffloadPolicy
from ya_fsdp.runtime.build import GroupBuilder, find_params
from ya_fsdp.runtime.mesh import ShardMesh
from ya_fsdp.runtime.settings import UnitSettings
from ya_fsdp.runtime.state import YaFSDPState

__all__ = ["UnshardHandle", "YaFSDPModule", "fully_shard"]

M = TypeVar("M", bound=nn.Module)


@overload
def fully_shard(
    module: M,
    *,
    mesh: DeviceMesh | None = ...,
    reshard_after_forward: bool | int | None = ...,
    mp_policy: MixedPrecisionPolicy = ...,
    offload_policy: OffloadPolicy = ...,
    ignored_params: set[nn.Parameter] | None = ...,
    shard_alignment: int = ...,
    backend: Backend | None = ...,
    shard_placement_fn: Callable[[nn.Parameter], Any] | None = ...,
) -> M: ...


@overload
def fully_shard(
    module: Sequence[M],
    *,
    mesh: DeviceMesh | None = ...,
    reshard_after_forward: bool | int | None = ...,
    mp_policy: MixedPrecisionPolicy = ...,
    offload_policy: OffloadPolicy = ...,
    ignored_params: set[nn.Parameter] | None = ...,
    shard_alignment: int = ...,
    backend: Backend | None = ...,
    shard_placement_fn: Callable[[nn.Parameter], Any] | None = ...,
) -> Sequence[M]: ...


def fully_shard(
    module: Any,
    *,
    mesh: DeviceMesh | None = None,
    reshard_after_forward: bool | int | None = None,
    mp_policy: MixedPrecisionPolicy = MixedPrecisionPolicy(),  # noqa: B008 (frozen)
    offload_policy: OffloadPolicy = OffloadPolicy(),  # noqa: B008 (frozen)
    ignored_params: set[nn.Parameter] | None = None,
    shard_alignment: int = 8,
    backend: Backend | None = None,
    shard_placement_fn: Callable[[nn.Parameter], Any] | None = None,
) -> Any:
    """Shards a module's parameters over the data-parallel ranks, in place.

    Call it bottom-up: first on the blocks, then on the whole model. Each call makes one *unit*: the parameters of the
    module that no call below has taken, gathered together for the module's forward and backward.

    Args:
        module: The module, or several that make one unit (modules that share a tied parameter must).
        mesh: 1-D mesh to shard over, or 2-D to shard over its second axis and replicate over its first. ``None``: all
            ranks of the default process group.
        reshard_after_forward: ``True`` frees the full parameters after the forward and gathers them again for the
            backward; ``False`` keeps them; ``None`` is ``False`` for the root and ``True`` below it. A number of ranks
            lets so many neighbours hold the parameters together until the backward, which gathers among them only.
        mp_policy: Dtypes of compute, reduction and output.
        offload_policy: Where shards, gradients and optimizer state live; :class:`CPUOffloadPolicy` keeps them in host
            memory, and the optimizer steps there.
        ignored_params: Parameters to leave alone: not sharded, not gathered, not reduced.
        shard_alignment: Parameters and pieces start at multiples of this many elements.
        backend: Who communicates along the sharding axis; one object for all calls. ``None``: ``torch.distributed``.
        shard_placement_fn: As PyTorch's: called with each parameter; a ``ShardPlacementResult`` chooses the parameter's
            mesh. A ``Shard(dim)`` changes nothing, since slices of the flattened elements have no dimension.

    Returns:
        The module or modules given, whose classes now also derive from :class:`YaFSDPModule`.

    Raises:
        ValueError: On an argument, a module or a parameter that is not supported; the message names it.
    """
    modules: list[nn.Module] = list(module) if isinstance(module, (list, tuple)) else [module]
    _check_modules(modules)
    _check_options(offload_policy)
    shard_mesh = ShardMesh.of(mesh if mesh is not None else _default_mesh(), backend)
    device = _mesh_device(shard_mesh.mesh)
    settings = _reshard_settings(reshard_after_forward, shard_mesh.shard.world_size)
    managed = list(_managed_modules(modules))
    uses = find_params(managed, {id(param) for param in ignored_params or ()})
    _move_buffers((member for _, member in managed), device)
    state = YaFSDPState(modules, mp_policy, device, settings, reshard_by_default=reshard_after_forward is None)
    kind, mesh_of = type(modules[0]).__qualname__, _mesh_chooser(shard_mesh, shard_placement_fn)
    builder = GroupBuilder(kind, mesh_of, mp_policy, shard_alignment, device, offload_policy, settings, state.phase)
    state.groups = builder.build(uses)
    for member in modules:
        attach_state(member, state)
    return module


# The unit of a module, or None: where PyTorch's function has it.
fully_shard.state = get_module_state  # type: ignore[attr-defined]


def _check_modules(modules: list[nn.Module]) -> None:
    if not modules:
        raise ValueError("fully_shard got an empty list of modules")
    for module in modules:
        if not isinstance(module, nn.Module):
            raise ValueError(f"fully_shard expects an nn.Module or a list of them, got {type(module).__name__}")
        if isinstance(module, (nn.ModuleList, nn.ModuleDict)) and type(module).forward is nn.Module.forward:
            raise ValueError(
                f"fully_shard cannot shard a {type(module).__name__}: it has no forward to gather for. Shard its "
                f"members."
            )
        if get_module_state(module) is not None:
            raise ValueError(
                f"{type(module).__name__} is managed by fully_shard or another composable API already; call it once"
            )
    for first in modules:
        for second in modules:
            if first is not second and any(child is second for child in first.modules()):
                raise ValueError(
                    f"the modules of one unit must not contain one another, but {type(first).__name__} contains "
                    f"{type(second).__name__}"
                )


def _check_options(offload: OffloadPolicy) -> None:
    if not isinstance(offload, OffloadPolicy):
        raise ValueError(f"offload_policy: expected OffloadPolicy or CPUOffloadPolicy of ya_fsdp, got {offload!r}")


def _reshard_settings(reshard: bool | int | None, world_size: int) -> UnitSettings:
    if reshard is None or isinstance(reshard, bool):
        return UnitSettings(reshard_after_forward=reshard is not False)
    if not isinstance(reshard, int) or reshard < 1 or world_size % reshard:
        raise ValueError(
            f"reshard_after_forward={reshard!r}: expected a bool, None, or a number of ranks that divides the "
            f"{world_size} ranks that the unit is sharded over"
        )
    if reshard in (1, world_size):
        return UnitSettings(reshard_after_forward=reshard != 1)
    return UnitSettings(reshard_group_size=reshard)


def _managed_modules(modules: list[nn.Module]) -> Iterator[tuple[str, nn.Module]]:
    """Names and modules of a unit, without the trees of units below."""
    seen: set[int] = set()

    def walk(name: str, module: nn.Module) -> Iterator[tuple[str, nn.Module]]:
        if id(module) in seen or get_module_state(module) is not None:
            return
        seen.add(id(module))
        yield name, module
        for child_name, child in module.named_children():
            yield from walk(f"{name}.{child_name}" if name else child_name, child)

    for module in modules:
        yield from walk("" if len(modules) == 1 else type(module).__name__, module)


def _default_mesh() -> DeviceMesh:
    if not dist.is_initialized():
        raise ValueError(
            "fully_shard needs a mesh or an initialised process group: call torch.distributed.init_process_group"
        )
    accelerator = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    return init_device_mesh(accelerator.type if accelerator is not None else "cpu", (dist.get_world_size(),))


def _mesh_chooser(default: ShardMesh, choose: Callable[[nn.Parameter], Any] | None) -> Callable[[Any], ShardMesh]:
    def mesh_of(param: nn.Parameter) -> ShardMesh:
        info = getattr(choose(param) if choose is not None else None, "mesh_info", None)
        if info is None:
            return default
        if info.mesh.device_type != default.mesh.device_type:
            raise ValueError(f"shard_placement_fn: expected a mesh of {default.mesh.device_type}, got {info.mesh}")
        return ShardMesh.of(info.mesh, default.backend)

    return mesh_of


def _mesh_device(mesh: DeviceMesh) -> torch.device:
    if mesh.device_type == "cpu":
        return torch.device("cpu")
    return torch.device(mesh.device_type, torch.get_device_module(mesh.device_type).current_device())


def _move_buffers(modules: Iterable[nn.Module], device: torch.device) -> None:
    for module in modules:
        for name, buffer in module._buffers.items():
            if buffer is not None and buffer.device != device and not buffer.is_meta:
                module._buffers[name] = buffer.to(device)
