"""Operators on ragged tensors: each handler works on the local slices.

Three kinds cover almost everything an optimizer, a gradient clip or a checkpoint does: element by element (slices of
equal layout line up), lists of tensors (``_foreach_*``, ``_fused_*``), and reductions over all elements (local result,
then one all-reduce; the answer is a plain tensor, equal on every rank).
"""

from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist

from ya_fsdp._torch_compat import DTensor, DTensorSpec
from ya_fsdp.ragged.convert import gather_full, slice_full, spec_like
from ya_fsdp.ragged.dtensor import RaggedShardDTensor
from ya_fsdp.ragged.placement import ragged_axis
from ya_fsdp.ragged.table import Handler, register, register_fallback

__all__: list[str] = []

aten = torch.ops.aten
Args = tuple[Any, ...]
Kwargs = dict[str, Any]


def _refuse(func: Any, reason: str, tensor: Any = None) -> RuntimeError:
    shape = f" (full shape {tuple(tensor.shape)})" if tensor is not None else ""
    return RuntimeError(
        f"{func}: {reason}{shape}. A sharded parameter holds one slice of its flattened elements on each rank; "
        f"call .full_tensor() for the full tensor or .to_local() for this rank's slice."
    )


def _first(values: Iterable[Any]) -> RaggedShardDTensor:
    return next(value for value in values if isinstance(value, RaggedShardDTensor))


def _local(value: Any, spec: DTensorSpec, func: Any) -> Any:
    """Local operand that lines up, element by element, with the local slice of ``spec``."""
    if type(value) is RaggedShardDTensor:
        if value._spec is spec or (value._spec.placements == spec.placements and value._spec.shape == spec.shape):
            return value._local_tensor
        raise _refuse(func, f"operands have different layouts, {value._spec.placements} and {spec.placements}", value)
    if not isinstance(value, torch.Tensor) or value.dim() == 0:
        return value
    if isinstance(value, DTensor):
        value = value.full_tensor()
    if value.shape == spec.shape:
        return slice_full(value, spec)
    if value.numel() == 1:
        return value.reshape(())
    raise _refuse(func, f"a plain operand of shape {tuple(value.shape)} does not line up with a slice of {spec.shape}")


def _wrap_like(result: Any, spec: DTensorSpec) -> Any:
    if isinstance(result, torch.Tensor):
        return RaggedShardDTensor.wrap(result, spec_like(spec, result.dtype))
    return result


def elementwise(func: Any, args: Args, kwargs: Kwargs) -> Any:
    """Runs an element-by-element operator on the local slices; in-place forms return their first argument."""
    first = _first((*args, *kwargs.values()))
    spec = first._spec
    result = func(
        *[_local(arg, spec, func) for arg in args], **{key: _local(value, spec, func) for key, value in kwargs.items()}
    )
    if func._schema.is_mutable:
        return kwargs.get("out", args[0])
    if isinstance(result, (tuple, list)):
        return type(result)(_wrap_like(item, spec) for item in result)
    return _wrap_like(result, spec)


@register(
    aten.zeros_like, aten.ones_like, aten.empty_like, aten.full_like, aten.clone, aten._to_copy, aten.zero_,
    aten.detach, aten.alias, aten.copy_, aten.lift_fresh, aten.isnan, aten.detach_,
)  # fmt: skip
def _keeps_layout(func: Any, args: Args, kwargs: Kwargs) -> Any:
    if kwargs.get("memory_format") is not None:  # a slice is one-dimensional: only the contiguous form exists
        kwargs = {**kwargs, "memory_format": torch.contiguous_format}
    if func is aten.copy_.default and not isinstance(args[0], RaggedShardDTensor):
        return func(args[0], gather_full(args[1]._local_tensor, args[1]._spec), *args[2:])
    return elementwise(func, args, kwargs)


@register(aten.view, aten._unsafe_view, aten.reshape, aten.expand)
def _same_shape_view(func: Any, args: Args, kwargs: Kwargs) -> Any:
    tensor = args[0]
    sizes = list(args[1])
    if len(sizes) == tensor.dim() and all(size in (full, -1) for size, full in zip(sizes, tensor.shape, strict=True)):
        return RaggedShardDTensor.wrap(tensor._local_tensor, tensor._spec)
    raise _refuse(func, f"a slice cannot be viewed as {tuple(sizes)}", tensor)


@register(aten.new_zeros, aten.new_empty, aten.new_ones, aten.new_full)
def _new_tensor(func: Any, args: Args, kwargs: Kwargs) -> Any:
    tensor, sizes = args[0], tuple(args[1])
    if sizes != tuple(tensor.shape):
        return func(tensor._local_tensor, *args[1:], **kwargs)
    result = func(tensor._local_tensor, list(tensor._local_tensor.shape), *args[2:], **kwargs)
    return _wrap_like(result, tensor._spec)


@register(
    aten.uniform_, aten.normal_, aten.bernoulli_, aten.exponential_, aten.log_normal_, aten.cauchy_, aten.geometric_,
    aten.random_,
)  # fmt: skip
def _random_fill(func: Any, args: Args, kwargs: Kwargs) -> Any:
    """Draws the numbers of the full tensor and keeps the slice, so that the world size does not change them."""
    tensor = args[0]
    full = torch.empty(tensor.shape, dtype=tensor.dtype, device=tensor.device)
    func(full, *args[1:], **kwargs)
    tensor._local_tensor.copy_(slice_full(full, tensor._spec))
    return tensor


# ---- reductions over all elements -----------------------------------------------------------------------------------


def _all_reduce(local: torch.Tensor, spec: DTensorSpec, op: Any) -> torch.Tensor:
    axis, _ = ragged_axis(spec)
    if spec.mesh.size(axis) > 1:
        dist.all_reduce(local, op=op, group=spec.mesh.get_group(axis))
    return local


def _power_sums(locals_: list[torch.Tensor], order: float) -> torch.Tensor:
    """Per tensor: sum of |x|^order, or the extreme magnitude for an infinite order."""
    if order in (float("inf"), -float("inf")):
        empty = 0.0 if order > 0 else float("inf")
        return torch.stack(
            [x.new_full((), empty) if not x.numel() else torch.linalg.vector_norm(x, order) for x in locals_]
        )
    if order == 0:
        return torch.stack([torch.count_nonzero(x).to(x.dtype) for x in locals_])
    norms = torch.stack(list(torch._foreach_norm(locals_, order)))
    return norms.pow_(order)


def _norms(tensors: list[RaggedShardDTensor], order: float, dtype: torch.dtype | None = None) -> torch.Tensor:
    """Global norm of each tensor. One all-reduce. Shapes: result ``[len(tensors)]``."""
    locals_ = [t._local_tensor if dtype is None else t._local_tensor.to(dtype) for t in tensors]
    sums = _power_sums(locals_, order)
    op = {float("inf"): dist.ReduceOp.MAX, -float("inf"): dist.ReduceOp.MIN}.get(order, dist.ReduceOp.SUM)
    _all_reduce(sums, tensors[0]._spec, op)
    return sums if order in (0, float("inf"), -float("inf")) else sums.pow_(1.0 / order)


@register(aten._foreach_norm)
def _foreach_norm(func: Any, args: Args, kwargs: Kwargs) -> list[torch.Tensor]:
    order = float(args[1]) if len(args) > 1 else float(kwargs.get("ord", 2))
    dtype = args[2] if len(args) > 2 else kwargs.get("dtype")
    results: list[torch.Tensor | None] = [None] * len(args[0])
    groups: dict[Any, list[int]] = {}
    for index, tensor in enumerate(args[0]):
        if type(tensor) is RaggedShardDTensor:
            groups.setdefault((tensor._spec.mesh, ragged_axis(tensor._spec)[0]), []).append(index)
        else:
            results[index] = torch.linalg.vector_norm(tensor, order, dtype=dtype)
    for members in groups.values():
        norms = _norms([args[0][index] for index in members], order, dtype)
        for index, norm in zip(members, norms.unbind(), strict=True):
            results[index] = norm
    return results  # type: ignore[return-value]  # every place is filled by now


@register(aten.linalg_vector_norm, aten.norm)
def _vector_norm(func: Any, args: Args, kwargs: Kwargs) -> torch.Tensor:
    tensor = args[0]
    order = args[1] if len(args) > 1 else kwargs.get("ord", kwargs.get("p", 2))
    dims = args[2] if len(args) > 2 and isinstance(args[2], (list, tuple)) else kwargs.get("dim")
    keepdim = bool(args[3]) if len(args) > 3 else bool(kwargs.get("keepdim", False))
    if dims is not None and len(dims) not in (0, tensor.dim()):
        raise _refuse(func, f"a norm over dimensions {dims} needs whole rows", tensor)
    norm = _norms([tensor], 2.0 if order is None else float(order), kwargs.get("dtype"))[0]
    return norm.reshape([1] * tensor.dim()) if keepdim else norm


_REDUCTIONS: dict[Any, tuple[Any, float]] = {
    aten.sum: (dist.ReduceOp.SUM, 0.0),
    aten.max: (dist.ReduceOp.MAX, -float("inf")),
    aten.amax: (dist.ReduceOp.MAX, -float("inf")),
    aten.min: (dist.ReduceOp.MIN, float("inf")),
    aten.amin: (dist.ReduceOp.MIN, float("inf")),
    aten.any: (dist.ReduceOp.MAX, 0.0),
    aten.all: (dist.ReduceOp.MIN, 1.0),
}


@register(*_REDUCTIONS, aten.mean)
def _reduction(func: Any, args: Args, kwargs: Kwargs) -> torch.Tensor:
    tensor = args[0]
    dims = args[1] if len(args) > 1 else kwargs.get("dim")
    if isinstance(dims, int) or (dims and len(dims) != tensor.dim()):
        raise _refuse(func, f"a reduction over dimension {dims} needs whole rows", tensor)
    local, packet, dtype = tensor._local_tensor, func.overloadpacket, kwargs.get("dtype")
    if packet is aten.mean:
        total = _all_reduce(torch.sum(local, dtype=dtype), tensor._spec, dist.ReduceOp.SUM)
        return total.div_(max(tensor.numel(), 1))
    op, neutral = _REDUCTIONS[packet]
    if packet is aten.sum:
        return _all_reduce(torch.sum(local, dtype=dtype), tensor._spec, op)
    if local.numel():
        result = packet(local)
    else:
        boolean = packet in (aten.any, aten.all)
        limit = neutral if boolean or local.dtype.is_floating_point else _integer_limit(local.dtype, neutral)
        result = torch.tensor(limit, dtype=torch.bool if boolean else local.dtype, device=local.device)
    if result.dtype is torch.bool:
        return _all_reduce(result.to(torch.int32), tensor._spec, op).to(torch.bool)
    return _all_reduce(result, tensor._spec, op)


def _integer_limit(dtype: torch.dtype, neutral: float) -> int:
    info = torch.iinfo(dtype)
    return int(info.max if neutral > 0 else info.min)


@register(aten.equal)
def _equal(func: Any, args: Args, kwargs: Kwargs) -> bool:
    first = _first(args)
    if args[0].shape != args[1].shape:
        return False
    left, right = (_local(arg, first._spec, func) for arg in args)
    same = torch.tensor(int(torch.equal(left, right)), device=first._local_tensor.device)
    return bool(_all_reduce(same, first._spec, dist.ReduceOp.MIN).item())


@register(aten._local_scalar_dense)
def _item(func: Any, args: Args, kwargs: Kwargs) -> Any:
    return func(gather_full(args[0]._local_tensor, args[0]._spec))


# ---- lists of tensors -----------------------------------------------------------------------------------------------


def _unwrap_list(values: Any) -> Any:
    if not isinstance(values, (list, tuple)):
        return values
    return [value._local_tensor if type(value) is RaggedShardDTensor else value for value in values]


def on_lists(func: Any, args: Args, kwargs: Kwargs) -> Any:
    """Runs a ``_foreach_*`` or ``_fused_*`` operator on the local slices of every list.

    The lists of one call come from the same parameters, so slices line up and are not compared again. A plain tensor
    among ragged ones (an ignored parameter) is passed on as it is.
    """
    result = func(*map(_unwrap_list, args), **{key: _unwrap_list(value) for key, value in kwargs.items()})
    if result is None:
        return None
    specs = [tensor._spec if type(tensor) is RaggedShardDTensor else None for tensor in args[0]]
    return [item if spec is None else _wrap_like(item, spec) for item, spec in zip(result, specs, strict=True)]


@register(aten._amp_foreach_non_finite_check_and_unscale_)
def _unscale(func: Any, args: Args, kwargs: Kwargs) -> None:
    """Unscales gradients; an overflow on one rank is known to all of them, so that all skip the step."""
    func(_unwrap_list(args[0]), *args[1:], **kwargs)
    specs = {(t._spec.mesh, ragged_axis(t._spec)[0]): t._spec for t in args[0] if type(t) is RaggedShardDTensor}
    for spec in specs.values():
        _all_reduce(args[1], spec, dist.ReduceOp.MAX)


@register_fallback
def _choose(func: Any) -> Handler:
    name = func.overloadpacket.__name__
    if name.startswith(("_foreach_", "_fused_")):
        return on_lists
    if torch.Tag.pointwise in func.tags:
        return elementwise
    return _unsupported


def _unsupported(func: Any, args: Args, kwargs: Kwargs) -> Any:
    flat = [value for value in (*args, *kwargs.values()) if isinstance(value, RaggedShardDTensor)]
    raise _refuse(func, "is not supported on sharded parameters", flat[0] if flat else None)
