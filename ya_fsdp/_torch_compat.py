"""Every private, renamed or version-dependent name of torch that the engine uses, in one place."""

from typing import Any

import torch
import torch.distributed as dist
from torch._dynamo import compiled_autograd
from torch._dynamo.decorators import skip as skip_frame
from torch.distributed import _symmetric_memory
from torch.distributed._composable_state import _get_module_state, _insert_module_state, _State
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
from torch.distributed.tensor.placement_types import Placement
from torch.optim.optimizer import _foreach_supported_types as _optimizer_types
from torch.utils._foreach_utils import _foreach_supported_types as _foreach_utils_types
from torch.utils._pytree import tree_flatten, tree_unflatten

__all__ = [
    "AsyncCollectiveTensor",
    "DTensor",
    "DTensorSpec",
    "FSDPModule",
    "Placement",
    "Replicate",
    "Shard",
    "TensorMeta",
    "_State",
    "all_gather",
    "all_reduce_options",
    "bare_apply",
    "compiled_autograd",
    "compute_local_shape_and_global_offset",
    "concatenate_meshes",
    "current_tracer",
    "default_store",
    "flatten_dense",
    "gather_options",
    "get_module_state",
    "insert_module_state",
    "make_wrapper",
    "never_trace",
    "new_dtensor",
    "preserve_versions",
    "queue_backward_callback",
    "reduce_scatter",
    "reduce_scatter_options",
    "register_foreach_type",
    "symmetric_memory",
    "transforms_active",
    "tree_flatten",
    "tree_unflatten",
    "will_accumulate",
]

preserve_versions: Any = torch.autograd._unsafe_preserve_version_counter  # type: ignore[attr-defined]
get_module_state = _get_module_state
insert_module_state = _insert_module_state

# torch 2.13 renamed these two and warns about the older names; 2.11 and 2.12 have only the older ones.
all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor

symmetric_memory: Any = _symmetric_memory

new_dtensor: Any = getattr(torch.Tensor, "_dtensor__new__", DTensor.__new__)
"""``new_dtensor(cls, local, spec, requires_grad=...)``, without the slow Python constructor where torch allows it."""


def make_wrapper(cls: type[DTensor], local: torch.Tensor, spec: DTensorSpec, *, requires_grad: bool = False) -> Any:
    """Creates a DTensor subclass around a local tensor."""
    return new_dtensor(cls, local, spec, requires_grad=requires_grad)


flatten_dense: Any = torch._C._nn.flatten_dense_tensors
"""``flatten_dense(tensors)``: one flat tensor of all elements; a single contiguous tensor is not copied."""


def concatenate_meshes(first: DeviceMesh, second: DeviceMesh) -> DeviceMesh:
    """The mesh with the axes of both, which must be slices of one mesh.

    Raises:
        RuntimeError: If they are not.
    """
    return DeviceMesh._concatenate([first, second])


def gather_options(is_async: bool) -> Any:
    """Options of a process group's own all-gather."""
    options: Any = torch._C._distributed_c10d.AllgatherOptions()
    options.asyncOp = is_async
    return options


def reduce_scatter_options(op: Any, is_async: bool) -> Any:
    """Options of a process group's own reduce-scatter."""
    options: Any = torch._C._distributed_c10d.ReduceScatterOptions()
    options.reduceOp, options.asyncOp = op, is_async
    return options


def all_reduce_options(op: Any, is_async: bool) -> Any:
    """Options of a process group's own all-reduce."""
    options: Any = torch._C._distributed_c10d.AllreduceOptions()
    options.reduceOp, options.asyncOp = op, is_async
    return options


def default_store() -> Any:
    """The store through which the processes of the default process group have met."""
    return dist.distributed_c10d._get_default_store()


def register_foreach_type(cls: type[torch.Tensor]) -> None:
    """Lets torch's optimizers and gradient clipping choose their list (foreach) and fused forms for a tensor type."""
    for supported in (_foreach_utils_types, _optimizer_types):
        if cls not in supported:
            supported.append(cls)


def bare_apply(function: type[torch.autograd.Function]) -> Any:
    """``function.apply`` of one without ``setup_context``, as it is while no functorch transform is active."""
    return super(torch.autograd.Function, function).apply  # type: ignore[misc]


transforms_active: Any = torch._C._are_functorch_transforms_active
"""Whether a functorch transform is active."""


current_tracer: Any = torch._C._dynamo.eval_frame.get_eval_frame_callback
"""What torch.compile does with the frames of this thread; None: nothing."""


def never_trace(function: Any, reason: str) -> None:
    """Marks a function that torch.compile neither compiles nor inlines; what it calls is another matter."""
    skip_frame(function)
    function._torchdynamo_disable_msg = reason


def queue_backward_callback(callback: Any) -> None:
    """Runs ``callback`` once, at the end of the backward pass that is under way."""
    torch.autograd.Variable._execution_engine.queue_callback(callback)


def will_accumulate(param: torch.Tensor) -> bool:
    """Whether the backward under way adds to a leaf's ``.grad``; ``torch.autograd.grad`` does not."""
    with torch.enable_grad():
        view: Any = param.view_as(param)
    try:
        return bool(torch._C._will_engine_execute_node(view.grad_fn.next_functions[0][0]))
    except RuntimeError:  # its gradient is what torch.autograd.grad returns
        return False
