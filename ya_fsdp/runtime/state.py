"""``YaFSDPState``: the step of one unit, and what the units of one root share.

The life of a unit in a training step, in the order of this file: ``_pre_forward`` gathers, ``_post_forward`` reshards
and watches the outputs, ``_pre_backward`` gathers again and looks ahead, the buckets' ``post_backward`` reshards and
reduces, and ``_root_post_backward_final_callback`` ends the backward for all units.
"""

import weakref
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import nn

from ya_fsdp._common import ShardedState, TrainingState
from ya_fsdp._torch_compat import _State, queue_backward_callback
from ya_fsdp.policy import MixedPrecisionPolicy
from ya_fsdp.runtime.arrivals import ArrivalWatch
from ya_fsdp.runtime.cast import cast_floating, move_to_device
from ya_fsdp.runtime.comm_context import YaFSDPCommContext
from ya_fsdp.runtime.compiler import refuse_compiled_autograd, untraced
from ya_fsdp.runtime.contributions import resolve_missing
from ya_fsdp.runtime.device import DeviceRuntime
from ya_fsdp.runtime.hooks import UnitHooks, watch_outputs
from ya_fsdp.runtime.lookup import is_lookup
from ya_fsdp.runtime.param_group import YaFSDPParamGroup
from ya_fsdp.runtime.prefetch import Prefetch
from ya_fsdp.runtime.settings import ForwardGraph, UnitPhase, UnitSettings
from ya_fsdp.runtime.state_context import YaFSDPStateContext
from ya_fsdp.runtime.tree import units_below

__all__ = ["YaFSDPCommContext", "YaFSDPState", "YaFSDPStateContext"]


class YaFSDPState(_State):
    """One unit: a module, or several that are gathered together, with its buckets and its place in the step.

    Args:
        modules: The unit's modules.
        policy: Dtypes.
        device: Where the unit computes.
        settings: Switches of the unit.
        reshard_by_default: Whether ``reshard_after_forward`` was left to the engine: a root keeps its parameters.
    """

    def __init__(
        self,
        modules: Sequence[nn.Module],
        policy: MixedPrecisionPolicy,
        device: torch.device,
        settings: UnitSettings,
        *,
        reshard_by_default: bool,
    ) -> None:
        self.modules = [weakref.ref(module) for module in modules]
        self.has_parts = len(modules) > 1
        """The unit is of several modules, of which a forward may leave some out."""
        self._is_embedding = len(modules) == 1 and isinstance(modules[0], nn.Embedding)
        self.policy = policy
        self.device = device
        self.settings = settings
        self.reshard_by_default = reshard_by_default
        self.phase = UnitPhase(enter_backward=weakref.WeakMethod(self._pre_backward))
        self.groups: list[YaFSDPParamGroup] = []
        self.name = type(modules[0]).__name__
        self.prefetch = Prefetch()
        self._context: YaFSDPStateContext | None = None
        self._kept_from_forward = False
        self._arrivals = ArrivalWatch(self._all_arrived)
        # The modules' hooks own this object, and through it the state, so a deleted model leaves no cycle behind.
        self._hooks = weakref.ref(UnitHooks(modules, self))

    @property
    def training_state(self) -> TrainingState:
        """Where the unit is in its step."""
        return self.phase.training_state

    @property
    def context(self) -> YaFSDPStateContext:
        """What the units of the root share; exists from the root's first forward on."""
        assert self._context is not None, f"{self.name} has not joined a root yet"
        return self._context

    # ---- the root --------------------------------------------------------------------------------------------------

    def lazy_init(self) -> YaFSDPStateContext:
        """Makes this unit the root of all units below it, unless it belongs to a root already.

        Returns:
            What the units of the root share.

        Raises:
            RuntimeError: If a unit below is in the middle of a step under another root, or has no memory yet.
        """
        if self._context is not None:
            return self._context
        root = self.modules[0]()
        assert root is not None
        states = units_below(root, self)
        for state in states:
            if state._context is not None and any(group.open_forwards for group in state.groups):
                raise RuntimeError(
                    f"{self.name} becomes the root of {state.name}, which has a forward whose backward is pending; run "
                    f"the backward (or reset_iter_state()) first"
                )
        for group in (group for state in states for group in state.groups):
            group.check_materialised()
        comm = YaFSDPCommContext(DeviceRuntime(self.device))
        context = YaFSDPStateContext(states, comm)
        for state in states:
            state._context = context
            state.reshard()
        if self.reshard_by_default:
            self.settings.reshard_after_forward = False
        context.plan_buffers()
        return context

    def _root_pre_forward(self, args: Any, kwargs: Any) -> tuple[Any, Any]:
        context = self.context
        context.iter_forward_root = self
        context.order_check.begin()
        context.grad_enabled = torch.is_grad_enabled()
        runtime = context.comm.runtime
        # Gathers read what the optimizer (or anybody else) last wrote to the shards.
        behind_writes = context.post_optim_event or runtime.record()
        context.post_optim_event = None
        with runtime.on(runtime.gather_stream):
            runtime.wait(behind_writes)
        context.replan_buffers()
        for state in context.all_states:
            state.drop_kept()
        if runtime.is_async_host:
            return args, kwargs
        return move_to_device(args, self.device), move_to_device(kwargs, self.device)

    def drop_kept(self) -> None:
        """Reshards what an earlier forward kept, because weights may have changed since; forgets broken forwards."""
        if self.has_parts:
            self._reset_hooks()
        for group in self.groups:
            group.drop_kept(from_forward=self._kept_from_forward)
        self._kept_from_forward = self.phase.is_borrowed = False

    def _reset_hooks(self) -> bool:
        hooks = self._hooks()
        return hooks is not None and hooks.reset()

    # ---- forward -----------------------------------------------------------------------------------------------------

    def _pre_forward(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any]:
        if self.phase.training_state is TrainingState.PRE_BACKWARD:  # recomputation, whose backward is watched already
            self.wait_for_unshard()  # it has been gathered, unless its backward reads no weights
            return self._cast_inputs(args, kwargs)
        context = self._context or self.lazy_init()
        in_autograd = torch._C._current_graph_task_id() != -1
        if context.in_backward and not in_autograd:
            context.reset()  # the last backward broke off with an exception
        if context.iter_forward_root is None and not in_autograd:
            args, kwargs = self._root_pre_forward(args, kwargs)
        self.phase.move_to(TrainingState.FORWARD)
        if self.policy.param_dtype is not None:
            args, kwargs = self._cast_inputs(args, kwargs)
        if not in_autograd and not self.is_unsharded():
            context.order_check.enter(self.name)
        for group in self.groups:
            if group.sharded_state is not ShardedState.GATHERING:
                group.gather()
        if not in_autograd:
            context.comm.forward_order.record(self)
            self.prefetch.in_forward(self, context.comm)
        for group in self.groups:
            group.wait_for_gather()
        if torch.is_grad_enabled() and self.groups and not (in_autograd and self.groups[0].open_forwards):
            args, kwargs = self._watch_backward(args, kwargs)  # unless this recomputes a forward that is watched
        return args, kwargs

    def _forward_failed(self) -> None:
        """The unit's forward raised: everything returns to rest, so that the caller may go on."""
        if self._context is not None and torch._C._current_graph_task_id() == -1:
            self._context.reset()

    def _watch_backward(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any]:
        before = self.groups[0].open_forwards
        for group in self.groups:
            args, kwargs = group._register_post_backward_hook(args, kwargs)
        if self.groups[0].open_forwards > before:
            if self._arrivals.is_counting:
                self._arrivals.stop()
        else:
            self._arrivals.start([param for group in self.groups for param in group.trainable_unsharded()])
        return args, kwargs

    def _all_arrived(self) -> None:
        """Gives the buffers back; the reduction waits for the end of the backward.

        Which gradients arrive may differ between ranks, and the order of collectives must not.
        """
        if self.settings.reshard_after_backward:
            self.reshard()

    def _post_forward(self, module: nn.Module, args: Any, output: Any) -> Any:
        if self.policy.output_dtype is not None:
            output = cast_floating(output, self.policy.output_dtype)
        if self.phase.training_state is TrainingState.PRE_BACKWARD:
            return output
        context = self._context
        assert context is not None
        self._end_forward(context)
        left_open = self._end_root_forward(context) if context.iter_forward_root is self else []
        # Reentrant checkpointing runs without gradients what its backward will run again.
        comes_back = self._watch_forward(output, left_open) or not torch.is_grad_enabled()
        if comes_back and context.grad_enabled and torch._C._current_graph_task_id() == -1:
            context.comm.post_forward_order.record(self)
        return output

    def _part_forward(self, output: Any) -> None:
        if self.phase.training_state is not TrainingState.PRE_BACKWARD:
            self._watch_forward(output)

    def _is_outermost(self) -> bool:
        return self.context.iter_forward_root is self

    def _watch_forward(self, output: Any, left_open: Sequence[Callable[[], None]] = ()) -> bool:
        if not torch.is_grad_enabled():
            return False
        graph = self.phase.open_graph(left_open)
        return watch_outputs(output, partial(self._pre_backward, graph), self.phase)

    def _end_forward(self, context: YaFSDPStateContext) -> None:
        in_autograd = torch._C._current_graph_task_id() != -1
        is_kept = not self.settings.reshard_after_forward or self.phase.is_borrowed
        if in_autograd or (context.grad_enabled and is_kept):
            # Recomputed for a backward that follows at once, or asked to be kept.
            self._kept_from_forward = True
            for group in self.groups:
                group.keep()
        else:
            comes_back = context.grad_enabled and self.settings.reshard_group_size and self.gathers_in_backward()
            for group in self.groups:
                if comes_back:
                    group.reshard_to_neighbours()
                else:
                    group.reshard()
        self.phase.move_to(TrainingState.IDLE)

    def _end_root_forward(self, context: YaFSDPStateContext) -> list[Callable[[], None]]:
        context.iter_forward_root = None
        if context.order_check.end():
            context.comm.forward_order.end()
        else:
            context.comm.forward_order.abandon()
        in_parts = [state for state in context.all_states if state.has_parts]
        left_open = [gather for state in in_parts if (gather := state.end_part_forward()) is not None]
        context.reshard_unused()
        return left_open

    def end_part_forward(self) -> Callable[[], None] | None:
        """Ends a forward that left out modules of the unit; a loss may read a head's weight and never call the head.

        What it computed with the weight may lie in the graph, where no hook of the unit gathers for it. So the weight
        stays and, as another forward may release it, the root's backward starts by gathering it.
        """
        if not self._reset_hooks() or self.phase.training_state is not TrainingState.FORWARD:
            return None
        self.phase.is_borrowed = True
        self._end_forward(self.context)
        if self.context.grad_enabled:
            self.context.comm.post_forward_order.record(self)
        this = weakref.ref(self)
        return lambda: state._enter_backward(state.context) if (state := this()) is not None else None

    # ---- backward ----------------------------------------------------------------------------------------------------

    def _pre_backward(self, graph: ForwardGraph) -> None:
        context = self._context
        assert context is not None
        graph.has_run = True
        if not context.in_backward:
            refuse_compiled_autograd()
            context.in_backward = True
            queue_backward_callback(self._root_post_backward_final_callback)
        for gather in graph.left_open:
            gather()
        self._enter_backward(context)

    def _enter_backward(self, context: YaFSDPStateContext) -> None:
        if self.phase.training_state is TrainingState.PRE_BACKWARD and self.is_unsharded():
            return
        self.phase.move_to(TrainingState.PRE_BACKWARD)
        self._kept_from_forward = self.phase.is_borrowed = False
        if self.gathers_in_backward():
            for group in self.groups:
                if group.sharded_state is not ShardedState.GATHERING:
                    group.gather()
        self.prefetch.in_backward(self, context.comm)
        for group in self.groups:
            group.wait_for_gather()

    @untraced
    @torch.no_grad()
    def _root_post_backward_final_callback(self) -> None:
        """Ends a backward for all units: late reductions, missing gradients, memory."""
        context = self.context
        states = context.all_states
        for state in states:
            state.finish_backward()
        context.comm.finish_reduction()
        groups = [group for state in states for group in state.groups]
        if [group for group in groups if group.is_offloaded]:
            context.comm.runtime.synchronise()  # the host reads the gradients, and writes what gathers read
        resolve_missing(groups)
        context.reshard_unused()
        for state in states:
            state.phase.move_to(TrainingState.IDLE)
            if context.is_last_backward:
                for group in state.groups:
                    group.open_forwards = 0
        if context.is_last_backward:
            context.comm.post_forward_order.clear()
        context.in_backward = False

    def finish_backward(self) -> None:
        """Reduces what no node of the backward has reduced: see ``post_backward`` and ``_all_arrived``."""
        phase = self.phase.training_state
        for group in self.groups:
            if phase is TrainingState.PRE_BACKWARD:
                group.post_backward()
            elif phase is not TrainingState.POST_BACKWARD:
                group.refuse_stray_gradients()
                continue
            if group.open_forwards or group.reducer.has_gradients():
                group.reduce_gradients()

    # ---- looking ahead -----------------------------------------------------------------------------------------------

    def is_unsharded(self) -> bool:
        """Whether the modules show full parameters."""
        for group in self.groups:  # noqa: SIM110  a generator would take a call for each bucket
            if group.sharded_state is not ShardedState.UNSHARDED:
                return False
        return True

    def gathers_in_backward(self) -> bool:
        """Whether the unit's backward reads its parameters."""
        return self.settings.unshard_in_backward and not (self._is_embedding and is_lookup(self.modules[0]()))

    def wants_gather(self) -> bool:
        """Whether the unit's backward reads parameters that are not gathered."""
        for group in self.groups:
            if group.sharded_state is ShardedState.SHARDED:
                return self.gathers_in_backward()
        return False

    def gather_ahead(self) -> None:
        """Starts the unit's gathers if its buffers are free."""
        for group in self.groups:
            if group.sharded_state is ShardedState.SHARDED and group.home is not None and group.home.is_occupied:
                return  # a look ahead does not get in anybody's way
        for group in self.groups:
            group.gather()

    def set_prefetch(
        self, *, forward: "list[YaFSDPState] | None" = None, backward: "list[YaFSDPState] | None" = None
    ) -> None:
        """Fixes which units are gathered ahead in the forward or the backward."""
        self.prefetch.fix(forward=forward, backward=backward)
        self._want_new_plan()

    def want_own_buffers(self) -> None:
        """Leaves the shared buffers, once nothing points into them, if the unit is to stay gathered."""
        if self.settings.is_kept and any(group.shares_buffer for group in self.groups):
            self._want_new_plan()

    def _want_new_plan(self) -> None:
        if self._context is not None:
            self._context.is_plan_stale = True

    # ---- by hand -----------------------------------------------------------------------------------------------------

    def unshard(self) -> None:
        """Starts the unit's gathers."""
        self.lazy_init()
        runtime = self.context.comm.runtime
        written = runtime.record()
        with runtime.on(runtime.gather_stream):
            runtime.wait(written)
        for group in self.groups:
            group.gather()

    def wait_for_unshard(self) -> None:
        """Waits for the unit's gathers and shows full parameters."""
        for group in self.groups:
            group.gather()
            group.wait_for_gather()

    def reshard(self) -> None:
        """Shows sharded parameters and gives the buffers back."""
        for group in self.groups:
            group.reshard()

    def reset(self) -> None:
        """Returns to rest after an exception."""
        self._reset_hooks()
        self._kept_from_forward = self.phase.is_borrowed = False
        self.phase.training_state = TrainingState.IDLE
        for group in self.groups:
            group.reset()

    def _cast_inputs(self, args: Any, kwargs: Any) -> tuple[Any, Any]:
        dtype = self.policy.param_dtype
        if dtype is None or not self.policy.cast_forward_inputs:
            return args, kwargs
        return cast_floating(args, dtype), cast_floating(kwargs, dtype)
