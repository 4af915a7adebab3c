"""How ``torch.distributed.checkpoint`` writes and reads a ragged tensor: as N-dimensional boxes of its true shape.

That makes a checkpoint independent of how the tensor was sharded: it loads into plain tensors, into ``Shard(0)`` and
into any other number of ranks.
"""

from typing import Any

import torch
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType

from ya_fsdp._torch_compat import DTensorSpec
from ya_fsdp.layout.boxes import Box, boxes
from ya_fsdp.ragged.convert import block_of, local_range

__all__ = ["chunk_list", "local_boxes", "tensor_shard", "write_items"]


def local_boxes(spec: DTensorSpec) -> tuple[Box, ...]:
    """Boxes of this rank's slice; an empty tensor is one empty box, so that it is not missing from a checkpoint."""
    mine, (shape, corner) = local_range(spec), block_of(spec)
    if not spec.shape.numel():
        return (Box((0,) * len(shape), shape, 0),)
    return tuple(box.moved(corner) for box in boxes(shape, mine.param_offset, mine.param_offset + mine.numel))


def write_items(name: str, local: torch.Tensor, spec: DTensorSpec) -> list[WriteItem]:
    """What this rank writes."""
    properties = TensorProperties.create_from_tensor(local)
    return [
        WriteItem(
            index=MetadataIndex(name, torch.Size(box.offsets)),
            type=WriteItemType.SHARD,
            tensor_data=TensorWriteData(chunk=_chunk(box), properties=properties, size=spec.shape),
        )
        for box in local_boxes(spec)
    ]


def chunk_list(spec: DTensorSpec) -> list[ChunkStorageMetadata]:
    """What this rank wants to read."""
    return [_chunk(box) for box in local_boxes(spec)]


def tensor_shard(index: Any, local: torch.Tensor, spec: DTensorSpec) -> torch.Tensor:
    """The part of the local slice that a box stands for, to be written or read into.

    Raises:
        ValueError: If this rank has no such box.
    """
    for box in local_boxes(spec):
        if index.offset is None or torch.Size(box.offsets) == index.offset:
            return local[box.start : box.start + box.numel].view(box.sizes)
    raise ValueError(f"{index.fqn}: this rank holds no part at offset {index.offset}")


def _chunk(box: Box) -> ChunkStorageMetadata:
    return ChunkStorageMetadata(offsets=torch.Size(box.offsets), sizes=torch.Size(box.sizes))
