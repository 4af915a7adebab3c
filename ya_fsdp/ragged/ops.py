"""Operators on ragged tensors: each handler works on the local slices.

Three kinds cover almost everything an optimizer, a gradient clip or a checkpoint does: element by element (slices of
equal layout line up), lists of tensors (``_foreach_*``, ``_fused_*``), and reductions (see ``ragged/reductions.py``).
"""

from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch.autograd.graph import increment_version

from ya_fsdp._torch_compat import DTensor, DTensorSpec
from ya_fsdp.ragged.convert import gather_full, sharded_axes, slice_full, spec_like
from ya_fsdp.ragged.dtensor import RaggedShardDTensor, local_list
from ya_fsdp.ragged.reductions import all_reduce
from ya_fsdp.ragged.table import Handler, refusal, register, register_fallback

__all__: list[str] = []

aten = torch.ops.aten
Args = tuple[Any, ...]
Kwargs = dict[str, Any]


def _first(values: Iterable[Any]) -> RaggedShardDTensor:
    return next(value for value in values if isinstance(value, RaggedShardDTensor))


def _local(value: Any, spec: DTensorSpec, func: Any) -> Any:
    """Local operand that lines up, element by element, with the local slice of ``spec``."""
    if type(value) is RaggedShardDTensor:
        if value._spec is spec or (value._spec.placements == spec.placements and value._spec.shape == spec.shape):
            return value.local_data
        raise refusal(func, f"operands have different layouts, {value._spec.placements} and {spec.placements}", value)
    if not isinstance(value, torch.Tensor) or value.dim() == 0:
        return value
    if isinstance(value, DTensor):
        value = value.full_tensor()
    if value.shape == spec.shape:
        return slice_full(value, spec)
    if value.numel() == 1:
        return value.reshape(())
    raise refusal(func, f"a plain operand of shape {tuple(value.shape)} does not line up with a slice of {spec.shape}")


def _full(value: Any) -> Any:
    return gather_full(value.local_data, value._spec) if isinstance(value, RaggedShardDTensor) else value


def _wrap_like(result: Any, spec: DTensorSpec) -> Any:
    if isinstance(result, torch.Tensor):
        return RaggedShardDTensor.wrap(result, spec_like(spec, result.dtype))
    return result


def elementwise(func: Any, args: Args, kwargs: Kwargs) -> Any:
    """Runs an element-by-element operator on the local slices; in-place forms return their first argument."""
    spec = _first((*args, *kwargs.values()))._spec
    written = kwargs.get("out", args[0])
    if func._schema.is_mutable and not isinstance(written, RaggedShardDTensor):
        return func(*map(_full, args), **{key: _full(value) for key, value in kwargs.items()})  # into a plain tensor
    result = func(
        *[_local(arg, spec, func) for arg in args], **{key: _local(value, spec, func) for key, value in kwargs.items()}
    )
    if func._schema.is_mutable:
        return written
    if isinstance(result, (tuple, list)):
        return type(result)(_wrap_like(item, spec) for item in result)
    return _wrap_like(result, spec)


@register(
    aten.zeros_like, aten.ones_like, aten.empty_like, aten.full_like, aten.zero_, aten.copy_, aten.isnan,
    aten.detach_, aten.masked_fill, aten.masked_fill_, aten.fill, aten.fill_, aten.rsub,
)  # fmt: skip
def _keeps_layout(func: Any, args: Args, kwargs: Kwargs) -> Any:
    if kwargs.get("memory_format") is not None:  # a slice is one-dimensional: only the contiguous form exists
        kwargs = {**kwargs, "memory_format": torch.contiguous_format}
    return elementwise(func, args, kwargs)


@register(aten.detach, aten.alias, aten.lift_fresh, aten.clone, aten._to_copy)
def _same_values(func: Any, args: Args, kwargs: Kwargs) -> Any:
    """A slice of a subclass stays one, as far as the subclass lets it."""
    tensor = args[0]
    if type(tensor) is not RaggedShardDTensor or type(tensor._local_tensor) is torch.Tensor:
        return _keeps_layout(func, args, kwargs)
    return _wrap_like(func(tensor._local_tensor, **kwargs), tensor._spec)


@register(aten.view, aten._unsafe_view, aten.reshape, aten.expand)
def _same_shape_view(func: Any, args: Args, kwargs: Kwargs) -> Any:
    tensor = args[0]
    sizes = list(args[1])
    if len(sizes) == tensor.dim() and all(size in (full, -1) for size, full in zip(sizes, tensor.shape, strict=True)):
        return RaggedShardDTensor.wrap(tensor.local_data, tensor._spec)
    raise refusal(func, f"a slice cannot be viewed as {tuple(sizes)}", tensor)


@register(aten.new_zeros, aten.new_empty, aten.new_ones, aten.new_full)
def _new_tensor(func: Any, args: Args, kwargs: Kwargs) -> Any:
    tensor, sizes = args[0], tuple(args[1])
    if sizes != tuple(tensor.shape):
        return func(tensor.local_data, *args[1:], **kwargs)
    result = func(tensor.local_data, list(tensor.local_data.shape), *args[2:], **kwargs)
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
    tensor.local_data.copy_(slice_full(full, tensor._spec))
    return tensor


@register(aten.rand_like, aten.randn_like, aten.randint_like)
def _random_like(func: Any, args: Args, kwargs: Kwargs) -> Any:
    """As :func:`_random_fill`: the slice of the numbers that the full tensor would get."""
    tensor = args[0]
    options = {key: value for key, value in kwargs.items() if key != "memory_format"}
    full = func(torch.empty(tensor.shape, dtype=tensor.dtype, device=tensor.device), *args[1:], **options)
    return _wrap_like(slice_full(full, tensor._spec).clone(), tensor._spec)


@register(aten.allclose)
def _allclose(func: Any, args: Args, kwargs: Kwargs) -> bool:
    spec = _first(args)._spec
    left, right = (_local(arg, spec, func) for arg in args[:2])
    close = torch.allclose(left, right, *args[2:], **kwargs)
    same = torch.tensor(int(close), device=_first(args)._local_tensor.device)
    return bool(all_reduce(same, spec, dist.ReduceOp.MIN).item())


@register(aten.equal)
def _equal(func: Any, args: Args, kwargs: Kwargs) -> bool:
    first = _first(args)
    if args[0].shape != args[1].shape:
        return False
    left, right = (_local(arg, first._spec, func) for arg in args)
    same = torch.tensor(int(torch.equal(left, right)), device=first._local_tensor.device)
    return bool(all_reduce(same, first._spec, dist.ReduceOp.MIN).item())


@register(aten._local_scalar_dense)
def _item(func: Any, args: Args, kwargs: Kwargs) -> Any:
    return func(_full(args[0]))


# ---- lists of tensors -----------------------------------------------------------------------------------------------


def _unwrap_list(values: Any) -> Any:
    return local_list(values) if isinstance(values, (list, tuple)) else values


def on_lists(func: Any, args: Args, kwargs: Kwargs) -> Any:
    """Runs a ``_foreach_*`` or ``_fused_*`` operator on the local slices of every list.

    The lists of one call come from the same parameters, so slices line up and are not compared again. A plain tensor
    among ragged ones (an ignored parameter) is passed on as it is.
    """
    result = func(*map(_unwrap_list, args), **{key: _unwrap_list(value) for key, value in kwargs.items()})
    if result is None:
        # Written through the slices: torch counts such writes on no wrapper, and kept units look at the count.
        written = args[0]
        if set(map(type, written)) != {RaggedShardDTensor}:
            written = [tensor for tensor in written if type(tensor) is RaggedShardDTensor]
        increment_version(written)
        return None
    specs = [tensor._spec if type(tensor) is RaggedShardDTensor else None for tensor in args[0]]
    return [item if spec is None else _wrap_like(item, spec) for item, spec in zip(result, specs, strict=True)]


@register(aten._amp_foreach_non_finite_check_and_unscale_)
def _unscale(func: Any, args: Args, kwargs: Kwargs) -> None:
    """Unscales gradients; an overflow on one rank is known to all of them, so that all skip the step."""
    func(_unwrap_list(args[0]), *args[1:], **kwargs)
    specs = {(t._spec.mesh, sharded_axes(t._spec)): t._spec for t in args[0] if type(t) is RaggedShardDTensor}
    for spec in specs.values():
        args[1].copy_(all_reduce(args[1], spec, dist.ReduceOp.MAX))


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
    raise refusal(func, "is not supported on sharded parameters", flat[0] if flat else None)
