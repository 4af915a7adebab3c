"""The wrapper's switches, checked against one another, and what they mean to the engine."""

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from ya_fsdp.comm import Backend, HierarchicalBackend, YCCLBackend
from ya_fsdp.policy import MixedPrecisionPolicy

__all__ = ["Precision", "Schedule", "choose_backend", "device_mesh", "refuse_unsupported"]

_BIT16 = (torch.bfloat16, torch.float16)


@dataclass(frozen=True)
class Schedule:
    """What is freed when, and how often gradients are reduced; see ``YaFSDP``.

    Raises:
        ValueError: If a value is impossible or contradicts another.
    """

    zero_stage: int
    gradient_accumulation_steps: int
    reduce_every_micro_batch: bool
    hpz_first_layers_num: int

    def __post_init__(self) -> None:
        if type(self.zero_stage) is not int or self.zero_stage not in (1, 2, 3):
            raise ValueError(f"YaFSDP: zero_stage must be 1, 2 or 3, got {self.zero_stage!r}")
        steps = self.gradient_accumulation_steps
        if type(steps) is not int or steps < 1:
            raise ValueError(f"YaFSDP: gradient_accumulation_steps must be a positive integer, got {steps!r}")
        if self.reduce_every_micro_batch and self.zero_stage == 1:
            raise ValueError(
                "YaFSDP: reduce_every_micro_batch=True contradicts zero_stage=1, which keeps whole gradients until the "
                "last micro-batch; use zero_stage=2 or 3"
            )
        layers = self.hpz_first_layers_num
        if type(layers) is not int or layers < 0:
            raise ValueError(f"YaFSDP: hpz_first_layers_num must be a number of modules, got {layers!r}")
        if layers and self.zero_stage != 3:
            raise ValueError(
                f"YaFSDP: hpz_first_layers_num={layers} contradicts zero_stage={self.zero_stage}, in which modules are "
                f"gathered once and need no shard within the node; use zero_stage=3, or leave it out"
            )

    def keeps(self, *, is_norm: bool) -> bool:
        """Whether a unit stays gathered until the end of the cycle."""
        return is_norm or self.zero_stage < 3

    def reshards(self, *, is_norm: bool, is_root: bool, node_size: int | None) -> bool | int | None:
        """``reshard_after_forward`` of a unit; a root of stage 3 does as roots do.

        Args:
            is_norm: The unit of all norms.
            is_root: The unit of the model itself.
            node_size: If given, the ranks of a node hold the unit together between forward and backward.
        """
        if self.keeps(is_norm=is_norm):
            return False
        return None if is_root else node_size or True


@dataclass(frozen=True)
class Precision:
    """Dtypes of compute, reduction and storage; see ``YaFSDP``.

    Raises:
        ValueError: If a value is impossible or contradicts another.
    """

    param_dtype: torch.dtype | None
    bit16_reduce_scatter: bool
    bit32_acc_for_bit16_reduce_scatter: bool
    is_trainable: bool

    def __post_init__(self) -> None:
        dtype = self.param_dtype
        if dtype is not None and not (isinstance(dtype, torch.dtype) and dtype.is_floating_point):
            raise ValueError(f"YaFSDP: param_dtype must be a floating-point torch.dtype or None, got {dtype!r}")
        if self.bit16_reduce_scatter and not self.is_bit16:
            raise ValueError(
                f"YaFSDP: bit16_reduce_scatter=True needs param_dtype=torch.bfloat16 or torch.float16, got {dtype}"
            )
        if self.bit32_acc_for_bit16_reduce_scatter and not self.bit16_reduce_scatter:
            raise ValueError(
                "YaFSDP: bit32_acc_for_bit16_reduce_scatter=True has no meaning without bit16_reduce_scatter=True: "
                "gradients travel and are added up in 32 bits then"
            )

    @property
    def is_bit16(self) -> bool:
        """Forward and backward, and so gathers, are 16 bits wide."""
        return self.param_dtype in _BIT16

    def policy(self, *, is_norm: bool) -> MixedPrecisionPolicy:
        """Dtypes of a unit.

        Args:
            is_norm: The unit of all norms: entered once for many modules, so it cannot cast the inputs of each.
        """
        reduce_dtype = None
        if self.is_bit16:
            reduce_dtype = self.param_dtype if self.bit16_reduce_scatter else torch.float32
        return MixedPrecisionPolicy(
            param_dtype=self.param_dtype,
            reduce_dtype=reduce_dtype,
            cast_forward_inputs=not is_norm,
            bit32_acc_for_bit16_reduce_scatter=self.bit32_acc_for_bit16_reduce_scatter,
        )

    def stored(self, param: torch.Tensor) -> torch.dtype:
        """Dtype in which a parameter is sharded: 16-bit ones that are trained get fp32 master weights."""
        if self.param_dtype is None or not param.is_floating_point():
            return param.dtype
        if not self.is_trainable:
            return self.param_dtype
        return torch.float32 if param.requires_grad and param.dtype in _BIT16 else param.dtype


def choose_backend(
    precision: Precision,
    schedule: Schedule,
    backend: Backend | None,
    use_yccl: bool,
    colors: str | None,
    profile: bool,
) -> Backend | None:
    """Who communicates for all units but, with yccl, the norms.

    Raises:
        ColorExpressionError: If ``yccl_intra_inter_expr`` is not understood; with the position of the fault.
        ModuleNotFoundError: If yccl is asked for and not installed.
        ValueError: If arguments contradict one another.
    """
    for name, value in (("use_yccl", use_yccl), ("yccl_intra_inter_expr", colors)):
        if backend is not None and value:
            raise ValueError(f"YaFSDP: {name}={value!r} contradicts backend={backend!r}; give one of the two")
    if use_yccl and schedule.hpz_first_layers_num:
        raise ValueError(
            f"YaFSDP: use_yccl=True contradicts hpz_first_layers_num={schedule.hpz_first_layers_num}: yccl gathers "
            f"among all ranks only"
        )
    if use_yccl and not precision.is_bit16:
        raise ValueError(
            f"YaFSDP: use_yccl=True is for 16-bit gathers and needs param_dtype=torch.bfloat16 or torch.float16, got "
            f"{precision.param_dtype}"
        )
    if profile and not use_yccl:
        raise ValueError(
            "YaFSDP: profile=True turns on events of yccl and needs use_yccl=True; torch.profiler shows the engine's "
            "collectives without a switch"
        )
    if use_yccl:
        return YCCLBackend(colors, reduces=precision.bit16_reduce_scatter, profile=profile)
    return HierarchicalBackend(colors) if colors is not None else backend


def refuse_unsupported(model_parallel_group: dist.ProcessGroup | None, reduces_over_it: bool) -> None:
    """Raises ValueError for arguments of the original wrapper that mean nothing here."""
    if model_parallel_group is not None and model_parallel_group.size() > 1:
        raise ValueError(
            f"YaFSDP: model_parallel_process_group with {model_parallel_group.size()} ranks: tensor parallelism is not "
            f"supported; leave it out, or give a group of one rank"
        )
    if reduces_over_it:
        raise ValueError(
            "YaFSDP: all_reduce_grads_across_model_parallel_group=True: tensor parallelism is not supported; leave it "
            "out"
        )


def device_mesh(group: dist.ProcessGroup | None, device_id: int | str | torch.device | None) -> DeviceMesh:
    """Mesh over a process group on the device that the wrapper is asked to use.

    Raises:
        ValueError: If there is no process group, or ``device_id`` is not where this process computes.
    """
    if not dist.is_initialized():
        raise ValueError("YaFSDP needs a process group: call torch.distributed.init_process_group first")
    kind = _device_type(device_id)
    if group is None or group is dist.group.WORLD:
        return init_device_mesh(kind, (dist.get_world_size(),))
    return DeviceMesh.from_group(group, kind)


def _device_type(device_id: int | str | torch.device | None) -> str:
    accelerator = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    if device_id is None:
        return "cpu" if accelerator is None else accelerator.type
    if type(device_id) is int:
        if accelerator is None:
            raise ValueError(
                f"YaFSDP: device_id={device_id} names an accelerator and this machine has none; leave it out, or give "
                f"torch.device('cpu')"
            )
        device = torch.device(accelerator.type, device_id)
    elif isinstance(device_id, (str, torch.device)):
        device = torch.device(device_id)
    else:
        raise ValueError(f"YaFSDP: device_id must be an index or a torch.device, got {device_id!r}")
    if device.type != "cpu" and device.index not in (None, torch.accelerator.current_device_index()):
        raise ValueError(
            f"YaFSDP: device_id={device_id!r}, but this process computes on index "
            f"{torch.accelerator.current_device_index()}; call torch.accelerator.set_device_index({device.index}) first"
        )
    return device.type
