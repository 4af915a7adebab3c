"""From autograd's gradients to the input of a reduction: one pass that flattens, casts and fills the padding."""

from collections.abc import Sequence

import torch

from ya_fsdp._torch_compat import flatten_dense
from ya_fsdp.layout import FlatLayout, Partition
from ya_fsdp.layout.columns import Block, ColumnChunk, column_chunks, param_blocks

__all__ = ["GradientStager", "member_views"]


def member_views(flat: torch.Tensor, cuts: Partition) -> Sequence[torch.Tensor]:
    """The members' pieces of a flat tensor. Shapes: ``[numel]`` each."""
    parts = flat.split_with_sizes(cuts.sizes)
    if all(cuts.is_member):
        return parts
    return [part for part, is_member in zip(parts, cuts.is_member, strict=True) if is_member]


class GradientStager:
    """Writes a bucket's gradients into staging tensors, whole or by column chunks.

    Args:
        layout: Layout of the bucket.
        max_numel: Largest staging tensor. Units: elements.
    """

    def __init__(self, layout: FlatLayout, max_numel: int) -> None:
        self.chunks = column_chunks(layout, max_numel)
        self._world_size = layout.world_size
        self._partition = layout.partition
        is_member = self._partition.is_member
        self._has_gaps = not all(is_member[:-1])
        self._end = torch.zeros(0 if all(is_member) else self._partition.sizes[-1])
        """Padding behind the last parameter."""
        self._blocks: list[list[tuple[int, Block]]] = []
        if len(self.chunks) > 1:
            self._blocks = [_chunk_blocks(layout, chunk) for chunk in self.chunks]

    def stage(
        self, chunk: int, grads: Sequence[torch.Tensor | None], dtype: torch.dtype, device: torch.device
    ) -> torch.Tensor:
        """The input of the reduction of one chunk; see :meth:`fill`. Shapes: ``[world_size * chunk width]``."""
        if grads and len(self.chunks) == 1 and not self._has_gaps and _all_have(grads, dtype):
            # The common case where nothing is cast, which one operator does without a view for each gradient.
            if self._end.numel():
                self._end = self._end.to(device, dtype)
                grads = [*grads, self._end]
            flat: torch.Tensor = flatten_dense(grads)
            return flat
        staging = torch.empty(self._world_size * self.chunks[chunk].width, dtype=dtype, device=device)
        self.fill(staging, chunk, grads)
        return staging

    def fill(self, staging: torch.Tensor, chunk: int, grads: Sequence[torch.Tensor | None]) -> None:
        """Fills the staging tensor of one chunk; a missing gradient becomes zeros, and so does padding.

        Args:
            staging: Receives the gradients. Shapes: ``[world_size * chunk width]``.
            chunk: Index into :attr:`chunks`.
            grads: One per parameter of the bucket, in layout order, or None.
        """
        if len(self.chunks) == 1:
            self._fill_whole(staging, grads)
        else:
            self._fill_columns(staging, chunk, grads)

    def _fill_whole(self, staging: torch.Tensor, grads: Sequence[torch.Tensor | None]) -> None:
        targets, sources, zeros = [], [], []
        parts, remaining = staging.split_with_sizes(self._partition.sizes), iter(grads)
        for part, is_param in zip(parts, self._partition.is_member, strict=True):
            grad = next(remaining) if is_param else None
            if grad is None:
                zeros.append(part)
            else:
                targets.append(part)
                sources.append(grad.reshape(-1))
        if targets:
            torch._foreach_copy_(targets, sources)
        if zeros:
            torch._foreach_zero_(zeros)

    def _fill_columns(self, staging: torch.Tensor, chunk: int, grads: Sequence[torch.Tensor | None]) -> None:
        covered = 0
        blocks = self._blocks[chunk]
        for index, block in blocks:
            covered += block.rows * block.width if grads[index] is not None else 0
        if covered < staging.numel():  # something is missing or padding: rare, and cheap next to the copies
            staging.zero_()
        targets, sources = [], []
        # An expanded or strided gradient may reshape to a view that is not dense, which as_strided would misread.
        flats = [None if grad is None else grad.reshape(-1).contiguous() for grad in grads]
        for index, block in blocks:
            flat = flats[index]
            if flat is None:
                continue
            size = (block.rows, block.width)
            offset = staging.storage_offset() + block.staging_offset
            targets.append(staging.as_strided(size, (block.staging_stride, 1), offset))
            offset = flat.storage_offset() + block.param_offset
            sources.append(flat.as_strided(size, (block.param_stride, 1), offset))
        if targets:
            torch._foreach_copy_(targets, sources)


def _all_have(grads: Sequence[torch.Tensor | None], dtype: torch.dtype) -> bool:
    for grad in grads:  # noqa: SIM110  a generator would take as many calls as there are gradients
        if grad is None or grad.dtype != dtype:
            return False
    return True


def _chunk_blocks(layout: FlatLayout, chunk: ColumnChunk) -> list[tuple[int, Block]]:
    return [
        (index, block)
        for index, span in enumerate(layout.spans)
        for block in param_blocks(span, layout.shard_numel, chunk)
    ]
