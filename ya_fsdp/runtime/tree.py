"""The units in a module tree."""

from typing import Any, Protocol, TypeVar

from torch import nn

from ya_fsdp._torch_compat import get_module_state
from ya_fsdp.runtime.param_group import YaFSDPParamGroup
from ya_fsdp.runtime.settings import UnitPhase

__all__ = ["NamedUnit", "units_below"]


class NamedUnit(Protocol):
    """What gets names from the root."""

    name: str
    groups: list[YaFSDPParamGroup]
    phase: UnitPhase


U = TypeVar("U", bound=NamedUnit)


def units_below(root: nn.Module, root_unit: U) -> list[U]:
    """The units of a module tree in module order, with full names set on units and parameters."""
    units: dict[int, U] = {id(root_unit): root_unit}
    for name, module in root.named_modules():
        unit: Any = get_module_state(module)
        if isinstance(unit, type(root_unit)):
            if id(unit) not in units or module is root:
                unit.name = name or type(module).__name__
            units.setdefault(id(unit), unit)
    names = {id(module._parameters): name for name, module in root.named_modules()}
    for unit in units.values():
        unit.phase.name = unit.name
        for group in unit.groups:
            for param in group.params:
                param.set_full_name(names)
    return list(units.values())
