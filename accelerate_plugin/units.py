"""From a model to the list of its units: which modules are gathered and released together.

By default nothing needs to be configured: the input embedding is one unit, each repeated block is one, and the final
norm is one together with the output head. Modules that share a parameter end up in one unit, because one parameter can
be gathered by one unit only.
"""

from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import TypeGuard

from torch import nn

from accelerate_plugin.keys import SettingsError, nearest
from accelerate_plugin.settings import Settings

__all__ = ["Unit", "find_blocks", "find_units"]

# Containers have no forward of their own, so hooks on them would never run.
_CONTAINERS = (nn.ModuleList, nn.ModuleDict)


@dataclass(slots=True)
class Unit:
    """Modules that are sharded, gathered and released together.

    Attributes:
        kind: ``block``, ``embedding``, ``head`` or ``tied``.
        names: full names of the modules, in the order of ``modules``.
        class_name: class of the first module, before it was sharded.
    """

    kind: str
    names: list[str] = field(default_factory=list)
    modules: list[nn.Module] = field(default_factory=list)
    class_name: str = field(default="", init=False)

    @property
    def label(self) -> str:
        """For messages."""
        return " + ".join(self.names)

    def __post_init__(self) -> None:
        # Sharding gives modules a class of another name; messages speak of the user's.
        self.class_name = type(self.modules[0]).__name__ if self.modules else ""


def find_units(model: nn.Module, settings: Settings) -> list[Unit]:
    """Chooses the units of a model, inner ones first; what is left over belongs to the root.

    Raises:
        SettingsError: for a class name that the model has not, or a size that no module reaches.
    """
    if settings.auto_wrap_policy == "NO_WRAP":
        return []
    if settings.auto_wrap_policy == "SIZE_BASED_WRAP":
        units = _units_by_size(model, settings.min_num_params)
    else:
        blocks = [Unit("block", [name], [module]) for name, module in find_blocks(model, settings.wrap_classes)]
        units = _ends(model, blocks) + blocks
    return _join_shared(model, units)


def find_blocks(model: nn.Module, class_names: tuple[str, ...] = ()) -> list[tuple[str, nn.Module]]:
    """The repeated blocks of a model, outermost only, in the order in which the model lists them.

    Named classes decide, then the model's own list of modules that must not be split, then the largest list of modules
    of one class.

    Raises:
        SettingsError: naming each class that the model has not, and the classes that it has.
    """
    if class_names:
        _require_classes(model, class_names)
        return list(_outermost(model, set(class_names)))
    declared: set[str] = set()
    for module in model.modules():
        declared.update(getattr(module, "_no_split_modules", None) or ())
    found = list(_outermost(model, declared))
    return found if found else _largest_list(model)


def _require_classes(model: nn.Module, class_names: tuple[str, ...]) -> None:
    present = sorted({type(module).__name__ for module in model.modules() if any(True for _ in module.parameters())})
    missing = [name for name in class_names if name not in {type(module).__name__ for module in model.modules()}]
    if not missing:
        return
    hints = [f"{name} (did you mean {close}?)" if (close := nearest(name, present)) else name for name in missing]
    raise SettingsError(
        f"fsdp_transformer_layer_cls_to_wrap: {type(model).__name__} has no module of class {', '.join(hints)}; "
        f"classes with parameters in it: {', '.join(present)}"
    )


def _outermost(model: nn.Module, class_names: set[str]) -> Iterator[tuple[str, nn.Module]]:
    inside: set[nn.Module] = set()
    for name, module in model.named_modules():
        if module in inside or type(module).__name__ not in class_names or isinstance(module, _CONTAINERS):
            continue
        if module is model:
            continue
        inside.update(module.modules())
        if any(True for _ in module.parameters()):
            yield name, module


def _largest_list(model: nn.Module) -> list[tuple[str, nn.Module]]:
    best: list[tuple[str, nn.Module]] = []
    best_size = 0
    for name, module in model.named_modules():
        if not isinstance(module, nn.ModuleList) or len(module) < 2 or len({type(child) for child in module}) != 1:
            continue
        size = sum(parameter.numel() for parameter in module.parameters())
        if size > best_size:
            best_size = size
            best = [(f"{name}.{index}" if name else str(index), child) for index, child in enumerate(module)]
    return best


def _ends(model: nn.Module, blocks: list[Unit]) -> list[Unit]:
    """The input embedding, and the final norm together with the output head, where they are not part of a block."""
    taken = {module for unit in blocks for outer in unit.modules for module in outer.modules()}
    names = {module: name for name, module in model.named_modules()}

    def usable(module: nn.Module | None) -> TypeGuard[nn.Module]:
        return (
            module is not None
            and module in names
            and module is not model
            and module not in taken
            and any(True for _ in module.parameters())
        )

    units = []
    embedding = _call(model, "get_input_embeddings")
    if usable(embedding):
        units.append(Unit("embedding", [names[embedding]], [embedding]))
    head = _call(model, "get_output_embeddings")
    if usable(head) and head is not embedding:
        tail = [module for module in (_final_norm(model, blocks), head) if usable(module)]
        units.append(Unit("head", [names[module] for module in tail], tail))
    return units


def _call(model: nn.Module, method: str) -> nn.Module | None:
    function = getattr(model, method, None)
    if function is None:
        return None
    try:
        result = function()
    except (NotImplementedError, AttributeError):  # models without such a module say so in these two ways
        return None
    return result if isinstance(result, nn.Module) else None


def _final_norm(model: nn.Module, blocks: list[Unit]) -> nn.Module | None:
    """The last norm beside the list of blocks; None where there is none."""
    if not blocks:
        return None
    # `model.layers.3` lies in the list `model.layers`, whose owner `model` also owns the final norm.
    owner_name = blocks[-1].names[0].rsplit(".", 2)[0] if blocks[-1].names[0].count(".") >= 2 else ""
    owner = model.get_submodule(owner_name)
    norms = [child for name, child in owner.named_children() if _is_norm(name, child)]
    return norms[-1] if norms else None


def _is_norm(name: str, module: nn.Module) -> bool:
    described = f"{name} {type(module).__name__}".lower()
    return "norm" in described or name.startswith("ln")


def _units_by_size(model: nn.Module, minimum: int) -> list[Unit]:
    """Inner modules first: a module is a unit when what it holds beyond the units inside it reaches the minimum."""
    units: list[Unit] = []
    claimed: set[nn.Parameter] = set()

    def visit(name: str, module: nn.Module) -> None:
        for child_name, child in module.named_children():
            visit(f"{name}.{child_name}" if name else child_name, child)
        if module is model or isinstance(module, _CONTAINERS):
            return
        own = {parameter for parameter in module.parameters() if parameter not in claimed}
        if own and sum(parameter.numel() for parameter in own) >= max(minimum, 1):
            claimed.update(own)
            units.append(Unit("block", [name], [module]))

    visit("", model)
    return units


def _join_shared(model: nn.Module, units: list[Unit]) -> list[Unit]:
    """Joins units that share a parameter, and draws in other modules that own a parameter of a unit."""
    unit_of: dict[nn.Module, int] = {}
    for index, unit in enumerate(units):
        for outer in unit.modules:
            for module in outer.modules():
                unit_of.setdefault(module, index)
    owners: dict[nn.Parameter, list[tuple[str, nn.Module]]] = {}
    for name, module in model.named_modules():
        for parameter in module._parameters.values():
            if parameter is not None:
                owners.setdefault(parameter, []).append((name, module))
    parent = list(range(len(units)))

    def root(index: int) -> int:
        while parent[index] != index:
            index = parent[index]
        return index

    drawn_in: dict[int, list[tuple[str, nn.Module]]] = {}
    for holders in owners.values():
        held = sorted({root(unit_of[module]) for _, module in holders if module in unit_of})
        for other in held[1:]:
            parent[other] = held[0]
        outside = [holder for holder in holders if holder[1] not in unit_of]
        if held and outside:
            drawn_in.setdefault(held[0], []).extend(outside)
    joined: dict[int, Unit] = {}
    for index, unit in enumerate(units):
        _extend(joined.setdefault(root(index), Unit(unit.kind)), zip(unit.names, unit.modules, strict=True), unit.kind)
    for index, holders in drawn_in.items():
        _extend(joined[root(index)], holders, "tied")
    return _inner_first([unit for unit in joined.values() if model not in unit.modules])


def _inner_first(units: list[Unit]) -> list[Unit]:
    """Leaves out modules that lie in another one of their unit, and puts units that lie in another unit before it."""
    inside: dict[int, set[nn.Module]] = {}
    for unit in units:
        members = list(zip(unit.names, unit.modules, strict=True))
        below = {module for outer in unit.modules for module in outer.modules() if module is not outer}
        unit.names = [name for name, module in members if module not in below]
        unit.modules = [module for _, module in members if module not in below]
        inside[id(unit)] = below
    depth = {id(unit): sum(other.modules[0] in inside[id(unit)] for other in units) for unit in units}
    return sorted(units, key=lambda unit: depth[id(unit)])


def _extend(unit: Unit, members: Iterable[tuple[str, nn.Module]], kind: str) -> None:
    before = len(unit.modules)
    for name, module in members:
        if module not in unit.modules:
            unit.names.append(name)
            unit.modules.append(module)
    unit.class_name = unit.class_name or type(unit.modules[0]).__name__
    if before and len(unit.modules) > before:
        unit.kind = "tied" if kind != unit.kind or kind == "tied" else kind


def count_by_class(units: Iterable[Unit]) -> Counter[str]:
    """How many block units there are of each class, for the report."""
    return Counter(unit.class_name for unit in units if unit.kind == "block")
