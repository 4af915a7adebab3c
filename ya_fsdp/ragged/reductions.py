"""Reductions of ragged tensors: each rank reduces its slice, one all-reduce joins the results.

The answer is a plain tensor, equal on every rank. A reduction along some dimensions works box by box, see
``layout/boxes.py``; the slice is never gathered.
"""

from typing import Any

import torch
import torch.distributed as dist

from ya_fsdp._torch_compat import DTensorSpec
from ya_fsdp.layout.boxes import boxes
from ya_fsdp.ragged.convert import block_of, local_range, sharded_axes
from ya_fsdp.ragged.dtensor import RaggedShardDTensor, local_list
from ya_fsdp.ragged.table import refusal, register

__all__ = ["all_reduce"]

aten = torch.ops.aten
Args = tuple[Any, ...]
Kwargs = dict[str, Any]
INF = float("inf")


def all_reduce(local: torch.Tensor, spec: DTensorSpec, op: Any) -> torch.Tensor:
    """Reduces in place over the ranks that hold different parts of a tensor."""
    here = local.device
    if here.type != spec.mesh.device_type:  # shards in host memory: the collective runs where the mesh is
        local = local.to(spec.mesh.device_type)
    for axis in sharded_axes(spec):
        if spec.mesh.size(axis) > 1:
            dist.all_reduce(local, op=op, group=spec.mesh.get_group(axis))
    return local.to(here)


# ---- norms ----------------------------------------------------------------------------------------------------------


def _norm_op(order: float) -> Any:
    return {INF: dist.ReduceOp.MAX, -INF: dist.ReduceOp.MIN}.get(order, dist.ReduceOp.SUM)


def _power_sums(locals_: list[torch.Tensor], order: float) -> torch.Tensor:
    """Per tensor: sum of |x|^order, or the extreme magnitude for an infinite order."""
    if order in (INF, -INF):
        empty = 0.0 if order > 0 else INF
        return torch.stack(
            [torch.linalg.vector_norm(x, order) if x.numel() else x.new_full((), empty) for x in locals_]
        )
    if order == 0:
        return torch.stack([torch.count_nonzero(x).to(x.dtype) for x in locals_])
    norms = torch.stack(list(torch._foreach_norm(locals_, order)))
    return norms.pow_(order)


def _root(sums: torch.Tensor, order: float) -> torch.Tensor:
    return sums if order in (0, INF, -INF) else sums.pow_(1.0 / order)


def _norms(tensors: list[RaggedShardDTensor], order: float, dtype: torch.dtype | None = None) -> torch.Tensor:
    """Global norm of each tensor. One all-reduce. Shapes: result ``[len(tensors)]``."""
    locals_ = local_list(tensors)
    if dtype is not None:
        locals_ = [local.to(dtype) for local in locals_]
    sums = all_reduce(_power_sums(locals_, order), tensors[0]._spec, _norm_op(order))
    return _root(sums, order)


@register(aten._foreach_norm)
def _foreach_norm(func: Any, args: Args, kwargs: Kwargs) -> list[torch.Tensor]:
    order = float(args[1]) if len(args) > 1 else float(kwargs.get("ord", 2))
    dtype = args[2] if len(args) > 2 else kwargs.get("dtype")
    results: dict[int, torch.Tensor] = {}
    groups: dict[Any, list[int]] = {}
    seen: dict[Any, list[int]] = {}  # the same lists, found without a hash of the mesh for every tensor
    for index, tensor in enumerate(args[0]):
        if type(tensor) is not RaggedShardDTensor:
            results[index] = torch.linalg.vector_norm(tensor, order, dtype=dtype)
            continue
        spec = tensor._spec
        key = (id(spec.mesh), *map(type, spec.placements))
        if key not in seen:
            seen[key] = groups.setdefault((spec.mesh, sharded_axes(spec)), [])
        seen[key].append(index)
    for members in groups.values():
        norms = _norms([args[0][index] for index in members], order, dtype)
        results.update(zip(members, norms.unbind(), strict=True))
    return [results[index] for index in range(len(args[0]))]


@register(aten.linalg_vector_norm, aten.norm)
def _vector_norm(func: Any, args: Args, kwargs: Kwargs) -> torch.Tensor:
    tensor = args[0]
    order = args[1] if len(args) > 1 else kwargs.get("ord", kwargs.get("p", 2))
    order = 2.0 if order is None else float(order)
    dims = args[2] if len(args) > 2 and isinstance(args[2], (list, tuple, int)) else kwargs.get("dim")
    keepdim = bool(args[3]) if len(args) > 3 else bool(kwargs.get("keepdim", False))
    dtype = kwargs.get("dtype")
    if _covers_all(tensor, dims):
        norm = _norms([tensor], order, dtype)[0]
        return norm.reshape([1] * tensor.dim()) if keepdim else norm
    if order <= 0 or order == INF:
        raise refusal(func, f"a norm of order {order} over dimensions {dims} needs whole rows", tensor)
    sums = _along(tensor, dims, lambda box, d: torch.linalg.vector_norm(box, order, d, dtype=dtype).pow_(order), dtype)
    return _shaped(_root(sums, order), tensor, dims, keepdim)


# ---- sums, means and extremes ---------------------------------------------------------------------------------------

_EXTREMES: dict[Any, tuple[Any, float]] = {
    aten.max: (dist.ReduceOp.MAX, -INF),
    aten.amax: (dist.ReduceOp.MAX, -INF),
    aten.min: (dist.ReduceOp.MIN, INF),
    aten.amin: (dist.ReduceOp.MIN, INF),
    aten.any: (dist.ReduceOp.MAX, 0.0),
    aten.all: (dist.ReduceOp.MIN, 1.0),
}


@register(aten.sum, aten.mean)
def _sum(func: Any, args: Args, kwargs: Kwargs) -> torch.Tensor:
    tensor, dtype = args[0], kwargs.get("dtype")
    dims = args[1] if len(args) > 1 else kwargs.get("dim")
    keepdim = bool(args[2]) if len(args) > 2 else bool(kwargs.get("keepdim", False))
    is_mean = func.overloadpacket is aten.mean
    if _covers_all(tensor, dims):
        total = all_reduce(torch.sum(tensor.local_data, dtype=dtype), tensor._spec, dist.ReduceOp.SUM)
        count = tensor.numel()
        total = total.reshape([1] * tensor.dim()) if keepdim else total
    else:
        sums = _along(tensor, dims, lambda box, d: torch.sum(box, d, dtype=dtype), dtype)
        count = tensor.numel() // max(sums.numel(), 1)
        total = _shaped(sums, tensor, dims, keepdim)
    return total / max(count, 1) if is_mean else total


@register(aten.var, aten.std)
def _variance(func: Any, args: Args, kwargs: Kwargs) -> torch.Tensor:
    tensor = args[0]
    dims = args[1] if len(args) > 1 else kwargs.get("dim")
    if isinstance(dims, bool):  # the older overload: var(self, unbiased)
        correction, dims = float(dims), None
    else:
        given = kwargs.get("correction", kwargs.get("unbiased"))
        correction = 1.0 if given is None else float(given)
    if not _covers_all(tensor, dims) or kwargs.get("keepdim"):
        raise refusal(func, f"a variance over dimensions {dims} needs whole rows", tensor)
    local, count = tensor.local_data, tensor.numel()
    mean = all_reduce(local.sum(), tensor._spec, dist.ReduceOp.SUM) / max(count, 1)
    squares: torch.Tensor = all_reduce((local - mean).square_().sum(), tensor._spec, dist.ReduceOp.SUM)
    variance = squares / max(count - correction, 0.0)
    return torch.sqrt(variance) if func.overloadpacket is aten.std else variance


@register(*_EXTREMES)
def _extreme(func: Any, args: Args, kwargs: Kwargs) -> torch.Tensor:
    tensor = args[0]
    if len(args) > 1 or not _covers_all(tensor, kwargs.get("dim")):
        dims = args[1] if len(args) > 1 else kwargs.get("dim")
        if isinstance(dims, torch.Tensor) or not _covers_all(tensor, dims):
            raise refusal(func, "is defined on whole tensors only here", tensor)
    local, packet = tensor.local_data, func.overloadpacket
    op, neutral = _EXTREMES[packet]
    is_bool = packet in (aten.any, aten.all) or local.dtype is torch.bool
    result = (
        packet(local) if local.numel() else _constant(neutral, torch.bool if is_bool else local.dtype, local.device)
    )
    if is_bool:
        return all_reduce(result.to(torch.int32), tensor._spec, op).to(torch.bool)
    return all_reduce(result, tensor._spec, op)


def _constant(value: float, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    if not dtype.is_floating_point and dtype is not torch.bool:
        info = torch.iinfo(dtype)
        value = info.max if value > 0 else info.min
    return torch.tensor(value, dtype=dtype, device=device)


# ---- along dimensions -----------------------------------------------------------------------------------------------


def _dims(tensor: torch.Tensor, dims: Any) -> tuple[int, ...]:
    listed = (dims,) if isinstance(dims, int) else tuple(dims)
    return tuple(sorted(dim % tensor.dim() for dim in listed))


def _covers_all(tensor: torch.Tensor, dims: Any) -> bool:
    if dims is None or (not isinstance(dims, int) and not len(dims)) or not tensor.dim():
        return True
    return len(set(_dims(tensor, dims))) == tensor.dim()


def _along(tensor: RaggedShardDTensor, dims: Any, reduce_box: Any, dtype: torch.dtype | None) -> torch.Tensor:
    """Sums what ``reduce_box`` makes of each box of the slice. Shapes: result as the full tensor, reduced dims gone."""
    spec, local = tensor._spec, tensor.local_data
    mine, (shape, corner), reduced = local_range(spec), block_of(spec), _dims(tensor, dims)
    kept = [dim for dim in range(tensor.dim()) if dim not in reduced]
    total = local.new_zeros([spec.shape[dim] for dim in kept], dtype=dtype or local.dtype)
    for inner in boxes(shape, mine.param_offset, mine.param_offset + mine.numel):
        box = inner.moved(corner)
        part = local[box.start : box.start + box.numel].view(box.sizes)
        place = tuple(slice(box.offsets[dim], box.offsets[dim] + box.sizes[dim]) for dim in kept)
        total[place].add_(reduce_box(part, list(reduced)))
    return all_reduce(total, spec, dist.ReduceOp.SUM)


def _shaped(result: torch.Tensor, tensor: torch.Tensor, dims: Any, keepdim: bool) -> torch.Tensor:
    if keepdim:
        for dim in _dims(tensor, dims):
            result = result.unsqueeze(dim)
    return result
