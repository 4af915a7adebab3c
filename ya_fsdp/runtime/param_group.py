"""``YaFSDPParamGroup``: one bucket of a unit, its parameters of one mesh, one dtype and one trainability.

The bucket owns a flat shard of master weights. :meth:`YaFSDPParamGroup.gather` fills a buffer of which the unsharded
parameters are views; :meth:`YaFSDPParamGroup.post_backward` gives the buffer back and reduces the gradients into a flat
gradient shard of which every parameter's ``.grad`` is a view.
"""

import logging
from collections.abc import Callable, Hashable
from functools import partial
from typing import Any

import torch
from torch import nn

from ya_fsdp._common import ShardedState, TrainingState
from ya_fsdp._torch_compat import will_accumulate
from ya_fsdp.comm import Collectives, Pending
from ya_fsdp.layout import FlatLayout
from ya_fsdp.policy import CPUOffloadPolicy, OffloadPolicy, ResolvedDtypes
from ya_fsdp.runtime.buffers import Buffer
from ya_fsdp.runtime.comm_context import YaFSDPCommContext
from ya_fsdp.runtime.debug import DEBUG
from ya_fsdp.runtime.device import Event
from ya_fsdp.runtime.gradients import member_views
from ya_fsdp.runtime.hooks import watch_inputs
from ya_fsdp.runtime.mesh import ShardMesh
from ya_fsdp.runtime.param import ParamSwitch, YaFSDPParam
from ya_fsdp.runtime.reducer import GradientReducer
from ya_fsdp.runtime.settings import UnitPhase, UnitSettings

__all__ = ["YaFSDPParamGroup", "allocate_shard"]

_log = logging.getLogger("ya_fsdp")


def allocate_shard(numel: int, dtype: torch.dtype, device: torch.device, offload: OffloadPolicy) -> torch.Tensor:
    """A flat shard of zeros, in pinned memory if that is where it is to live. Shapes: ``[numel]``."""
    pinned = isinstance(offload, CPUOffloadPolicy) and offload.pin_memory and device.type == "cpu"
    return torch.zeros(numel, dtype=dtype, device=device, pin_memory=pinned and torch.accelerator.is_available())


class YaFSDPParamGroup:
    """One bucket of a unit.

    Args:
        kind: Equal for buckets that are repetitions of one another; see the buffer plan.
        params: The parameters, in layout order; their sharded forms view ``shard``.
        layout: Where they lie.
        shard: This rank's master weights. Shapes: ``[layout.shard_numel]``.
        mesh: Mesh to shard over.
        dtypes: Dtypes of all parameters of the bucket.
        device: Where the bucket is gathered and its gradients are reduced.
        offload: Where the shard lives.
        settings: The unit's switches.
        phase: The unit's place in its step.
    """

    _comm: YaFSDPCommContext
    """Comes with the root; see :meth:`attach`."""

    def __init__(
        self,
        kind: Hashable,
        params: list[YaFSDPParam],
        layout: FlatLayout,
        shard: torch.Tensor,
        mesh: ShardMesh,
        dtypes: ResolvedDtypes,
        device: torch.device,
        offload: OffloadPolicy,
        settings: UnitSettings,
        phase: UnitPhase,
    ) -> None:
        self.kind = kind
        self.params = params
        self.layout = layout
        self.shard = shard
        self.mesh = mesh
        self.dtypes = dtypes
        self.device = device
        self.offload = offload
        self.is_offloaded = isinstance(offload, CPUOffloadPolicy) and device.type != "cpu"
        """The shard lives in host memory while the bucket computes on an accelerator."""
        self.settings = settings
        self.phase = phase
        self.sharded_state = ShardedState.SHARDED
        self.open_forwards = 0
        """Forwards whose backward has not passed the unit's inputs yet."""
        self.is_kept = False
        """Gathered only to save the next gather: between forward and backward, or from a backward on."""
        self._kept_versions: list[int] = []
        self.reducer = GradientReducer(params, layout, mesh, settings)
        self._buffer: Buffer | None = None
        self.home: Buffer | None = None
        """The buffer that the plan gives to the bucket."""
        self._frees_buffer = False
        self._wire: torch.Tensor | None = None
        self._neighbours_piece: torch.Tensor | None = None
        """Kept between forward and backward where a smaller group of ranks holds the bucket together."""
        self._switch: ParamSwitch | None = None
        self._gather: Pending | None = None

    @property
    def name(self) -> str:
        """Name for messages: the bucket's first parameter."""
        return f"the bucket of {self.params[0].name}"

    @property
    def gathered_nbytes(self) -> int:
        """Bytes of the gathered bucket, padding included."""
        return self.layout.padded_numel * self.dtypes.compute.itemsize

    @property
    def is_trainable(self) -> bool:
        """Whether any parameter wants a gradient."""
        return any(param.sharded_param.requires_grad for param in self.params)

    def trainable_unsharded(self) -> list[nn.Parameter]:
        """The unsharded parameters that want a gradient."""
        unsharded = [param.unsharded_param for param in self.params]
        return [param for param in unsharded if param is not None and param.requires_grad]

    @property
    def shares_buffer(self) -> bool:
        """Whether the bucket takes turns with others in one buffer."""
        return self.home is not None and self.home.is_shared

    @property
    def buffers(self) -> list[Buffer]:
        """Gather buffers that the bucket uses."""
        return [buffer for buffer in (self.home, self._buffer) if buffer is not None]

    def attach(self, comm: YaFSDPCommContext, home: Buffer, *, is_first_tenant: bool) -> None:
        """Joins a root.

        Args:
            comm: What to communicate through.
            home: Where to gather to.
            is_first_tenant: No other bucket is gathered there before this one in a forward, or after it in a backward.
        """
        assert self.sharded_state is ShardedState.SHARDED
        self._comm = comm
        self.home = home
        # On CPU, where fresh memory is paid for page by page, it is worth more to keep it.
        self._frees_buffer = is_first_tenant and not comm.runtime.is_async_host

    def check_materialised(self) -> None:
        """Raises RuntimeError if the parameters are still on the meta device."""
        if self.shard.is_meta:
            raise RuntimeError(
                f"{self.params[0].name} is still on the meta device; call to_empty(device=...) on the model and "
                f"initialise or load its parameters before the first forward"
            )

    # ---- gather ------------------------------------------------------------------------------------------------------

    def gather(self) -> None:
        """Starts the all-gather into the bucket's buffer; does nothing if that has happened already."""
        self.is_kept = False
        if self.sharded_state is ShardedState.SHARDED:
            self._gather = self._start_gather()
            self.sharded_state = ShardedState.GATHERING

    def _start_gather(self) -> Pending:
        wire, free = self._occupy()
        runtime = self._comm.runtime
        return runtime.issue(runtime.gather_stream, free, partial(self._send, wire, async_op=runtime.is_async_host))

    def _send(self, wire: torch.Tensor, *, async_op: bool) -> Pending | None:
        piece, ranks = self.shard, self.mesh.shard
        if self._neighbours_piece is not None:
            piece, ranks = self._neighbours_piece, self._neighbours()
        if wire.dtype != piece.dtype or wire.device != piece.device:
            # The cast is written where the gather wants this rank's piece: no copy of the shard outlives it.
            master, piece = piece, wire[ranks.rank * piece.numel() : (ranks.rank + 1) * piece.numel()]
            piece.copy_(master, non_blocking=True)
        return ranks.all_gather(wire, piece, async_op=async_op)

    def wait_for_gather(self) -> None:
        """Waits for the gather and shows the unsharded parameters in the modules."""
        if self.sharded_state is not ShardedState.GATHERING:
            return
        assert self._gather is not None
        self._gather.wait()
        self._gather = None
        self._end_gather()
        assert self._switch is not None
        self._switch.to_unsharded()
        self.sharded_state = ShardedState.UNSHARDED
        if DEBUG.is_on:
            self._check_unsharded()

    def _end_gather(self) -> None:
        """What is left to do between the gather and its use; nothing where parameters are views of the buffer."""

    def _check_unsharded(self) -> None:
        assert self._buffer is not None
        tenant = self._buffer.tenant
        assert tenant is self, f"{self.name} is gathered, but its buffer belongs to {tenant and tenant.name}"
        for param in self.params:
            shown = param.sites[0].current
            assert shown is param.unsharded_param, f"{param.name} is gathered, but its module shows {type(shown)}"

    def reshard(self) -> None:
        """Shows the sharded parameters again and gives the buffer back."""
        if self.sharded_state is ShardedState.SHARDED:
            return
        if self._gather is not None:  # gathered ahead of a forward or backward that did not come
            self._gather.wait()
            self._gather = None
        if self.sharded_state is ShardedState.UNSHARDED:
            assert self._switch is not None
            self._switch.to_sharded()
        self.sharded_state = ShardedState.SHARDED
        self.is_kept = False
        assert self._buffer is not None
        self._buffer.vacate()

    def reshard_to_neighbours(self) -> None:
        """Reshards until the backward to a smaller group of ranks, of which each keeps a larger piece."""
        size = self.settings.reshard_group_size
        if self.sharded_state is ShardedState.UNSHARDED:
            assert self._wire is not None
            assert size is not None
            numel, rank = self._wire.numel() // size, self._neighbours().rank
            self._neighbours_piece = self._wire[rank * numel : (rank + 1) * numel].clone()
        self.reshard()

    def _neighbours(self) -> Collectives:
        assert self.settings.reshard_group_size is not None
        return self.mesh.smaller(self.settings.reshard_group_size)

    def keep(self) -> None:
        """Stays gathered although nobody uses the parameters now."""
        if self.sharded_state is ShardedState.UNSHARDED:
            self.is_kept = True
            self._kept_versions = self._versions()

    def drop_kept(self, *, from_forward: bool) -> None:
        """Reshards what was kept if its values may be out of date.

        Args:
            from_forward: Whether it was kept from a forward. Then nothing tells whether weights were written (a write
                through ``.data`` leaves no trace). What was kept from a backward, which the user must ask for, goes if
                an operator wrote to a shard since.
        """
        self._neighbours_piece = None
        if not self.open_forwards and self.reducer.has_gradients():
            self.refuse_stray_gradients()
        if self.is_kept and (from_forward or self._versions() != self._kept_versions):
            self.reshard()

    def yield_buffer(self) -> bool:
        """Gives the buffer to another bucket if it is occupied only to save a gather."""
        # Not in use: gathered ahead in vain, or waiting for the last gradients of a backward whose nodes have all run
        # (no forward is open, so no node marks the end of it).
        is_idle = self.sharded_state is ShardedState.GATHERING or (
            self.phase.training_state is TrainingState.PRE_BACKWARD and not self.open_forwards
        )
        if (self.is_kept and not self.phase.is_borrowed) or is_idle:
            self.reshard()
        return self.sharded_state is ShardedState.SHARDED

    def allocate(self, nbytes: int) -> torch.Tensor | None:
        """Memory that the bucket's collectives want to gather into; see ``Collectives.allocate``."""
        return self.mesh.shard.allocate(nbytes, self._comm.runtime.device)

    def _versions(self) -> list[int]:
        return [param.sharded_param._version for param in self.params]

    def _occupy(self) -> tuple[torch.Tensor, Event | None]:
        """Enters the buffer; moves to one of the bucket's own if the planned one is taken."""
        assert self.home is not None
        buffer = self.home
        tenant = buffer.tenant if buffer.is_occupied else None
        if tenant is not None and not tenant.yield_buffer():
            if self.phase.has_pending_graph():
                raise RuntimeError(
                    f"{self.name} and {tenant.name} need the same gather buffer at the same time, and the first "
                    f"has a forward whose backward is pending, so it cannot move. Reshard one of the two units, or "
                    f"call set_reshard_after_forward(False) on one of them before the first forward."
                )
            _log.warning(
                "%s and %s are gathered at the same time: the first gets a gather buffer of its own (%d bytes)",
                self.name,
                tenant.name,
                self.gathered_nbytes,
            )
            buffer = self.home = self._comm.pool.own(self.gathered_nbytes)
        flat, free = buffer.occupy(self)
        if buffer is not self._buffer:
            self._bind(flat)
            self._buffer = buffer
        assert self._wire is not None
        return self._wire, free

    def _bind(self, flat: torch.Tensor) -> None:
        """Makes the wire tensor and the unsharded parameters views of a buffer, each with its own version counter."""
        typed = flat[: self.gathered_nbytes].view(self.dtypes.compute)
        self._wire = typed.data
        for param, part in zip(self.params, member_views(typed.data, self.layout.partition), strict=True):
            param.init_unsharded_param((part,), self.dtypes.compute)
        self._switch = ParamSwitch(self.params)

    # ---- backward ----------------------------------------------------------------------------------------------------

    def _register_post_backward_hook(
        self, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Wraps the inputs of a forward that require gradients, so that their backward ends this unit's."""
        args, kwargs, found = watch_inputs(self, args, kwargs)
        if found:
            self.open_forwards += 1
        return args, kwargs

    def post_backward(self) -> None:
        """Reshards and, when the last open forward's backward has passed, reduces.

        Every rank reduces at the same place whether or not its own parameters got a gradient: the number of open
        forwards is the same on all ranks, gradients need not be.
        """
        if self.phase.training_state is TrainingState.IDLE:
            self.reset()
            raise self._stray_gradient()
        self.phase.move_to(TrainingState.POST_BACKWARD)
        self.open_forwards = max(0, self.open_forwards - 1)
        if not self.settings.reshard_after_backward:
            self.keep()
        else:
            self.reshard()
            if self._frees_buffer and self.home is not None and not (self.home.is_occupied or DEBUG.is_on):
                self.home.free()  # the backward has left its last tenant
        if not self.open_forwards:
            self._neighbours_piece = None
            self.reduce_gradients()

    def reduce_gradients(self) -> None:
        """Reduces the gradients that autograd left, or keeps them while synchronisation is off."""
        grads = self.reducer.take()
        if grads is not None or any(will_accumulate(param) for param in self.trainable_unsharded()):
            self.reducer.reduce(grads, self._comm, self.dtypes, self.device, self.shard)

    def refuse_stray_gradients(self) -> None:
        """Raises RuntimeError if a parameter got a gradient in a backward that passed the unit's outputs by."""
        if self.reducer.has_gradients():
            self.reset()
            raise self._stray_gradient()

    def _stray_gradient(self) -> RuntimeError:
        return RuntimeError(
            f"{self.name}: the backward came to its unit past the outputs of the unit, so its parameters were not "
            f"gathered and gradients would be wrong. The loss uses a tensor that the unit computed and did not return, "
            f"but kept in an attribute, for a hook, or in an object that is no container or dataclass. Return it from "
            f"the unit's forward, or make the module that computes it a unit of its own with fully_shard."
        )

    # ---- upkeep ------------------------------------------------------------------------------------------------------

    def reset(self) -> None:
        """Returns to rest after an exception: nothing gathered, no gradient half reduced or half accumulated."""
        self.reshard()
        self.reducer.reset()
        self.open_forwards = 0
        self._neighbours_piece = None

    def adopt_parameters(self, resolve: Callable[[torch.dtype], ResolvedDtypes]) -> None:
        """Takes over what became of the sharded parameters outside (moved, cast, or replaced by other slices).

        Args:
            resolve: Dtypes for a new master dtype.

        Raises:
            RuntimeError: If a module shows something that is not this bucket's slice of the parameter.
        """
        self.reshard()
        for param in self.params:
            param.adopt()
        if self._switch is not None:
            self._switch = ParamSwitch(self.params)
        locals_ = [p.sharded_param._local_tensor for p in self.params]  # type: ignore[attr-defined]
        first = locals_[0]
        views = self.reducer.local_views(self.shard)
        in_place = first.device == self.shard.device and all(
            not new.numel()
            or (
                new.untyped_storage()._cdata == old.untyped_storage()._cdata
                and new.storage_offset() == old.storage_offset()
                and new.dtype == old.dtype
            )
            for new, old in zip(locals_, views, strict=True)
        )
        if in_place:
            return
        if any(local.dtype != first.dtype or local.device != first.device for local in locals_):
            raise RuntimeError(
                f"{self.name}: its parameters were changed to different dtypes or devices, "
                f"{sorted({f'{local.dtype} on {local.device}' for local in locals_})}; change all of them alike"
            )
        if self.is_offloaded and first.device.type != "cpu":
            raise RuntimeError(
                f"{self.name}: its shards live in host memory (CPUOffloadPolicy) but were moved to {first.device}; "
                f"leave them on cpu, the engine moves what is gathered"
            )
        shard = allocate_shard(self.layout.shard_numel, first.dtype, first.device, self.offload)
        for param, local, view in zip(self.params, locals_, self.reducer.local_views(shard), strict=True):
            view.copy_(local)
            param.sharded_param._local_tensor = view  # type: ignore[attr-defined]
        self.shard, self.dtypes = shard, resolve(first.dtype)
        if not self.is_offloaded:
            self.device = shard.device
        self._buffer = None  # the unsharded parameters are rebuilt at the next gather
