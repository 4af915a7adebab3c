"""The mesh that parameters are sharded over, and what each of its axes is for."""

from dataclasses import dataclass, field
from functools import cached_property
from weakref import WeakKeyDictionary, WeakValueDictionary

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from ya_fsdp._torch_compat import DTensorSpec, Placement, Replicate, TensorMeta, concatenate_meshes
from ya_fsdp.comm import Backend, Collectives, ProcessGroupCollectives
from ya_fsdp.ragged import RaggedShard

__all__ = ["ShardMesh"]

_neighbours: "WeakKeyDictionary[dist.ProcessGroup, dict[int, dist.ProcessGroup]]" = WeakKeyDictionary()


@dataclass(frozen=True)
class ShardMesh:
    """A 1-D mesh to shard over, or a 2-D one whose first axis replicates and whose second shards.

    Attributes:
        mesh: The device mesh.
        backend: Makes the collectives of the sharding axis; None: ``torch.distributed``.

    Raises:
        ValueError: If the mesh has neither one nor two axes.
    """

    mesh: DeviceMesh
    backend: Backend | None = None
    _joined: dict[DeviceMesh, DeviceMesh] = field(default_factory=dict, compare=False, repr=False)

    @classmethod
    def of(cls, mesh: DeviceMesh, backend: Backend | None = None) -> "ShardMesh":
        """One object for all units of a mesh and backend: what they share stays in the processor's cache."""
        made = cls(mesh, backend)
        known = _meshes.get((mesh, backend))
        if known is not None and known.shard_group is made.shard_group:  # process groups may have been made anew
            return known
        _meshes[mesh, backend] = made
        return made

    def __post_init__(self) -> None:
        if self.mesh.ndim not in (1, 2):
            raise ValueError(
                f"fully_shard expects a mesh with 1 axis (shard) or 2 (replicate, shard), got "
                f"{self.mesh.ndim}: {self.mesh}"
            )

    @cached_property
    def shard(self) -> Collectives:
        """Collectives along the sharding axis."""
        group = self.shard_group
        return ProcessGroupCollectives(group) if self.backend is None else self.backend.collectives(group)

    @cached_property
    def replicate(self) -> Collectives | None:
        """Collectives along the replicating axis; None without one."""
        return ProcessGroupCollectives(self.mesh.get_group(0)) if self.mesh.ndim == 2 else None

    @cached_property
    def shard_group(self) -> dist.ProcessGroup:
        """Process group of the sharding axis."""
        return self.mesh.get_group(self.mesh.ndim - 1)

    @property
    def shard_axis(self) -> DeviceMesh:
        """The sharding axis alone, where it has a name."""
        names = self.mesh.mesh_dim_names
        return self.mesh[names[-1]] if self.mesh.ndim == 2 and names else self.mesh

    def smaller(self, size: int) -> Collectives:
        """Collectives among ``size`` neighbours along the sharding axis, which together hold a whole bucket.

        Every rank of the axis must ask for it at the same place: process groups are made the first time.
        """
        whole = self.shard_group
        groups = _neighbours.setdefault(whole, {})
        if size not in groups:
            ranks = dist.get_process_group_ranks(whole)
            first = whole.rank() // size * size
            groups[size] = dist.new_group(ranks[first : first + size], use_local_synchronization=True)
        return ProcessGroupCollectives(groups[size]) if self.backend is None else self.backend.collectives(groups[size])

    @cached_property
    def num_ranks(self) -> int:
        """Ranks whose gradients are averaged."""
        return int(self.mesh.size())

    def spec(
        self,
        start: int,
        shard_numel: int,
        shape: torch.Size,
        dtype: torch.dtype,
        parallel: DTensorSpec | None = None,
    ) -> DTensorSpec:
        """DTensor spec of a parameter that starts at ``start`` of a bucket.

        Args:
            start: First element in the bucket.
            shard_numel: Elements of the bucket per rank.
            shape: Shape of the full parameter.
            dtype: Dtype of the shard.
            parallel: How model parallelism has cut the parameter before; its mesh becomes the last axes.

        Raises:
            RuntimeError: If the meshes are not slices of one mesh.
        """
        stride = torch.empty(shape, device="meta").stride()
        mesh, placements = self.mesh, self.placements(start, shard_numel)
        if parallel is not None:
            mesh, placements = self._joined_with(parallel.mesh), (*placements, *parallel.placements)
        return DTensorSpec(mesh, placements, tensor_meta=TensorMeta(shape, stride, dtype))

    def placements(self, start: int, shard_numel: int) -> tuple[Placement, ...]:
        """Placements on this mesh of a tensor that starts at ``start`` of a bucket."""
        shard = RaggedShard(start, shard_numel)
        return (Replicate(), shard) if self.mesh.ndim == 2 else (shard,)

    def _joined_with(self, other: DeviceMesh) -> DeviceMesh:
        if other not in self._joined:
            self._joined[other] = concatenate_meshes(self.mesh, other)
        return self._joined[other]


_meshes: "WeakValueDictionary[tuple[DeviceMesh, Backend | None], ShardMesh]" = WeakValueDictionary()
