"""One parameter: its sharded and its unsharded form, and the modules that show one of them."""

import weakref
from typing import Any, cast

import torch
from torch import nn

from ya_fsdp.layout import ParamSpan
from ya_fsdp.ragged import RaggedShardDTensor

__all__ = ["ParamSite", "YaFSDPParam"]


class ParamSite:
    """A place where a parameter is registered; tied parameters have several.

    Holds the module's parameter dict rather than the module, so that deleting a model frees it at once.
    """

    __slots__ = ("_module", "_parameters", "name", "owner")

    def __init__(self, module: nn.Module, name: str, owner: str) -> None:
        self.name = name
        self.owner = owner
        """Name of the module, for messages."""
        self._parameters: dict[str, nn.Parameter | None] = module._parameters
        # Some modules (recurrent ones) keep copies of their parameters up to date in __setattr__.
        plain = type(module).__setattr__ is nn.Module.__setattr__
        self._module = None if plain else weakref.ref(module)

    @property
    def parameters_id(self) -> int:
        """Identity of the module's parameter dict, which stands for the module."""
        return id(self._parameters)

    @property
    def current(self) -> nn.Parameter | None:
        """The parameter that the module shows now."""
        return self._parameters.get(self.name)

    def show(self, param: nn.Parameter) -> None:
        """Makes the module show ``param``."""
        module = self._module() if self._module is not None else None
        if module is None:
            self._parameters[self.name] = param
        else:
            setattr(module, self.name, param)


class YaFSDPParam:
    """One parameter of a bucket.

    Attributes:
        name: Full name in the root module.
        sites: Where the parameter is registered.
        shape: Shape of the full parameter.
        span: Its range in the bucket's flat buffer.
        sharded_param: This rank's slice, a ``RaggedShardDTensor``; what the optimizer holds.
        unsharded_param: The full parameter, a view of the gather buffer; None before the first gather.
    """

    __slots__ = ("attributes", "name", "shape", "sharded_param", "sites", "span", "unsharded_param")

    def __init__(
        self, name: str, sites: list[ParamSite], param: nn.Parameter, span: ParamSpan, sharded_param: nn.Parameter
    ) -> None:
        self.name = name
        self.sites = sites
        self.shape = param.shape
        self.span = span
        self.attributes: dict[str, Any] = dict(param.__dict__)  # what libraries attach to parameters goes along
        self.sharded_param = sharded_param
        self.unsharded_param: nn.Parameter | None = None
        sharded_param.__dict__.update(self.attributes)

    def set_full_name(self, module_names: dict[int, str]) -> None:
        """Names the parameter as the root does.

        Args:
            module_names: Names of modules by :attr:`ParamSite.parameters_id`.
        """
        site = self.sites[0]
        owner = module_names.get(site.parameters_id)
        if owner is not None:
            self.name = f"{owner}.{site.name}" if owner else site.name

    def init_unsharded_param(self, full: torch.Tensor) -> None:
        """Makes the unsharded parameter out of a flat view of the gather buffer.

        Shapes:
            full: ``[numel]``.
        """
        # .data gives the view a version counter of its own, so that the next gather's write does not look like an
        # in-place change of what autograd saved.
        view = full.view(self.shape).data
        self.unsharded_param = nn.Parameter(view, requires_grad=self.sharded_param.requires_grad)
        self.unsharded_param.__dict__.update(self.attributes)

    def to_sharded(self) -> None:
        """Shows the sharded parameter in every module."""
        for site in self.sites:
            site.show(self.sharded_param)

    def to_unsharded(self) -> None:
        """Shows the unsharded parameter in every module.

        Raises:
            RuntimeError: If somebody else replaced the sharded parameter, whose values would be lost.
        """
        assert self.unsharded_param is not None
        for site in self.sites:
            current = site.current
            if current is not self.sharded_param and current is not self.unsharded_param:
                raise RuntimeError(
                    f"{self.name}: the parameter was replaced after fully_shard (expected the sharded parameter, got "
                    f"{type(current).__name__}). Assign values with copy_(), or shard the model after replacing it."
                )
            site.show(self.unsharded_param)

    def adopt(self) -> None:
        """Takes the parameter that the modules show now as the sharded one.

        Raises:
            RuntimeError: If it is not this parameter's slice.
        """
        current: Any = self.sites[0].current
        if current is self.sharded_param:
            return
        expected = self.sharded_param._spec.placements  # type: ignore[attr-defined]
        if not isinstance(current, RaggedShardDTensor) or current._spec.placements != expected:
            raise RuntimeError(
                f"{self.name}: expected a sharded parameter placed as {expected}, got {type(current).__name__}. Load "
                f"full tensors with load_state_dict(..., assign=False)."
            )
        self.sharded_param = cast(nn.Parameter, current)
        self.to_sharded()
