"""Bytes that a model will take on one rank, by arithmetic: nothing is allocated, and no process group is needed.

The engine's own layout, buffer plan and staging limit say what each unit takes; a walk through one step adds up what
is live at the same time. Activations depend on the model's code, not on the engine: the caller brings them, measured.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

import torch
from torch import nn

from ya_fsdp.layout import FlatLayout, ParamSpec, plan_contiguous
from ya_fsdp.layout.columns import column_chunks
from ya_fsdp.layout.planner import aligned_elements
from ya_fsdp.policy import MixedPrecisionPolicy, ResolvedDtypes
from ya_fsdp.runtime.buffer_plan import BucketInfo, plan_buffers
from ya_fsdp.runtime.lookup import is_lookup
from ya_fsdp.runtime.reducer import MAX_STAGING_BYTES

__all__ = ["Activations", "MemoryEstimate", "ParamInfo", "Stage", "UnitSpec", "describe_unit", "estimate_memory"]

# Tensors of state that are like the parameter, and bytes beside: Adam counts steps in a 32-bit scalar per parameter.
_OPTIMIZERS = {"adamw": (2, 4), "momentum": (1, 0), "sgd": (0, 0)}


@dataclass(frozen=True, slots=True)
class ParamInfo:
    """What decides where a parameter goes.

    Attributes:
        name: Name for messages.
        shape: Shape of the full parameter.
        dtype: Dtype of the master weights.
        requires_grad: Whether it is trained.
    """

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype = torch.float32
    requires_grad: bool = True


@dataclass(frozen=True, slots=True)
class UnitSpec:
    """A unit that is to be sharded.

    Attributes:
        name: Name for messages.
        kind: Equal for units that are repetitions of one another.
        params: Its parameters, in the order of the module.
        is_kept: It stays gathered between forward and backward (``reshard_after_forward=False``).
        is_root: It is gathered for the whole step, because every other unit runs inside of it.
        is_lookup: Its backward reads no weights, so it is not gathered for it (an embedding).
    """

    name: str
    kind: str
    params: tuple[ParamInfo, ...]
    is_kept: bool = False
    is_root: bool = False
    is_lookup: bool = False


@dataclass(frozen=True, slots=True)
class Activations:
    """Bytes of a stage beside parameters and buffers, measured on one device. Units: bytes.

    Attributes:
        forward_peak: Most that was live in the forward, above what was live when it began.
        forward_delta: What the forward left behind for the backward.
        backward_peak: Most that was live in the backward, above what was live when it began, gradients of the
            stage's full parameters included.
        backward_delta: What is live behind the backward less what was live when it began, without those gradients.
    """

    forward_peak: int = 0
    forward_delta: int = 0
    backward_peak: int = 0
    backward_delta: int = 0


@dataclass(frozen=True, slots=True)
class Stage:
    """One stretch of the forward, and of the backward: a unit runs, or one of several modules of a unit.

    Attributes:
        unit: Index of the unit.
        activations: What the stage holds meanwhile.
    """

    unit: int
    activations: Activations = field(default_factory=Activations)


@dataclass(frozen=True)
class MemoryEstimate:
    """What one rank will take. Units: bytes, except for the counts.

    Attributes:
        parameters: Sharded master weights, padding included.
        gradients: Their gradients.
        optimizer: State of the optimizer, of rank 0, which has the most.
        resting: Between two steps, gradients freed. On CPU the shared gather buffers come on top, which stay there.
        initial_peak: Most while the model is being sharded, one unit at a time.
        step_peak: Most in a step.
        peak_moment: When that is.
        peak_parts: What it is made of.
        num_units: Units that have parameters.
        num_parameters: Elements of the full model.
    """

    parameters: int
    gradients: int
    optimizer: int
    resting: int
    initial_peak: int
    step_peak: int
    peak_moment: str
    peak_parts: Mapping[str, int]
    num_units: int
    num_parameters: int


def describe_unit(
    name: str, modules: Iterable[nn.Module], taken: set[nn.Parameter], *, is_kept: bool = False, is_root: bool = False
) -> UnitSpec:
    """Describes a unit of one or several modules; its parameters may be on the meta device.

    Args:
        name: Name for messages.
        modules: The unit's modules.
        taken: Parameters of units described before, which are left out; those of this unit are added.
        is_kept: See :class:`UnitSpec`.
        is_root: See :class:`UnitSpec`.
    """
    modules = list(modules)
    params = []
    for module in modules:
        for param_name, param in module.named_parameters():
            if param not in taken:
                taken.add(param)
                params.append(ParamInfo(param_name, tuple(param.shape), param.dtype, param.requires_grad))
    is_lookup_unit = len(modules) == 1 and is_lookup(modules[0])
    return UnitSpec(name, type(modules[0]).__qualname__, tuple(params), is_kept, is_root, is_lookup_unit)


@dataclass(frozen=True)
class _Bucket:
    layout: FlatLayout
    dtypes: ResolvedDtypes
    requires_grad: bool

    @property
    def shard(self) -> int:
        return self.layout.shard_numel * self.dtypes.master.itemsize

    @property
    def gathered(self) -> int:
        return self.layout.padded_numel * self.dtypes.compute.itemsize

    @property
    def initial(self) -> int:
        return self.layout.numel * self.dtypes.master.itemsize

    @property
    def full_gradients(self) -> int:
        return self.layout.numel * self.dtypes.compute.itemsize if self.requires_grad else 0

    @property
    def gradients(self) -> int:
        return self.shard if self.requires_grad else 0

    @cached_property
    def staging(self) -> int:
        """What the reduction holds until the next one: its input, at most two chunks of it, and a narrower output."""
        if not self.requires_grad:
            return 0
        limit = MAX_STAGING_BYTES // self.dtypes.reduce.itemsize
        chunks = column_chunks(self.layout, limit if self.layout.padded_numel <= limit else limit // 2)
        inputs = sum(chunk.width for chunk in chunks[:2]) * self.layout.world_size * self.dtypes.reduce.itemsize
        is_cast = self.dtypes.accumulate != self.dtypes.master
        return inputs + (self.layout.shard_numel * self.dtypes.accumulate.itemsize if is_cast else 0)

    def optimizer(self, tensors: int, beside: int) -> int:
        if not self.requires_grad:
            return 0
        held = sum(piece.numel for piece in self.layout.local_slices(0))
        return held * tensors * self.dtypes.master.itemsize + beside * len(self.layout.spans)


def _buckets(unit: UnitSpec, world_size: int, policy: MixedPrecisionPolicy, alignment: int) -> list[_Bucket]:
    members: dict[tuple[ResolvedDtypes, bool], list[ParamSpec]] = {}
    for param in unit.params:
        key = (ResolvedDtypes.resolve(param.dtype, policy), param.requires_grad)
        members.setdefault(key, []).append(ParamSpec(f"{unit.name}.{param.name}", param.shape))
    buckets = []
    for (dtypes, requires_grad), specs in members.items():
        itemsizes = (dtypes.master.itemsize, dtypes.compute.itemsize, dtypes.reduce.itemsize)
        layout = plan_contiguous(specs, world_size, aligned_elements(alignment, *itemsizes))
        buckets.append(_Bucket(layout, dtypes, requires_grad))
    return buckets


class _Unit:
    """A unit's bytes."""

    def __init__(self, spec: UnitSpec, buckets: list[_Bucket], homes: list[int | None]) -> None:
        self.name = spec.name
        self.is_kept = spec.is_kept or spec.is_root
        self.is_root = spec.is_root
        self.is_lookup = spec.is_lookup and not self.is_kept
        self.own = sum(bucket.gathered for bucket, home in zip(buckets, homes, strict=True) if home is None)
        """Gather buffers that are allocated only while the unit is gathered."""
        self.shared = {home for home in homes if home is not None}
        """The shared buffers that it uses."""
        self.is_trainable = any(bucket.requires_grad for bucket in buckets)
        self.shard = sum(bucket.shard for bucket in buckets)
        self.initial = sum(bucket.initial for bucket in buckets)
        self.full_gradients = sum(bucket.full_gradients for bucket in buckets)
        self.gradients = sum(bucket.gradients for bucket in buckets)
        self.staging = max((bucket.staging for bucket in buckets), default=0)


def _plan(specs: Sequence[UnitSpec], buckets: list[list[_Bucket]]) -> tuple[list[_Unit], tuple[int, ...]]:
    """The units with the buffers that they use, and the bytes of the shared ones."""
    infos = [
        BucketInfo((spec.kind, bucket.dtypes, bucket.requires_grad), bucket.gathered, spec.is_kept or spec.is_root)
        for spec, members in zip(specs, buckets, strict=True)
        for bucket in members
    ]
    plan = plan_buffers(infos)
    assigned = iter(plan.assignments)
    homes = [[next(assigned) for _ in members] for members in buckets]
    units = [_Unit(spec, members, mine) for spec, members, mine in zip(specs, buckets, homes, strict=True)]
    return units, plan.shared_nbytes


def estimate_memory(
    units: Sequence[UnitSpec],
    world_size: int,
    policy: MixedPrecisionPolicy | None = None,
    *,
    stages: Sequence[Stage] | None = None,
    optimizer: str = "adamw",
    alignment: int = 8,
) -> MemoryEstimate:
    """Estimates what one rank takes at rest, while the model is sharded, and at the peak of a step.

    Args:
        units: The units in the order in which they are sharded; a root last.
        world_size: Ranks that the model is sharded over.
        policy: Dtypes.
        stages: The course of a forward; by default every unit but the root runs once, without activations.
        optimizer: ``adamw`` (two moments per element, in the dtype of the master weights), ``momentum`` or ``sgd``.
        alignment: ``shard_alignment``.

    Raises:
        ValueError: If the world size is not positive, a stage names no unit, or the optimizer is not known.
    """
    if optimizer not in _OPTIMIZERS:
        raise ValueError(f"optimizer: expected one of {', '.join(_OPTIMIZERS)}, got {optimizer!r}")
    if world_size < 1:
        raise ValueError(f"world_size: expected a positive number of ranks, got {world_size}")
    if stages is None:
        stages = [Stage(index) for index, unit in enumerate(units) if not unit.is_root]
    if wrong := [stage.unit for stage in stages if not 0 <= stage.unit < len(units)]:
        raise ValueError(f"stages name the units {wrong}, but there are only {len(units)}")
    buckets = [_buckets(unit, world_size, policy or MixedPrecisionPolicy(), alignment) for unit in units]
    planned, shared = _plan(units, buckets)
    parameters = sum(unit.shard for unit in planned)
    state = sum(bucket.optimizer(*_OPTIMIZERS[optimizer]) for members in buckets for bucket in members)
    base = {"parameters": parameters, "optimizer": state}
    moments = ((moment, {**base, **parts}) for moment, parts in _Step(planned, stages, shared).moments())
    peak_moment, parts = max(moments, key=lambda pair: sum(pair[1].values()))
    return MemoryEstimate(
        parameters=parameters,
        gradients=sum(unit.gradients for unit in planned),
        optimizer=state,
        resting=parameters + state,
        initial_peak=_initial_peak(planned),
        step_peak=sum(parts.values()),
        peak_moment=peak_moment,
        peak_parts=parts,
        num_units=sum(bool(members) for members in buckets),
        num_parameters=sum(bucket.layout.numel for members in buckets for bucket in members),
    )


def _initial_peak(units: Iterable[_Unit]) -> int:
    """Each unit is whole beside the shards of those before it and its own."""
    peak = shards = 0
    for unit in units:
        shards += unit.shard
        peak = max(peak, shards + unit.initial)
    return peak


class _Step:
    """The moments of one step, in order, and what is live in each, beside parameters and optimizer."""

    def __init__(self, units: Sequence[_Unit], stages: Sequence[Stage], shared: Sequence[int]) -> None:
        self._units = units
        self._stages = stages
        self._shared = shared
        self._first: dict[int, int] = {}
        self._first_tenant: dict[int, int] = {}
        for place, stage in enumerate(stages):
            self._first.setdefault(stage.unit, place)
            for buffer in units[stage.unit].shared:
                self._first_tenant.setdefault(buffer, place)
        self._activations = self._gradients = self._staging = 0
        self._late: list[_Unit] = []

    def moments(self) -> Iterator[tuple[str, dict[str, int]]]:
        yield from self._forward()
        yield from self._backward()
        yield from self._late_reductions()
        yield "optimizer", self._parts(self._gathered((), 0))

    def _parts(self, gathered: int, activations: int = 0, staging: int = 0) -> dict[str, int]:
        return {
            "gradients": self._gradients,
            "gathered parameters": gathered,
            "reduction": staging,
            "activations and full gradients": activations + sum(unit.full_gradients for unit in self._late),
        }

    def _forward(self) -> Iterator[tuple[str, dict[str, int]]]:
        for place, stage in enumerate(self._stages):
            reached = {stage.unit, *(following.unit for following in self._stages[place + 1 : place + 2])}
            kept = {other.unit for other in self._stages[:place] if self._units[other.unit].is_kept}
            live = self._activations + stage.activations.forward_peak
            gathered = self._gathered(reached | kept, len(self._stages))
            yield f"forward of {self._units[stage.unit].name}", self._parts(gathered, live)
            self._activations += stage.activations.forward_delta

    def _backward(self) -> Iterator[tuple[str, dict[str, int]]]:
        for place in reversed(range(len(self._stages))):
            stage, unit = self._stages[place], self._units[self._stages[place].unit]
            kept = {other.unit for other in self._stages[:place] if self._units[other.unit].is_kept}
            ahead = kept | self._for_backward(self._stages[max(0, place - 1) : place])
            live = self._activations + stage.activations.backward_peak
            gathered = self._gathered(ahead | self._for_backward([stage]), place + 1)
            yield f"backward of {unit.name}", self._parts(gathered, live, self._staging)
            self._activations += stage.activations.backward_delta
            if self._first[stage.unit] != place:
                continue  # tied: autograd holds its gradient until the other part has come
            if self._has_gradient_of_inputs(place):
                yield self._reduce(unit, self._gathered(ahead, place), unit.full_gradients)
            else:
                # No node of autograd marks the end of it, so the reduction waits for the end of the backward.
                self._late.append(unit)

    def _for_backward(self, stages: Iterable[Stage]) -> set[int]:
        return {stage.unit for stage in stages if not self._units[stage.unit].is_lookup}

    def _has_gradient_of_inputs(self, place: int) -> bool:
        return any(self._units[stage.unit].is_trainable for stage in self._stages[:place])

    def _late_reductions(self) -> Iterator[tuple[str, dict[str, int]]]:
        self._late = [*(unit for unit in self._units if unit.is_root), *self._late]
        while self._late:
            yield self._reduce(self._late[0], self._gathered((), 0), 0)
            del self._late[0]

    def _reduce(self, unit: _Unit, gathered: int, full_gradients: int) -> tuple[str, dict[str, int]]:
        self._gradients += unit.gradients
        self._staging = unit.staging
        return f"reduction of {unit.name}", self._parts(gathered, self._activations + full_gradients, unit.staging)

    def _gathered(self, indices: Iterable[int], num_stages: int) -> int:
        """Gather buffers while these units are gathered and the backward has so many stages before it.

        It frees each shared buffer behind its first tenant.
        """
        always = sum(unit.own for unit in self._units if unit.is_root)
        shared = sum(self._shared[buffer] for buffer, place in self._first_tenant.items() if place < num_stages)
        return shared + always + sum(self._units[i].own for i in set(indices))
