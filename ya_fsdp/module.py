"""The methods that ``fully_shard`` adds to a module's class."""

from collections.abc import Iterable, Sequence
from typing import Any, NoReturn

from torch import nn

from ya_fsdp._torch_compat import FSDPModule, get_module_state, insert_module_state
from ya_fsdp.comm.reduction import check_divide_factor
from ya_fsdp.policy import ResolvedDtypes
from ya_fsdp.runtime.compiler import add_wrapper_names, strip_wrapper_names, untraced
from ya_fsdp.runtime.settings import UnitSettings
from ya_fsdp.runtime.state import YaFSDPState

__all__ = ["UnshardHandle", "YaFSDPModule", "attach_state", "share_comm_ctx"]

_classes: dict[type, type] = {}


class UnshardHandle:
    """A gather that was started with ``unshard(async_op=True)``."""

    def __init__(self, state: YaFSDPState | None) -> None:
        self._state = state

    @untraced
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

    @untraced
    def reshard(self) -> None:
        """Frees this unit's full parameters and shows the sharded ones."""
        self._get_fsdp_state().reshard()

    @untraced
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

    @untraced
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
            state.settings.reshard_group_size = None
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


def share_comm_ctx(modules: Sequence[FSDPModule]) -> None:
    """Lets several roots, such as the chunks of a pipeline stage, share streams and gather buffers.

    Call it before the first forward of any of them. Units of one kind then take turns in the same few buffers,
    whichever root they belong to.

    Args:
        modules: The roots.

    Raises:
        ValueError: If one of them has no unit of ya_fsdp, belongs to another of them, or has run already.
    """
    states = _states_of(modules)
    for state in states:
        if state._context is not None:
            raise ValueError(f"{state.name} has run, or is part of a model that has; call share_comm_ctx before that")
    for state in states:
        if state._context is not None:
            raise ValueError(f"{state.name} lies inside of another of the modules given; pass the roots only")
        state.lazy_init()
    if states:
        states[0].context.share_with([state.context for state in states[1:]])


def _no_copy(module: YaFSDPModule, what: str) -> TypeError:
    return TypeError(
        f"{type(module).__name__} is sharded and cannot be {what} as a whole: copies would share process groups and "
        f"buffers. Copy the model before fully_shard and shard both, or carry the weights over with "
        f"ya_fsdp.get_full_state_dict and load_full_state_dict; for a running average of the weights clone the sharded "
        f"parameters."
    )


def _unsupported(name: str, way_out: str) -> Any:
    def method(self: YaFSDPModule, *args: Any, **kwargs: Any) -> NoReturn:
        raise NotImplementedError(f"{type(self).__name__}.{name}: the switch belongs to PyTorch's engine; {way_out}")

    method.__name__ = name
    return method


_OWN_COLLECTIVES = "pass an object of your own to fully_shard(..., backend=...), see docs/migration_guide.md"
_OWN_MEMORY = "on NCCL pass backend=SymmetricMemoryBackend() to fully_shard instead"
_NOTHING_LIKE_IT = "ya_fsdp has nothing like it, leave the call out"
# Switches of torch's class that reach into its own engine: without an override they would fail somewhere inside.
for _name, _way_out in {
    "set_custom_all_gather": _OWN_COLLECTIVES,
    "set_custom_reduce_scatter": _OWN_COLLECTIVES,
    "set_allocate_memory_from_process_group_for_comm": _OWN_MEMORY,
    "set_symm_mem_for_comm": _OWN_MEMORY,
    "set_all_reduce_hook": _NOTHING_LIKE_IT,
    "set_reduce_scatter_max_input_buffers": _NOTHING_LIKE_IT,
    "set_separate_reduce_scatter_group": _NOTHING_LIKE_IT,
}.items():
    setattr(YaFSDPModule, _name, _unsupported(_name, _way_out))


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
        state.device = group.device if group.device.type != "meta" else state.device


def attach_state(module: nn.Module, state: YaFSDPState) -> None:
    """Gives a module its unit and the methods of :class:`YaFSDPModule`."""
    insert_module_state(module, state)
    module.__class__ = _sharded_class(type(module))
    module.register_state_dict_pre_hook(_before_state_dict)  # type: ignore[no-untyped-call]
    module.register_state_dict_post_hook(strip_wrapper_names)  # type: ignore[no-untyped-call]
    module.register_load_state_dict_pre_hook(add_wrapper_names)  # type: ignore[no-untyped-call]
    module.register_load_state_dict_post_hook(_after_load_state_dict)  # type: ignore[no-untyped-call]


def _sharded_class(cls: type) -> type:
    """The user's class with :class:`YaFSDPModule` in front; libraries strip the ``FSDP`` of the name when they save."""
    if cls not in _classes:
        _classes[cls] = type(f"FSDP{cls.__name__}", (YaFSDPModule, cls), {"__doc__": cls.__doc__})
    return _classes[cls]
