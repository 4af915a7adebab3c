"""From the wrapper's lists to units: the norms of all blocks, the listed modules, and the names of the state dict."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

__all__ = ["ModuleNames", "WrapperUnit", "WrapperUnits", "find_units"]

_LIST, _ROGUE, _CLS = "modules_to_wrap_with_names", "rogue_layer_norm_modules_with_names", "layer_norm_module_cls"
_CHECKPOINTED = "_checkpoint_wrapped_module"  # torch's wrapper hides its level from state dicts


@dataclass(frozen=True)
class WrapperUnit:
    """Modules that are gathered together."""

    modules: list[nn.Module]
    is_norm: bool = False


class ModuleNames:
    """Names of a state dict: those that the user gave to modules, and the model's own for the rest.

    Args:
        model: The model, in its own names.
        given: Names of some of its modules.
    """

    def __init__(self, model: nn.Module, given: Mapping[nn.Module, str]) -> None:
        self._prefixes = {
            path.replace(f".{_CHECKPOINTED}", "").removeprefix(f"{_CHECKPOINTED}."): given[module]
            for path, module in model.named_modules(remove_duplicate=False)
            if module in given
        }

    def given(self, own: str) -> str:
        """The user's name of an entry that the model's own state dict calls ``own``."""
        path, _, tail = own.rpartition(".")
        while path:
            if path in self._prefixes:
                return f"{self._prefixes[path]}.{tail}"
            path, _, last = path.rpartition(".")
            tail = f"{last}.{tail}"
        return own


@dataclass(frozen=True)
class WrapperUnits:
    """What to shard, from the inside out, the model itself last; and the names."""

    units: list[WrapperUnit]
    names: ModuleNames


def find_units(
    model: nn.Module,
    wrapped: Sequence[tuple[nn.Module, str]],
    rogue: Mapping[nn.Module, str],
    norm_cls: type[nn.Module] | tuple[type[nn.Module], ...] | None,
) -> WrapperUnits:
    """Checks the lists against the model and one another, and forms units.

    Norms come first, then the listed modules from the inside out; modules that share a parameter make one unit.

    Raises:
        ValueError: Naming the argument and the entry.
    """
    given = _check_lists(model, wrapped, rogue)
    norms = _find_norms(model, set(rogue), norm_cls)
    listed = {module for module, _ in wrapped}
    for norm in norms:
        inside = [name for module, name in wrapped if module is not norm and module in set(norm.modules())]
        if inside:
            raise ValueError(f"YaFSDP: {_LIST}: {inside[0]!r} lies inside of the norm {_path(model, norm)!r}")
    inner = listed | set(norms)
    for module, name in wrapped:
        if module in norms or not any(True for _ in _own_parameters(module, inner)):
            raise ValueError(
                f"YaFSDP: {_LIST}: {name!r} ({type(module).__name__}) has no parameters besides those of norms and of "
                f"other listed modules; a norm that stands alone belongs into {_ROGUE}"
            )
    units = [WrapperUnit(norms, is_norm=True)] if norms else []
    order = {module: place for place, module in enumerate(model.modules())}
    for modules in _merge_tied(model, sorted(listed, key=order.__getitem__, reverse=True), inner):
        units.append(WrapperUnit(modules))
    units.append(WrapperUnit([model]))
    names = ModuleNames(model, given)
    _check_names(model, names)
    return WrapperUnits(units, names)


def _check_lists(
    model: nn.Module, wrapped: Sequence[tuple[nn.Module, str]], rogue: Mapping[nn.Module, str]
) -> dict[nn.Module, str]:
    if not isinstance(wrapped, Sequence) or not wrapped:
        raise ValueError(f"YaFSDP: {_LIST} must list at least one (module, name), such as each block, got {wrapped!r}")
    if not isinstance(rogue, Mapping):
        raise ValueError(f"YaFSDP: {_ROGUE} must map modules to names, got {type(rogue).__name__}")
    members = set(model.modules()) - {model}
    given: dict[nn.Module, str] = {}
    entries: list[tuple[str, Any]] = [(f"{_LIST}[{place}]", entry) for place, entry in enumerate(wrapped)]
    entries += [(f"{_ROGUE}, entry {place}", entry) for place, entry in enumerate(rogue.items())]
    for where, entry in entries:
        is_pair = isinstance(entry, (tuple, list)) and len(entry) == 2
        if not (is_pair and isinstance(entry[0], nn.Module) and isinstance(entry[1], str) and entry[1]):
            raise ValueError(f"YaFSDP: {where}: expected (module, name), got {_short(entry)}")
        module, name = entry
        if module not in members:
            what = "is the model itself, which is a unit anyway" if module is model else "is no module of the model"
            raise ValueError(f"YaFSDP: {where}: {name!r} ({type(module).__name__}) {what} ({type(model).__name__})")
        if module in given:
            raise ValueError(f"YaFSDP: {where}: the module named {name!r} is given as {given[module]!r} already")
        if name in given.values():
            raise ValueError(f"YaFSDP: {where}: the name {name!r} is given to two modules")
        given[module] = name
    return given


def _find_norms(
    model: nn.Module, rogue: set[nn.Module], norm_cls: type[nn.Module] | tuple[type[nn.Module], ...] | None
) -> list[nn.Module]:
    """Outermost norms with parameters: instances of the class anywhere in the model, and the rogue ones."""
    classes = norm_cls if isinstance(norm_cls, tuple) else () if norm_cls is None else (norm_cls,)
    for cls in classes:
        if not (isinstance(cls, type) and issubclass(cls, nn.Module)):
            raise ValueError(f"YaFSDP: {_CLS} must be a class of modules or a tuple of them, got {norm_cls!r}")
        if not any(isinstance(module, cls) for module in model.modules()):
            known = sorted(
                {type(module).__name__ for module in model.modules() if "norm" in type(module).__name__.lower()}
            )
            raise ValueError(
                f"YaFSDP: {_CLS}: {type(model).__name__} has no {cls.__name__}; classes with 'norm' in their names "
                f"that it has: {known}"
            )
    found: list[nn.Module] = []
    covered: set[nn.Module] = set()
    for module in model.modules():
        if module is model or module in covered or not (module in rogue or isinstance(module, classes)):
            continue
        covered.update(module.modules())
        if any(True for _ in module.parameters()):
            found.append(module)
    return found


def _own_parameters(module: nn.Module, inner: set[nn.Module]) -> Iterator[nn.Parameter]:
    """Parameters of a module's tree without those of the units inside."""
    yield from (param for param in module._parameters.values() if param is not None)
    for child in module.children():
        if child not in inner:
            yield from _own_parameters(child, inner)


def _merge_tied(model: nn.Module, listed: list[nn.Module], inner: set[nn.Module]) -> list[list[nn.Module]]:
    """Puts modules that share a parameter into one unit, also those that nobody listed (a head beside an embedding)."""
    units: list[tuple[list[nn.Module], set[nn.Parameter]]] = []
    for module in listed:
        params = set(_own_parameters(module, inner))
        tied = [unit for unit in units if unit[1] & params]
        if not tied:
            units.append(([module], params))
            continue
        first, *others = tied
        for modules, more in (*others, ([module], params)):
            first[0].extend(modules)
            first[1].update(more)
        units = [unit for unit in units if unit not in others]
    for module in _outside(model, inner):
        own = {param for param in module._parameters.values() if param is not None}
        for modules, params in units:
            if module is not model and own & params:
                modules.append(module)
    return [modules for modules, _ in units]


def _outside(module: nn.Module, inner: set[nn.Module]) -> Iterator[nn.Module]:
    """Modules that no unit covers but the model's own."""
    yield module
    for child in module.children():
        if child not in inner:
            yield from _outside(child, inner)


def _check_names(model: nn.Module, names: ModuleNames) -> None:
    seen: dict[str, torch.Tensor] = {}
    for own, value in model.state_dict(keep_vars=True).items():
        name = names.given(own)
        if seen.setdefault(name, value) is not value:
            raise ValueError(
                f"YaFSDP: {_LIST}: the names make two entries of the state dict equal, {name!r} (one is {own!r} in the "
                f"model)"
            )


def _path(model: nn.Module, module: nn.Module) -> str:
    paths: dict[nn.Module, str] = {member: path for path, member in model.named_modules()}
    return paths[module]


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 200 else f"{text[:197]}..."
