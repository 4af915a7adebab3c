"""One parameter: its sharded and its unsharded form, and the modules that show one of them."""

import inspect
import weakref
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from ya_fsdp._torch_compat import DTensor, make_wrapper, preserve_versions
from ya_fsdp.layout import ParamSpan
from ya_fsdp.policy import MixedPrecisionPolicy
from ya_fsdp.ragged import RaggedShardDTensor
from ya_fsdp.runtime.debug import DEBUG, poison

__all__ = ["GATHER_HOOKS", "ExtensionsData", "ParamSite", "ParamSwitch", "YaFSDPParam", "local_part"]


class ParamSite:
    """A place where a parameter is registered; tied parameters have several.

    Holds the module's parameter dict rather than the module, so that deleting a model frees it at once.
    """

    __slots__ = ("is_plain", "module", "name", "owner", "parameters")

    def __init__(self, module: nn.Module, name: str, owner: str) -> None:
        self.name = name
        self.owner = owner
        """Name of the module, for messages."""
        self.parameters: dict[str, nn.Parameter | None] = module._parameters
        """The module's parameter dict, which stands for the module."""
        # Some modules (recurrent ones) keep copies of their parameters up to date in __setattr__.
        self.is_plain = type(module).__setattr__ is nn.Module.__setattr__
        self.module = weakref.ref(module)

    @property
    def current(self) -> nn.Parameter | None:
        """The parameter that the module shows now."""
        return self.parameters.get(self.name)

    def show(self, param: nn.Parameter) -> None:
        """Makes the module show ``param``."""
        module = None if self.is_plain else self.module()
        if module is None:
            self.parameters[self.name] = param
        else:
            setattr(module, self.name, param)


GATHER_HOOKS = ("fsdp_pre_all_gather", "fsdp_post_all_gather")
"""What a parameter's class defines if it says itself how it is gathered."""


@dataclass
class ExtensionsData:
    """What a parameter's first gather hook tells the second, at every gather.

    Attributes:
        all_gather_metadata: Anything, such as a scale.
    """

    all_gather_metadata: Any = None

    def clear(self) -> None:
        """Forgets it: the next gather brings its own."""
        self.all_gather_metadata = None


def local_part(param: torch.Tensor) -> torch.Tensor:
    """What a rank has of a parameter before it is sharded: all of it, or its block of a DTensor."""
    return param._local_tensor if isinstance(param, DTensor) else param


class YaFSDPParam:
    """One parameter of a bucket.

    Attributes:
        name: Full name in the root module.
        sites: Where the parameter is registered.
        shape: Shape of the unsharded parameter on this rank.
        parallel: How model parallelism has cut the parameter; None: it has not, and ``shape`` is the full shape.
        span: Its range in the bucket's flat buffer.
        sharded_param: This rank's slice, a ``RaggedShardDTensor``; what the optimizer holds.
        unsharded_param: The full parameter, a view of the gather buffer; None before the first gather.
        extensions: What the parameter's own gather hooks tell one another; None: it has none.
    """

    __slots__ = (
        "_inner",
        "attributes",
        "extensions",
        "name",
        "parallel",
        "shape",
        "sharded_param",
        "sites",
        "span",
        "unsharded_param",
    )

    def __init__(
        self, name: str, sites: list[ParamSite], param: nn.Parameter, span: ParamSpan, sharded_param: nn.Parameter
    ) -> None:
        self.name = name
        self.sites = sites
        self.parallel = param._spec if isinstance(param, DTensor) else None
        self.shape = local_part(param).shape
        self.span = span
        self.attributes: dict[str, Any] = dict(param.__dict__)  # what libraries attach to parameters goes along
        self.sharded_param = sharded_param
        self.unsharded_param: nn.Parameter | None = None
        has_hooks = any(hasattr(local_part(sharded_param), hook) for hook in GATHER_HOOKS)
        self.extensions = ExtensionsData() if has_hooks else None
        self._inner: tuple[torch.Tensor, ...] = ()
        sharded_param.__dict__.update(self.attributes)

    def set_full_name(self, module_names: dict[int, str]) -> None:
        """Names the parameter as the root does.

        Args:
            module_names: Names of modules by ``id`` of their parameter dicts.
        """
        site = self.sites[0]
        owner = module_names.get(id(site.parameters))
        if owner is not None:
            self.name = f"{owner}.{site.name}" if owner else site.name

    def set_all_gather_input(
        self, rows: Any, mesh: DeviceMesh, policy: MixedPrecisionPolicy
    ) -> tuple[torch.Tensor, ...]:
        """Calls the parameter's first gather hook and keeps its metadata for the second.

        Args:
            rows: This rank's rows, of the parameter's class.
            mesh: The sharding axis.
            policy: Dtypes of the unit.

        Returns:
            What is to be gathered.

        Raises:
            RuntimeError: If the first tensor has another dtype than the policy wants for the class.
        """
        hook = rows.fsdp_pre_all_gather
        stride = torch.empty(self.shape, device="meta").stride()
        others = (self.shape, stride, self.sites[0].module(), policy)
        takes_mesh_only = len(inspect.signature(hook).parameters) == 1
        assert self.extensions is not None
        inputs, self.extensions.all_gather_metadata = hook(mesh) if takes_mesh_only else hook(mesh, *others)
        for dtype, cls in policy.all_gather_dtype_to_param_cls.items():
            if isinstance(rows, cls) and inputs[0].dtype != dtype:  # what comes behind it may be its scales
                raise RuntimeError(
                    f"{self.name}: all_gather_dtype_to_param_cls wants a {cls.__name__} to be gathered as {dtype}, but "
                    f"its fsdp_pre_all_gather returned {[value.dtype for value in inputs]}"
                )
        return tuple(inputs)

    def init_unsharded_param(self, gathered: tuple[torch.Tensor, ...], dtype: torch.dtype) -> None:
        """Makes the unsharded parameter out of what was gathered.

        Args:
            gathered: A flat view of the gather buffer; for a parameter with gather hooks what its first hook had sent,
                from all ranks. Its second hook is called, and from the second time on fills the same parameter.
            dtype: Dtype of compute.
        """
        if self.extensions is not None:
            self._call_second_hook(gathered, self.extensions, dtype)
            return
        # .data gives the view a version counter of its own, so that the next gather's write does not look like an
        # in-place change of what autograd saved.
        self._make_parameter(gathered[0].view(self.shape).data)

    def _make_parameter(self, full: torch.Tensor) -> None:
        if self.parallel is not None:
            full = make_wrapper(DTensor, full, self.parallel)
        self.unsharded_param = nn.Parameter(full, requires_grad=self.sharded_param.requires_grad)
        self.unsharded_param.__dict__.update(self.attributes)

    @torch.no_grad()
    def _call_second_hook(
        self, gathered: tuple[torch.Tensor, ...], extensions: "ExtensionsData", dtype: torch.dtype
    ) -> None:
        hook = self.sharded_param._local_tensor.fsdp_post_all_gather  # type: ignore[attr-defined]
        metadata = extensions.all_gather_metadata
        extensions.clear()
        if self.unsharded_param is None:
            full, self._inner = hook(gathered, metadata, dtype)
            self._make_parameter(full)
            return
        for inner in self._inner:
            storage = inner.untyped_storage()
            if not storage.nbytes():
                storage.resize_(inner.numel() * inner.itemsize)
        # What autograd saved in the forward is filled with the same values again.
        with preserve_versions((self.unsharded_param, *self._inner)):
            hook(gathered, metadata, dtype, out=local_part(self.unsharded_param))

    def free_unsharded_param(self, gathered: Sequence[torch.UntypedStorage]) -> None:
        """Frees what the second hook has made, beside what was gathered."""
        known = {storage._cdata for storage in gathered}
        for inner in self._inner:
            storage = inner.untyped_storage()
            if storage._cdata in known:
                continue
            if DEBUG.is_on:
                poison(storage)
            else:
                storage.resize_(0)

    def to_sharded(self) -> None:
        """Shows the sharded parameter in every module."""
        for site in self.sites:
            site.show(self.sharded_param)

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


class ParamSwitch:
    """Shows all sharded or all unsharded parameters of a bucket; runs four times per unit and step, so it is flat.

    Args:
        params: The parameters, each with an unsharded form.
    """

    def __init__(self, params: Iterable[YaFSDPParam]) -> None:
        plain, others, pairs = [], [], []
        for param in params:
            full = param.unsharded_param
            assert full is not None
            pairs.append((param.sharded_param, full))
            for site in param.sites:
                if site.is_plain:
                    plain.append((site.parameters, site.name, param.sharded_param, full, param.name))
                else:
                    others.append((site, param.sharded_param, full, param.name))
        self._plain = plain
        self._others = others
        self._pairs = pairs
        self._num_switches = -1

    def to_sharded(self) -> None:
        """Shows the sharded parameters."""
        for parameters, name, sharded, _, _ in self._plain:
            parameters[name] = sharded
        for site, sharded, _, _ in self._others:
            site.show(sharded)

    def to_unsharded(self) -> None:
        """Shows the unsharded parameters, which want gradients as the sharded ones do.

        Raises:
            RuntimeError: If somebody else replaced a sharded parameter, whose values would be lost.
        """
        # In the backward too: adapters that were off in between (a reference's forward) wanted none then.
        if self._num_switches != RaggedShardDTensor.num_switches:
            self._num_switches = RaggedShardDTensor.num_switches
            for sharded, full in self._pairs:
                if full.requires_grad != sharded.requires_grad:
                    full.requires_grad_(sharded.requires_grad)
        for parameters, name, sharded, full, full_name in self._plain:
            current = parameters.get(name)
            if current is not sharded and current is not full:
                raise _replaced(full_name, current)
            parameters[name] = full
        for site, sharded, full, full_name in self._others:
            if site.current is not sharded and site.current is not full:
                raise _replaced(full_name, site.current)
            site.show(full)


def _replaced(name: str, current: object) -> RuntimeError:
    return RuntimeError(
        f"{name}: the parameter was replaced after fully_shard (expected the sharded parameter, got "
        f"{type(current).__name__}). Assign values with copy_(), or shard the model after replacing it."
    )
