"""``RaggedShardDTensor``: the type of a sharded parameter, its gradient and its optimizer state."""

import operator
from collections.abc import Iterable, Sequence
from typing import Any, ClassVar, cast

import torch
from torch.distributed.device_mesh import DeviceMesh

from ya_fsdp._torch_compat import DTensor, DTensorSpec, Placement, Replicate, Shard, TensorMeta, make_wrapper
from ya_fsdp.ragged import table
from ya_fsdp.ragged.convert import gather_full, scatter_mean, slice_full
from ya_fsdp.ragged.inner import plain
from ya_fsdp.ragged.placement import RaggedShard

__all__ = ["RaggedShardDTensor", "local_list"]


class RaggedShardDTensor(DTensor):
    """A DTensor of which this rank holds one contiguous, possibly empty slice of the flattened elements.

    Operators come from the project's own table (``ragged/ops.py``) and run on the local slices; one that has no meaning
    on a slice raises an error that names it.

    Shapes:
        The tensor has the full parameter's shape; ``to_local()`` has shape ``[local numel]``.

    Attributes:
        num_switches: How often ``requires_grad`` was set on any such tensor, so that the engine sees by one number that
            no parameter was frozen or thawed since it last looked.
    """

    num_switches: ClassVar[int] = 0

    @classmethod
    def wrap(cls, local: torch.Tensor, spec: DTensorSpec, *, requires_grad: bool = False) -> "RaggedShardDTensor":
        """Wraps a rank's slice; nothing is copied and nothing is checked."""
        return cast(RaggedShardDTensor, make_wrapper(cls, local, spec, requires_grad=requires_grad))

    @classmethod
    def from_full(cls, full: torch.Tensor, mesh: DeviceMesh, placements: Sequence[Placement]) -> "RaggedShardDTensor":
        """Takes this rank's slice of a full tensor that every rank has. No communication.

        Args:
            full: The full tensor, equal on all ranks.
            mesh: Mesh to shard over.
            placements: One per mesh axis, exactly one of them a :class:`RaggedShard`.
        """
        meta = TensorMeta(full.shape, full.contiguous().stride(), full.dtype)
        spec = DTensorSpec(mesh, tuple(placements), tensor_meta=meta)
        return cls.wrap(slice_full(full.detach(), spec).clone(), spec, requires_grad=full.requires_grad)

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        return table.find(func)(func, args, kwargs or {})

    def to_local(self, *, grad_placements: Sequence[Placement] | None = None) -> torch.Tensor:
        """This rank's slice, differentiable.

        Args:
            grad_placements: Not used: the gradient of a slice is a slice.

        Shapes:
            Result: ``[local numel]``.
        """
        if torch.is_grad_enabled() and self.requires_grad:
            return cast(torch.Tensor, _ToLocal.apply(self))  # type: ignore[no-untyped-call]
        return self._local_tensor

    @property
    def local_data(self) -> torch.Tensor:
        """The slice as an ordinary tensor, also where the parameter is of a subclass that wraps it."""
        return plain(self._local_tensor)

    def full_tensor(self, *, grad_placements: Sequence[Placement] | None = None) -> torch.Tensor:
        """The full tensor on every rank. A collective; differentiable.

        The gradient that flows back is averaged over all data-parallel ranks, as the engine averages gradients, so a
        loss that reads a sharded weight directly gets the same gradient as one that goes through the module's forward.

        Args:
            grad_placements: Not used: see above.
        """
        if torch.is_grad_enabled() and self.requires_grad:
            return cast(torch.Tensor, _FullTensor.apply(self))  # type: ignore[no-untyped-call]
        return gather_full(self.local_data, self._spec)

    def redistribute(
        self,
        device_mesh: DeviceMesh | None = None,
        placements: Sequence[Placement] | None = None,
        *,
        async_op: bool = False,
        forward_dtype: torch.dtype | None = None,
        backward_dtype: torch.dtype | None = None,
    ) -> DTensor:
        """Replicates the tensor, or shards it evenly by ``Shard(dim)``, on the same mesh. A collective.

        Raises:
            ValueError: If the mesh differs, a placement is neither ``Replicate``, ``Shard`` nor this tensor's own, or a
                dtype is asked for the gradient.
        """
        if backward_dtype is not None:
            raise ValueError(
                f"redistribute: the gradient keeps the tensor's dtype, got backward_dtype={backward_dtype}"
            )
        if device_mesh is not None and device_mesh != self._spec.mesh:
            raise ValueError(f"redistribute stays on the tensor's mesh {self._spec.mesh}, got {device_mesh}")
        wanted = tuple(placements) if placements is not None else self._spec.placements
        if wanted == self._spec.placements:
            return self
        if not all(isinstance(placement, (Replicate, Shard)) for placement in wanted):
            raise ValueError(f"redistribute from {self._spec.placements} expects Replicate or Shard, got {wanted}")
        full = self.full_tensor()
        if forward_dtype is not None:
            full = full.to(forward_dtype)
        replicated = DTensor.from_local(full, self._spec.mesh, [Replicate()] * len(wanted), run_check=False)
        return replicated.redistribute(placements=wanted)

    # What torch.distributed.checkpoint asks a tensor; its module is imported only when it does.

    def __create_write_items__(self, fqn: str, object: Any) -> list[Any]:
        from ya_fsdp.ragged.checkpoint import write_items

        return list(write_items(fqn, self.local_data, self._spec))

    def __create_chunk_list__(self) -> list[Any]:
        from ya_fsdp.ragged.checkpoint import chunk_list

        return list(chunk_list(self._spec))

    def __get_tensor_shard__(self, index: Any) -> torch.Tensor:
        from ya_fsdp.ragged.checkpoint import tensor_shard

        return tensor_shard(index, self.local_data, self._spec)

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return (
            f"RaggedShardDTensor(shape={tuple(self.shape)}, dtype={self.dtype}, placements={self._spec.placements}, "
            f"local={self._local_tensor})"
        )

    def requires_grad_(self, requires_grad: bool = True) -> "RaggedShardDTensor":
        """See :meth:`torch.Tensor.requires_grad_`."""
        RaggedShardDTensor.num_switches += 1
        return cast(RaggedShardDTensor, super().requires_grad_(requires_grad))

    # A property over torch's, to see assignments too.
    requires_grad = property(torch.Tensor.requires_grad.__get__, requires_grad_)  # type: ignore[arg-type, attr-defined]

    @property
    def data(self) -> "RaggedShardDTensor":
        """The tensor outside of autograd, sharing its slice. Assigning writes the values into the slice.

        Raises:
            ValueError: On assignment of a tensor of another layout or dtype, which the engine would not see.
        """
        return cast(RaggedShardDTensor, self.detach())

    @data.setter
    def data(self, value: torch.Tensor) -> None:
        if value.shape != self.shape or value.dtype != self.dtype:
            raise ValueError(
                f"cannot assign a {value.dtype} tensor of shape {tuple(value.shape)} to the data of a sharded "
                f"{self.dtype} parameter of shape {tuple(self.shape)}; convert the module with .to(...) instead"
            )
        with torch.no_grad():
            self.detach().copy_(value.detach())

    def __reduce_ex__(self, protocol: Any) -> Any:
        # A slice is pickled without the flat shard that it is a view of.
        local = self._local_tensor.detach().clone()
        return rebuild_ragged, (local, self._spec, self.requires_grad, dict(self.__dict__))

    @staticmethod
    def __tensor_unflatten__(
        inner_tensors: dict[str, Any], flatten_spec: Any, outer_size: Any, outer_stride: Any
    ) -> "RaggedShardDTensor":
        placements, meta, _, requires_grad = flatten_spec
        spec = DTensorSpec(
            inner_tensors["device_mesh"], placements, tensor_meta=TensorMeta(outer_size, outer_stride, meta.dtype)
        )
        return RaggedShardDTensor.wrap(inner_tensors["_local_tensor"], spec, requires_grad=requires_grad)


_LOCAL = operator.attrgetter("_local_tensor")
_ALL_RAGGED, _ALL_PLAIN = {RaggedShardDTensor}, {torch.Tensor}


def local_list(values: Iterable[Any]) -> list[Any]:
    """What operators on lists work on: the slices of ragged tensors, and everything else as it is.

    An optimizer step comes by here with thousands of slices, so the common case is left to functions written in C.
    """
    values = list(values)
    kinds = set(map(type, values))
    if RaggedShardDTensor not in kinds:
        return values
    if kinds == _ALL_RAGGED:
        slices = list(map(_LOCAL, values))
        if set(map(type, slices)) == _ALL_PLAIN:
            return slices
    return [value.local_data if type(value) is RaggedShardDTensor else value for value in values]


class _ToLocal(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: RaggedShardDTensor) -> torch.Tensor:
        ctx.spec = tensor._spec
        return tensor._local_tensor.view_as(tensor._local_tensor)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        return RaggedShardDTensor.wrap(grads[0], ctx.spec)


class _FullTensor(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: RaggedShardDTensor) -> torch.Tensor:
        ctx.spec = tensor._spec
        return gather_full(tensor.local_data, tensor._spec)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        return RaggedShardDTensor.wrap(scatter_mean(grads[0], ctx.spec), ctx.spec)


def rebuild_ragged(
    local: torch.Tensor, spec: DTensorSpec, requires_grad: bool, attributes: dict[str, Any]
) -> RaggedShardDTensor:
    """Makes a pickled tensor again, with what was attached to it (a parameter is recognised by such an attribute)."""
    tensor = RaggedShardDTensor.wrap(local, spec).requires_grad_(requires_grad)
    tensor.__dict__.update(attributes)
    return tensor


torch.serialization.add_safe_globals([RaggedShardDTensor, RaggedShard, rebuild_ragged])
