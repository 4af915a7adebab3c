"""The only place that registers hooks: on modules, on outputs, and around inputs."""

import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import fields, is_dataclass
from functools import partial
from typing import Any, Protocol, cast

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from ya_fsdp._torch_compat import bare_apply, transforms_active, tree_flatten, tree_unflatten
from ya_fsdp.runtime.compiler import untraced
from ya_fsdp.runtime.settings import UnitPhase

__all__ = [
    "PostBackward",
    "RegisterPostBackwardFunction",
    "UnitHooks",
    "on_gradient",
    "watch_inputs",
    "watch_outputs",
]

_PLAIN = (int, float, bool, str, type(None), torch.dtype, torch.device)


class PostBackward(Protocol):
    """Whatever wants to know that the backward has passed its inputs."""

    phase: UnitPhase

    def post_backward(self) -> None:
        """Called once per forward, when the gradients of that forward's inputs are complete."""


class RegisterPostBackwardFunction(torch.autograd.Function):
    """Identity around a unit's inputs; its backward tells the parameter group that the unit is through."""

    @staticmethod
    def forward(ctx: Any, param_group: PostBackward, *inputs: torch.Tensor) -> tuple[torch.Tensor, ...]:  # noqa: D102
        ctx.param_group = param_group
        ctx.unit = param_group.phase
        return inputs

    @staticmethod
    @untraced
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:  # noqa: D102
        if torch.is_grad_enabled():  # create_graph=True
            with torch.no_grad():
                ctx.param_group.post_backward()
            _watch_recorded(grads, ctx.unit)
        else:
            ctx.param_group.post_backward()
        return (None, *grads)


_bare_apply = bare_apply(RegisterPostBackwardFunction)


def watch_inputs(
    param_group: PostBackward, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any], bool]:
    """Wraps the tensors among a forward's arguments that require gradients.

    Returns:
        The arguments with those tensors replaced, and whether there was one.
    """
    values, spec = [*args, *kwargs.values()], None
    places, tensors, has_containers = _with_gradients(values)
    if has_containers:
        values, spec = tree_flatten((args, kwargs))
        places, tensors, _ = _with_gradients(values)
    if not places:
        return args, kwargs, False
    apply = RegisterPostBackwardFunction.apply if transforms_active() else _bare_apply
    tensors = apply(param_group, *tensors)
    for place, tensor in zip(places, tensors, strict=True):
        values[place] = tensor
    if spec is not None:
        args, kwargs = tree_unflatten(values, spec)
        return args, kwargs, True
    return tuple(values[: len(args)]), dict(zip(kwargs, values[len(args) :], strict=True)), True


def _with_gradients(values: list[Any]) -> tuple[list[int], list[torch.Tensor], bool]:
    """Places of the tensors that require gradients, these, and whether anything may hold further tensors."""
    places, tensors, has_containers = [], [], False
    for place, value in enumerate(values):
        if isinstance(value, torch.Tensor):
            if value.requires_grad:
                places.append(place)
                tensors.append(value)
        elif not isinstance(value, _PLAIN):
            has_containers = True
    return places, tensors, has_containers


def watch_outputs(output: Any, enter: Callable[[], None], unit: UnitPhase | None = None) -> bool:
    """Calls ``enter`` when a backward reaches a tensor of a forward's output, in whatever containers or dataclasses.

    Args:
        output: The output.
        enter: What to call.
        unit: Whose forward it was, if gradients of gradients are to be seen to.

    Returns:
        Whether a backward can reach it.
    """
    hook = partial(_on_gradient_of_output, enter, unit)
    found = False
    for value in (output,) if isinstance(output, torch.Tensor) else _tensors_in(output):
        if value.requires_grad:
            found = True
            value.register_hook(hook)  # type: ignore[no-untyped-call]
    return found


@untraced
def _on_gradient_of_output(
    enter: Callable[[], None], unit: UnitPhase | None, grad: torch.Tensor
) -> torch.Tensor | None:
    if not torch.is_grad_enabled():
        enter()
        return None
    with torch.no_grad():
        enter()
    if unit is None or not grad.requires_grad:
        return None
    return cast(torch.Tensor, GradientBorder.apply(unit, grad))  # type: ignore[no-untyped-call]


def _tensors_in(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
        return
    for leaf in tree_flatten(value)[0]:
        if isinstance(leaf, torch.Tensor):
            yield leaf
        elif is_dataclass(leaf) and not isinstance(leaf, type):
            for member in fields(leaf):
                yield from _tensors_in(getattr(leaf, member.name))


class GradientBorder(torch.autograd.Function):
    """Identity around the gradient of a unit's output: where what a recorded backward does in the unit begins."""

    @staticmethod
    def forward(ctx: Any, unit: UnitPhase, grad: torch.Tensor) -> torch.Tensor:
        ctx.unit = unit
        return grad.view_as(grad)

    @staticmethod
    @untraced
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        _watch_recorded(grads, ctx.unit)
        return (None, *grads)


def _watch_recorded(grads: Sequence[torch.Tensor | None], unit: UnitPhase) -> None:
    """Sees to gradients of gradients, if the backward under way is recorded (``create_graph=True``).

    What it records reads the unit's weights again when it is differentiated. It begins at the gradients of the unit's
    outputs and ends at those of its inputs, where a differentiation enters: these are watched as outputs of a forward
    are. From within, it also leads into the middle of the unit's forward, past the outputs, so every node between the
    borders makes sure that the unit is gathered.
    """
    enter = unit.enter_backward()
    if enter is None or not torch.is_grad_enabled():
        return
    gather = partial(enter, unit.open_graph())
    watch_outputs([grad for grad in grads if grad is not None], gather, unit)
    for node in _nodes_inside(grads, unit):
        node.register_prehook(partial(_on_node, gather))


@untraced
@torch.no_grad()
def _on_node(gather: Callable[[], None], grads: Any) -> None:
    gather()


def _nodes_inside(grads: Sequence[torch.Tensor | None], unit: UnitPhase) -> Iterator[Any]:
    """Nodes that a differentiation of ``grads`` may reach without crossing a border of the unit."""
    seen: set[Any] = set()
    waiting = [grad.grad_fn for grad in grads if grad is not None and grad.grad_fn is not None]
    while waiting:
        node: Any = waiting.pop()
        if node not in seen and getattr(node, "unit", None) is not unit:
            seen.add(node)
            yield node
            waiting += [following for following, _ in node.next_functions if following is not None]


def on_gradient(param: nn.Parameter, hook: Callable[[torch.Tensor], None]) -> RemovableHandle:
    """Calls ``hook`` when a parameter's gradient has been accumulated."""
    handle: RemovableHandle = param.register_post_accumulate_grad_hook(hook)  # type: ignore[no-untyped-call]
    return handle


class Unit(Protocol):
    """Whatever wants to know when its modules run."""

    def _pre_forward(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Ahead of the forward; returns the arguments to use."""

    def _post_forward(self, module: nn.Module, args: Any, output: Any) -> Any:
        """Behind the forward; returns the output to use."""

    def _part_forward(self, output: Any) -> None:
        """Behind the forward of one of several modules, while others are still to run."""

    def _is_outermost(self) -> bool:
        """Whether no forward of a unit around this one is under way."""

    def _forward_failed(self) -> None:
        """The forward raised."""


class UnitHooks:
    """Forward hooks of one unit: entered with the first of its modules to run, left when all of them have run.

    Modules that are called by themselves, outside of a forward that would come to the others, are left at once.

    Args:
        modules: The unit's modules; they own this object.
        unit: The unit.
    """

    def __init__(self, modules: Iterable[nn.Module], unit: Unit) -> None:
        self._unit = unit
        self._waiting: set[int] = set()
        self._num_modules = 0
        for index, module in enumerate(modules):
            self._num_modules += 1
            module.register_forward_pre_hook(self._enter, prepend=True, with_kwargs=True)
            module.register_forward_hook(partial(self._leave, index), prepend=False, always_call=True)

    def reset(self) -> bool:
        """Forgets a forward that did not run all modules, so that the next one enters the unit anew.

        Returns:
            Whether there was one.
        """
        was_entered = bool(self._waiting)
        self._waiting.clear()
        return was_entered

    @untraced
    def _enter(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if self._num_modules > 1:
            if self._waiting:
                return None
            self._waiting.update(range(self._num_modules))
        return self._unit._pre_forward(module, args, kwargs)

    @untraced
    def _leave(self, index: int, module: nn.Module, args: tuple[Any, ...], output: Any) -> Any:
        if output is None and sys.exc_info()[1] is not None:  # torch calls the hook because the forward raised
            return self._unit._forward_failed()
        if self._num_modules > 1:
            self._waiting.discard(index)
            if self._waiting and not self._unit._is_outermost():
                return self._unit._part_forward(output)
            self._waiting.clear()
        return self._unit._post_forward(module, args, output)
