"""``fully_shard``: shards a module in place, and the methods that a sharded module gains."""

from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NoReturn, TypeVar, overload

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from ya_fsdp._torch_compat import FSDPModule, get_module_state, insert_module_state
from ya_fsdp.comm import Backend
from ya_fsdp.comm.reduction import check_divide_factor
from ya_fsdp.policy import MixedPrecisionPolicy, OffloadPolicy, ResolvedDtypes
from ya_fsdp.runtime.build import build_groups, find_params
from ya_fsdp.runtime.mesh import ShardMesh
from ya_fsdp.runtime.settings import UnitSettings
from ya_fsdp.runtime.state import YaFSDPState

__all__ = ["UnshardHandle", "YaFSDPModule", "fully_shard"]

M = TypeVar("M", bound=nn.Module)
_classes: dict[type, type] = {}


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
) -> Any:
    """Shards a module's parameters over the data-parallel ranks, in place.

    Call it bottom-up: first on the blocks, then on the whole model. Each call makes one *unit*: the parameters of the
    module that no call below has taken, gathered together for the module's forward and backward.

    Args:
        module: The module, or several that make one unit (modules that share a tied parameter must).
        mesh: 1-D mesh to shard over, or 2-D to shard over its second axis and replicate over its first. ``None``: all
            ranks of the default process group.
        reshard_after_forward: ``True`` frees the full parameters after the forward and gathers them again for the
            backward; ``False`` keeps them; ``None`` is ``False`` for the root and ``True`` below it.
        mp_policy: Dtypes of compute, reduction and output.
        offload_policy: Where shards live.
        ignored_params: Parameters to leave alone: not sharded, not gathered, not reduced.
        shard_alignment: Parameters and pieces start at multiples of this many elements.
        backend: Who communicates along the sharding axis; one object for all calls. ``None``: ``torch.distributed``.

    Returns:
        The module or modules given, whose classes now also derive from :class:`YaFSDPModule`.

    Raises:
        ValueError: On an argument, a module or a parameter that is not supported; the message names it.
    """
    modules: list[nn.Module] = list(module) if isinstance(module, (list, tuple)) else [module]
    _check_modules(modules)
    _check_options(reshard_after_forward, offload_policy, mp_policy)
    shard_mesh = ShardMesh(mesh if mesh is not None else _default_mesh(), backend)
    device = _mesh_device(shard_mesh.mesh)
    settings = UnitSettings(reshard_after_forward=reshard_after_forward is not False)
    managed = list(_managed_modules(modules))
    uses = find_params(managed, {id(param) for param in ignored_params or ()})
    _move_buffers((member for _, member in managed), device)
    state = YaFSDPState(modules, mp_policy, device, settings, reshard_by_default=reshard_after_forward is None)
    state.groups = build_groups(
        uses,
        kind=type(modules[0]).__qualname__,
        mesh=shard_mesh,
        policy=mp_policy,
        alignment=shard_alignment,
        device=device,
        settings=settings,
        phase=state.phase,
    )
    for member in modules:
        insert_module_state(member, state)
        member.__class__ = _sharded_class(type(member))
        member.register_state_dict_pre_hook(_before_state_dict)  # type: ignore[no-untyped-call]
        member.register_load_state_dict_post_hook(_after_load_state_dict)  # type: ignore[no-untyped-call]
    return module


class UnshardHandle:
    """A gather that was started with ``unshard(async_op=True)``."""

    def __init__(self, state: YaFSDPState | None) -> None:
        self._state = state

    def wait(self) -> None:
        """Waits for the gather and shows the full parameters. May be called more than once."""
        if self._state is not None:
            self._state.wait_for_unshard()
            self._state = None


class YaFSDPModule(FSDPModule):
    """What ``fully_shard`` adds to a module's class; derives from torch's own, so that ``isinstance`` tests hold."""

    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        """Builds the user's class: containers make new instances of their own type when they are sliced."""
        original: Any = cls.__mro__[cls.__mro__.index(FSDPModule) + 1]
        module = original.__new__(original)
        module.__init__(*args, **kwargs)
        return module

    def __deepcopy__(self, memo: Any) -> NoReturn:
        raise _no_copy(self, "copied")

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        raise _no_copy(self, "pickled")

    def _get_fsdp_state(self) -> YaFSDPState:  # type: ignore[override]
        state = get_module_state(self)  # type: ignore[arg-type]
        if not isinstance(state, YaFSDPState):
            raise AssertionError(f"{type(self).__name__} has no state of ya_fsdp")
        return state

    def reshard(self) -> None:
        """Frees this unit's full parameters and shows the sharded ones."""
        self._get_fsdp_state().reshard()

    def unshard(self, async_op: bool = False) -> UnshardHandle | None:  # type: ignore[override]
        """Gathers this unit's parameters.

        Args:
            async_op: Return at once; the parameters are shown by the handle's ``wait()`` or by the unit's forward.
        """
        state = self._get_fsdp_state()
        state.unshard()
        if async_op:
            return UnshardHandle(state)
        state.wait_for_unshard()
        return None

    def reset_iter_state(self) -> None:
        """Returns all units to rest after an exception in a forward or backward that was caught."""
        state = self._get_fsdp_state()
        state.lazy_init()
        state.context.reset()

    def set_is_last_backward(self, is_last_backward: bool) -> None:
        """Says whether the coming backward is the iteration's last; forwards that wait for a later one stay open."""
        state = self._get_fsdp_state()
        state.lazy_init()
        state.context.is_last_backward = is_last_backward

    def set_requires_gradient_sync(self, requires_gradient_sync: bool, *, recurse: bool = True) -> None:
        """Turns the reduction of gradients on or off; while off they add up unsharded, in the reduction's dtype."""
        for settings in self._settings(recurse):
            settings.requires_gradient_sync = requires_gradient_sync
            settings.requires_all_reduce = requires_gradient_sync

    def set_requires_all_reduce(self, requires_all_reduce: bool, *, recurse: bool = True) -> None:
        """On a 2-D mesh: turns the reduction over replicas on or off; while off, reduced shards add up."""
        for settings in self._settings(recurse):
            settings.requires_all_reduce = requires_all_reduce

    def set_reshard_after_forward(self, reshard_after_forward: bool, recurse: bool = True) -> None:
        """Chooses whether full parameters are freed between forward and backward."""
        if not isinstance(reshard_after_forward, bool):
            raise ValueError(f"reshard_after_forward must be a bool here, got {reshard_after_forward!r}")
        for state in self._states(recurse):
            state.settings.reshard_after_forward = reshard_after_forward
            state.reshard_by_default = False
            state.want_own_buffers()

    def set_reshard_after_backward(self, reshard_after_backward: bool, *, recurse: bool = True) -> None:
        """Chooses whether full parameters are freed after the backward."""
        for state in self._states(recurse):
            state.settings.reshard_after_backward = reshard_after_backward
            state.want_own_buffers()

    def set_modules_to_forward_prefetch(self, modules: list[FSDPModule]) -> None:
        """Units to gather when this one's forward starts, instead of the one that followed last time."""
        self._get_fsdp_state().set_prefetch(forward=_states_of(modules))

    def set_modules_to_backward_prefetch(self, modules: list[FSDPModule]) -> None:
        """Units to gather when this one's backward starts, instead of the one whose forward ended before."""
        self._get_fsdp_state().set_prefetch(backward=_states_of(modules))

    def set_post_optim_event(self, event: Any) -> None:
        """Event that the next forward's gathers wait for, instead of everything on the current stream."""
        state = self._get_fsdp_state()
        state.lazy_init()
        state.context.post_optim_event = event

    def set_unshard_in_backward(self, unshard_in_backward: bool) -> None:
        """Chooses whether this unit is gathered for its backward; an embedding does not need its weight there."""
        self._get_fsdp_state().settings.unshard_in_backward = unshard_in_backward

    def set_gradient_divide_factor(self, factor: float) -> None:
        """Divides this unit's summed gradients by ``factor`` instead of the number of ranks; any positive number."""
        check_divide_factor(factor)
        self._get_fsdp_state().settings.gradient_divide_factor = float(factor)

    def set_reduce_scatter_divide_factor(self, factor: float) -> None:
        """Older name of :meth:`set_gradient_divide_factor`."""
        self.set_gradient_divide_factor(factor)

    def set_force_sum_reduction_for_comms(self, enable: bool) -> None:
        """Uses sums only, and divides outside of the collective."""
        self._get_fsdp_state().settings.force_sum_reduction = enable

    def set_reduce_scatter_unused_params(self, reduce_scatter_unused_params: bool, *, recurse: bool = True) -> None:
        """Accepted for compatibility: parameters without a gradient are always reduced as zeros."""

    def release_buffers(self) -> None:
        """Gives the memory of idle gather buffers back to the allocator; the next forward takes it again."""
        state = self._get_fsdp_state()
        state.lazy_init()
        state.context.comm.pool.free_idle()

    def _apply(self, *args: Any, **kwargs: Any) -> Any:
        states = self._states(recurse=True)
        for state in states:
            state.reshard()
        result = nn.Module._apply(self, *args, **kwargs)  # type: ignore[arg-type,no-untyped-call]
        _adopt(self._get_fsdp_state())
        return result

    def _states(self, recurse: bool) -> list[YaFSDPState]:
        if not recurse:
            return [self._get_fsdp_state()]
        return _states_of(m for m in self.modules() if isinstance(m, YaFSDPModule))  # type: ignore[attr-defined]

    def _settings(self, recurse: bool) -> list[UnitSettings]:
        return [state.settings for state in self._states(recurse)]


def _no_copy(module: YaFSDPModule, what: str) -> TypeError:
    return TypeError(
        f"{type(module).__name__} is sharded and cannot be {what} as a whole: copies would share process groups and "
        f"buffers. Copy the model before fully_shard and shard both, or carry the weights over with "
        f"ya_fsdp.get_full_state_dict and load_full_state_dict; for a running average of the weights clone the sharded "
        f"parameters."
    )


def _unsupported(name: str) -> Any:
    def method(self: YaFSDPModule, *args: Any, **kwargs: Any) -> NoReturn:
        raise NotImplementedError(
            f"{type(self).__name__}.{name}: the switch belongs to PyTorch's engine and ya_fsdp has nothing like it; "
            f"leave the call out"
        )

    method.__name__ = name
    return method


# Switches of torch's class that reach into its own engine: without an override they would fail somewhere inside.
for _name in (
    "set_custom_all_gather",
    "set_custom_reduce_scatter",
    "set_all_reduce_hook",
    "set_reduce_scatter_max_input_buffers",
    "set_separate_reduce_scatter_group",
    "set_allocate_memory_from_process_group_for_comm",
    "set_symm_mem_for_comm",
):
    setattr(YaFSDPModule, _name, _unsupported(_name))


def _states_of(modules: Iterable[Any]) -> list[YaFSDPState]:
    states: dict[int, YaFSDPState] = {}
    for module in modules:
        if not isinstance(module, YaFSDPModule):
            raise ValueError(f"expected modules sharded by ya_fsdp.fully_shard, got {type(module).__name__}")
        state = module._get_fsdp_state()
        states[id(state)] = state
    return list(states.values())


def _before_state_dict(module: nn.Module, prefix: str, keep_vars: bool) -> None:
    state = get_module_state(module)
    assert isinstance(state, YaFSDPState)
    state.reshard()


def _after_load_state_dict(module: nn.Module, incompatible_keys: Any) -> None:
    state = get_module_state(module)
    assert isinstance(state, YaFSDPState)
    _adopt(state)


def _adopt(state: YaFSDPState) -> None:
    for group in state.groups:
        group.adopt_parameters(lambda dtype: ResolvedDtypes.resolve(dtype, state.policy))
        state.device = group.shard.device if not group.shard.is_meta else state.device


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


def _check_options(reshard: bool | int | None, offload: OffloadPolicy, policy: MixedPrecisionPolicy) -> None:
    if reshard is not None and not isinstance(reshard, bool):
        raise ValueError(
            f"reshard_after_forward={reshard!r}: this version knows True, False and None, not a smaller group size"
        )
    if type(offload) is not OffloadPolicy:
        raise ValueError(f"offload_policy={offload!r}: this version keeps shards on the device that computes")
    if policy.all_gather_dtype_to_param_cls:
        raise ValueError("all_gather_dtype_to_param_cls is not supported in this version; leave it out")


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


def _mesh_device(mesh: DeviceMesh) -> torch.device:
    if mesh.device_type == "cpu":
        return torch.device("cpu")
    return torch.device(mesh.device_type, torch.get_device_module(mesh.device_type).current_device())


def _move_buffers(modules: Iterable[nn.Module], device: torch.device) -> None:
    for module in modules:
        for name, buffer in module._buffers.items():
            if buffer is not None and buffer.device != device and not buffer.is_meta:
                module._buffers[name] = buffer.to(device)


def _sharded_class(cls: type) -> type:
    """The user's class with :class:`YaFSDPModule` in front; libraries strip the ``FSDP`` of the name when they save."""
    if cls not in _classes:
        _classes[cls] = type(f"FSDP{cls.__name__}", (YaFSDPModule, cls), {"__doc__": cls.__doc__})
    return _classes[cls]
