"""``YaFSDP``: shards a model from the list of its modules, as a thin layer over ``fully_shard``."""

from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from ya_fsdp.comm import Backend, YCCLBackend
from ya_fsdp.comm.topology import ranks_per_node
from ya_fsdp.fully_shard import YaFSDPModule, fully_shard
from ya_fsdp.runtime.hooks import watch_outputs
from ya_fsdp.state_dict import get_full_state_dict, get_local_state_dict, load_full_state_dict, load_local_state_dict
from ya_fsdp.wrapper.cycle import AccumulationCycle
from ya_fsdp.wrapper.materialize import UnitPreparation
from ya_fsdp.wrapper.options import Precision, Schedule, choose_backend, device_mesh, refuse_unsupported
from ya_fsdp.wrapper.units import WrapperUnit, find_units

__all__ = ["YaFSDP"]


class YaFSDP(nn.Module):
    """A sharded model, from the list of the modules to shard by.

    The model is sharded in place. Each listed module is a unit, the norms of the whole model make one more, and what is
    left is the model's own. Norms are gathered when the first of them runs and stay until the end of the accumulation
    cycle, where their gradients are reduced once.

    ======  ====================================================  ===================
    stage   a unit's gathers per cycle of k micro-batches         freed
    ======  ====================================================  ===================
    1, 2    1                                                     at the cycle's end
    3       2 k; norms: 1; embeddings and the model's rest: k     after each use
    ======  ====================================================  ===================

    Optimizer state and reduced gradients are sharded in every stage, and each unit is reduced once per cycle: until the
    last micro-batch gradients add up unreduced, whole, in the dtype of the reduction. ``reduce_every_micro_batch=True``
    keeps them sharded instead (stages 2 and 3), for k reductions. Stages 1 and 2 differ in nothing else: a gradient is
    reduced as soon as it is complete, whatever the stage.

    Args:
        module: The model.
        zero_stage: 1, 2 or 3; see above.
        param_dtype: Dtype of forward and backward. Trainable 16-bit parameters are raised to fp32 master weights.
            ``None``: the model's own dtypes, in everything.
        modules_to_wrap_with_names: ``(module, name)`` of each unit; its entries of the state dict start with the name.
        layer_norm_module_cls: Class of the norms (or several).
        gradient_accumulation_steps: Backwards per cycle. Gradients are averaged over them: do not divide the loss.
        data_parallel_process_group: Ranks to shard over; by default all.
        intra_node_data_parallel_process_group: Ranks that ``sync_module_states`` makes equal (by default all), and that
            hold the modules of ``hpz_first_layers_num`` together (by default those of a node).
        model_parallel_process_group: Accepted with one rank; tensor parallelism is not supported.
        all_reduce_grads_across_model_parallel_group: Not supported.
        bit16_reduce_scatter: Reduce gradients in ``param_dtype`` instead of fp32.
        bit32_acc_for_bit16_reduce_scatter: With it: add them up in 32 bits all the same.
        hpz_first_layers_num: The first so many listed modules are gathered inside the node in the backward; until then
            its ranks hold them together, in ``param_dtype``. Stage 3 only.
        rogue_layer_norm_modules_with_names: Norms outside of all listed modules or of another class, with names.
        sync_module_states: Take parameters and buffers from the first rank.
        param_init_fn: Called with each module whose own tensors are on the meta device; gives them memory and values.
        device_id: Device of this process, if it is not the current one's type.
        is_trainable: ``False``: nothing is trained, and parameters are kept in ``param_dtype``.
        use_yccl: Communicate through the ``yccl`` package: 16-bit gathers and, with ``bit16_reduce_scatter``,
            reductions of everything but norms.
        use_yccl_padding: Accepted: pieces always have the padding that yccl needs, so local state dicts fit with and
            without it.
        yccl_intra_inter_expr: Two colours per rank, such as ``"rank // 8, rank % 8"``; without ``use_yccl`` they
            choose the hierarchical backend.
        profile: Turn on the events of yccl.
        backend: Who communicates instead of ``torch.distributed``; see ``fully_shard``.
        reduce_every_micro_batch: See above.

    Raises:
        ValueError: If an argument contradicts another or the model; the message names it.
        ModuleNotFoundError: If yccl is asked for and not installed.
    """

    def __init__(
        self,
        module: nn.Module,
        zero_stage: int,
        param_dtype: torch.dtype | None = None,
        modules_to_wrap_with_names: Sequence[tuple[nn.Module, str]] = (),
        layer_norm_module_cls: type[nn.Module] | tuple[type[nn.Module], ...] | None = None,
        gradient_accumulation_steps: int = 1,
        data_parallel_process_group: dist.ProcessGroup | None = None,
        intra_node_data_parallel_process_group: dist.ProcessGroup | None = None,
        model_parallel_process_group: dist.ProcessGroup | None = None,
        all_reduce_grads_across_model_parallel_group: bool = False,
        bit16_reduce_scatter: bool = False,
        bit32_acc_for_bit16_reduce_scatter: bool = False,
        hpz_first_layers_num: int = 0,
        rogue_layer_norm_modules_with_names: Mapping[nn.Module, str] | None = None,
        sync_module_states: bool = False,
        param_init_fn: Callable[[nn.Module], object] | None = None,
        device_id: int | str | torch.device | None = None,
        is_trainable: bool = True,
        use_yccl: bool = False,
        use_yccl_padding: bool = False,
        yccl_intra_inter_expr: str | None = None,
        profile: bool = False,
        *,
        backend: Backend | None = None,
        reduce_every_micro_batch: bool = False,
    ) -> None:
        super().__init__()
        refuse_unsupported(model_parallel_process_group, all_reduce_grads_across_model_parallel_group)
        schedule = Schedule(zero_stage, gradient_accumulation_steps, reduce_every_micro_batch, hpz_first_layers_num)
        precision = Precision(param_dtype, bit16_reduce_scatter, bit32_acc_for_bit16_reduce_scatter, is_trainable)
        rogue = rogue_layer_norm_modules_with_names or {}
        found = find_units(module, modules_to_wrap_with_names, rogue, layer_norm_module_cls)
        backend = choose_backend(precision, schedule, backend, use_yccl, yccl_intra_inter_expr, profile)
        mesh = device_mesh(data_parallel_process_group, device_id)
        self.module = module
        self.is_trainable = is_trainable
        self._names = found.names
        self._group = mesh.get_group()
        sync_group = (intra_node_data_parallel_process_group or self._group) if sync_module_states else None
        prepare = UnitPreparation(
            module, param_init_fn=param_init_fn, sync_group=sync_group, device=_device(mesh), precision=precision
        )
        intra_node = {entry[0] for entry in modules_to_wrap_with_names[:hpz_first_layers_num]}
        node_size = _node_size(intra_node_data_parallel_process_group) if intra_node else None
        for unit in found.units:
            prepare(unit.modules)
            unit_node_size = None if intra_node.isdisjoint(unit.modules) else node_size
            _shard(unit, mesh, schedule, precision, backend, unit_node_size, is_root=unit is found.units[-1])
        self._cycle = _make_cycle(found.units, schedule, backend if profile else None)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Runs the model."""
        output = self.module(*args, **kwargs)
        if self._cycle is not None and torch.is_grad_enabled():
            watch_outputs(output, self._cycle.enter)
        return output

    def __getattr__(self, name: str) -> Any:
        """What the wrapper has not is the model's."""
        try:
            return super().__getattr__(name)
        except AttributeError:
            if name == "module":  # the constructor has not come so far
                raise
            return getattr(self.module, name)

    def clip_grad_norm_(self, max_norm: float, norm_type: float = 2.0) -> torch.Tensor:
        """Clips the gradients of the whole model by their norm over all ranks. A collective.

        Returns:
            The norm before clipping, the same on all ranks. Shapes: ``[]``.
        """
        return nn.utils.clip_grad_norm_(self.parameters(), max_norm, norm_type)

    def reset_iter_state(self) -> None:
        """Starts a new accumulation cycle after an exception that was caught; what it had added up is dropped."""
        if self._cycle is not None:
            self._cycle.reset()
        cast(YaFSDPModule, self.module).reset_iter_state()

    def state_dict(  # type: ignore[override]
        self, *args: Any, rank0_only: bool = True, cpu_offload: bool = True, **kwargs: Any
    ) -> dict[str, Any]:
        """Full parameters and buffers under the names given. A collective.

        Args:
            *args: With any argument of ``nn.Module.state_dict`` it is that method: sharded tensors, no communication.
            rank0_only: Other ranks than the first take part but get an empty dict.
            cpu_offload: Put the tensors into host memory.
            **kwargs: See ``args``.
        """
        if args or kwargs:
            return self._sharded_state_dict(*args, **kwargs)
        state = get_full_state_dict(self, rank0_only=rank0_only and self._spans_job, cpu_offload=cpu_offload)
        return {} if rank0_only and self._group.rank() else state

    def _sharded_state_dict(
        self, destination: dict[str, Any] | None = None, prefix: str = "", keep_vars: bool = False
    ) -> dict[str, Any]:
        result: dict[str, Any] = OrderedDict() if destination is None else destination
        for name, value in self.module.state_dict(keep_vars=keep_vars).items():
            result[prefix + self._names.given(name)] = value
        return result

    def local_state_dict(self) -> dict[str, Any]:
        """This rank's slices, for the same rank of the same number of ranks. No communication."""
        return get_local_state_dict(self)

    def load_state_dict(  # type: ignore[override]
        self, state_dict: Mapping[str, Any], strict: bool = True
    ) -> tuple[list[str], list[str]]:
        """Loads what :meth:`state_dict` or :meth:`local_state_dict` gave. A collective.

        Args:
            state_dict: Full tensors on every rank, or on the first only and an empty dict elsewhere; or local state.
            strict: Refuse missing and unexpected names before anything is changed.

        Returns:
            Names that the model has and the state dict has not, and the reverse.

        Raises:
            RuntimeError: If names, shapes or, for local state, ranks differ; or if only some ranks got a full one.
        """
        if {"header", "tensors"} == set(state_dict):
            load_local_state_dict(self, state_dict)
            return [], []
        if {"main_parameter", "layernorm_parameter"} & set(state_dict):
            raise RuntimeError(
                "this is local state of the original YaFSDP, whose slices cannot be told apart here; save its full "
                "state_dict() and load that"
            )
        given: list[bool] = [False] * self._group.size()
        dist.all_gather_object(given, bool(state_dict), group=self._group)
        from_first = not all(given) and any(given)
        if from_first and (any(given[1:]) or not given[0] or not self._spans_job):
            raise RuntimeError(
                f"rank {dist.get_rank()}: expected the full state dict on all ranks, or on the first of all ranks "
                f"only; got it on {[rank for rank, has in enumerate(given) if has]} of {len(given)}"
            )
        return load_full_state_dict(self, state_dict, broadcast_from_rank0=from_first, strict=strict)

    @property
    def _spans_job(self) -> bool:
        return self._group.size() == dist.get_world_size()


def _device(mesh: DeviceMesh) -> torch.device:
    if mesh.device_type == "cpu":
        return torch.device("cpu")
    return torch.device(mesh.device_type, torch.accelerator.current_device_index())


def _node_size(intra_node_group: dist.ProcessGroup | None) -> int:
    return ranks_per_node() if intra_node_group is None else intra_node_group.size()


def _shard(
    unit: WrapperUnit,
    mesh: DeviceMesh,
    schedule: Schedule,
    precision: Precision,
    backend: Backend | None,
    node_size: int | None,
    *,
    is_root: bool,
) -> None:
    is_norm = unit.is_norm
    fully_shard(
        unit.modules if len(unit.modules) > 1 else unit.modules[0],
        mesh=mesh,
        reshard_after_forward=schedule.reshards(is_norm=is_norm, is_root=is_root, node_size=node_size),
        mp_policy=precision.policy(is_norm=is_norm),
        backend=None if is_norm and isinstance(backend, YCCLBackend) else backend,
    )
    if schedule.gradient_accumulation_steps > 1:
        factor = mesh.size() * schedule.gradient_accumulation_steps
        cast(YaFSDPModule, unit.modules[0]).set_gradient_divide_factor(factor)


def _make_cycle(units: Sequence[WrapperUnit], schedule: Schedule, profiled: Backend | None) -> AccumulationCycle | None:
    if schedule.gradient_accumulation_steps == 1 and profiled is None:
        return None
    firsts = [cast(YaFSDPModule, unit.modules[0]) for unit in units]
    return AccumulationCycle(
        firsts,
        [first for first, unit in zip(firsts, units, strict=True) if schedule.keeps(is_norm=unit.is_norm)],
        schedule.gradient_accumulation_steps,
        reduces_each=schedule.reduce_every_micro_batch,
        at_end=profiled.process_profiling_events if isinstance(profiled, YCCLBackend) else None,
    )
