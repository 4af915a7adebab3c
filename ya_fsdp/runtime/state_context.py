"""What all units of one root share."""

import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import Protocol

from torch.distributed import ProcessGroup

from ya_fsdp._common import ShardedState
from ya_fsdp.runtime.buffer_plan import NUM_SHARED, BucketInfo, plan_buffers
from ya_fsdp.runtime.buffers import Buffer, BufferPool
from ya_fsdp.runtime.comm_context import YaFSDPCommContext
from ya_fsdp.runtime.device import Event
from ya_fsdp.runtime.order_check import OrderCheck
from ya_fsdp.runtime.param_group import YaFSDPParamGroup
from ya_fsdp.runtime.prefetch import Prefetch
from ya_fsdp.runtime.settings import UnitPhase, UnitSettings

__all__ = ["UnitState", "YaFSDPStateContext"]


class UnitState(Protocol):
    """What the context asks of a unit."""

    groups: list[YaFSDPParamGroup]
    has_parts: bool
    settings: UnitSettings
    phase: UnitPhase
    prefetch: Prefetch

    def drop_kept(self) -> None:
        """Reshards what an earlier forward kept."""

    def reshard(self) -> None:
        """Shows sharded parameters and gives the buffers back."""

    def end_part_forward(self) -> Callable[[], None] | None:
        """Ends a forward that left out modules of the unit; returns what gathers the unit for the backward."""

    def finish_backward(self) -> None:
        """Reduces what no node of the backward has reduced."""

    def reset(self) -> None:
        """Returns to rest after an exception."""


class YaFSDPStateContext:
    """What all states of one root share. Holds the states weakly: modules own them.

    Attributes:
        comm: Streams, buffers, the reduction in flight.
        iter_forward_root: The state whose forward is the outermost one now.
        is_last_backward: Whether the coming backward ends the iteration.
        post_optim_event: Event that the gathers of the next forward wait for, instead of the current stream.
        in_backward: A backward of this root's units is under way.
    """

    def __init__(self, states: Iterable[UnitState], comm: YaFSDPCommContext) -> None:
        self._states = [weakref.ref(state) for state in states]
        self.comm = comm
        self.iter_forward_root: UnitState | None = None
        self.is_last_backward = True
        self.post_optim_event: Event | None = None
        self.in_backward = False
        self.grad_enabled = True
        self.is_plan_stale = False
        self._peers: list[weakref.ref[YaFSDPStateContext]] = []
        self.order_check = OrderCheck(self._widest_group())

    def _widest_group(self) -> ProcessGroup | None:
        meshes = [group.mesh for state in self.all_states for group in state.groups]
        widest = max(meshes, key=lambda mesh: mesh.shard.world_size, default=None)
        return None if widest is None else widest.shard_group

    @property
    def all_states(self) -> list[UnitState]:
        """The states in the root's tree, in module order."""
        return [state for ref in self._states if (state := ref()) is not None]

    def share_with(self, others: "Sequence[YaFSDPStateContext]") -> None:
        """Makes several roots one for streams and gather buffers; each keeps its own order of units."""
        peers = [self, *others]
        for context in others:
            context.comm.runtime = self.comm.runtime
        for context in peers:
            context._peers = [weakref.ref(peer) for peer in peers]
        self.plan_buffers()

    @property
    def _planned_together(self) -> "list[YaFSDPStateContext]":
        return [context for ref in self._peers if (context := ref()) is not None] or [self]

    def plan_buffers(self) -> None:
        """Gives every bucket its gather buffer; units that are gathered further ahead get more of them to share."""
        contexts = self._planned_together
        units = [(context, state) for context in contexts for state in context.all_states]
        buckets = [(context, state, group) for context, state in units for group in state.groups]
        infos = [BucketInfo(group.kind, group.gathered_nbytes, state.settings.is_kept) for _, state, group in buckets]
        reach = max((state.prefetch.reach for _, state in units), default=0)
        pool = BufferPool(plan_buffers(infos, max(NUM_SHARED, reach + 1)), self.comm.runtime)
        for context in contexts:
            context.comm.pool, context.is_plan_stale = pool, False
        seen: set[Buffer] = set()
        for index, (context, _, group) in enumerate(buckets):
            home = pool.home(index, group.gathered_nbytes)
            group.attach(context.comm, home, is_first_tenant=home not in seen)
            seen.add(home)

    def replan_buffers(self) -> None:
        """Plans anew, after a change of the prefetch lists, once nothing points into the buffers."""
        if not self.is_plan_stale:
            return
        states = [state for context in self._planned_together for state in context.all_states]
        if not any(state.phase.has_pending_graph() for state in states):
            for state in states:
                state.reshard()
            self.plan_buffers()

    def reshard_unused(self) -> None:
        """Gives back what was gathered ahead and not used."""
        for state in self.all_states:
            for group in state.groups:
                if group.sharded_state is ShardedState.GATHERING:
                    group.reshard()

    def reset(self) -> None:
        """Returns every unit to rest after an exception in a forward or backward."""
        self.comm.reset()
        self.iter_forward_root = None
        self.in_backward = False
        for state in self.all_states:
            state.reset()
