"""A model's forward and backward on the meta device, where tensors have sizes and no memory: what activations take.

Every tensor that is alive is counted by its storage, in stretches from the start of one unit to the start of the next.
The same model is run twice, as it is and with every block under activation checkpointing, so that the course with any
number of checkpointed blocks can be put together.
"""

import json
import weakref
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from accelerate_plugin.keys import nearest
from accelerate_plugin.units import Unit
from ya_fsdp import Activations, Stage

__all__ = ["PRESETS", "build_model", "measure", "mixed"]

_ATTENTION = "ya_fsdp_scoreless"
_LLAMA_3 = {"vocab_size": 128256, "num_key_value_heads": 8}
# Width, width between the two matrices of the MLP, blocks, heads.
PRESETS: dict[str, dict[str, int]] = {
    name: {
        "hidden_size": hidden,
        "intermediate_size": intermediate,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        **others,
    }
    for name, (hidden, intermediate, layers, heads, others) in {
        "llama-2-7b": (4096, 11008, 32, 32, {"vocab_size": 32000, "num_key_value_heads": 32}),
        "mistral-7b": (4096, 14336, 32, 32, {"vocab_size": 32000, "num_key_value_heads": 8}),
        "llama-3-8b": (4096, 14336, 32, 32, _LLAMA_3),
        "llama-3-70b": (8192, 28672, 80, 64, _LLAMA_3),
        "llama-3-405b": (16384, 53248, 126, 128, _LLAMA_3),
    }.items()
}


class _Scoreless(torch.autograd.Function):
    """The memory of a fused attention kernel: it keeps its inputs and its output, never the scores."""

    @staticmethod
    def forward(ctx: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        batch, heads, length, _ = query.shape
        output = query.new_empty(batch, length, heads, value.shape[-1]).transpose(1, 2)  # laid out as kernels do
        ctx.save_for_backward(query, key, value, output)
        return output

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return tuple(torch.empty_like(tensor) for tensor in ctx.saved_tensors[:3])


def _scoreless(
    module: nn.Module, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: Any, **options: Any
) -> tuple[torch.Tensor, None]:
    output: torch.Tensor = _Scoreless.apply(query, key, value)  # type: ignore[no-untyped-call]
    return output.transpose(1, 2), None


def build_model(name: str) -> nn.Module:
    """Builds a causal language model on the meta device.

    Args:
        name: A folder with a config.json, such a file, a preset, or the name of a model in the local cache.

    Raises:
        ValueError: If there is no such model, or it is none of causal language modelling.
        ImportError: If transformers is not installed.
    """
    try:
        import transformers
        from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
    except ImportError as error:
        raise ImportError(f"building a model needs transformers ({error}); pip install 'ya-fsdp[train]'") from error
    config: Any = _load_config(name, transformers)
    config.use_cache = False
    ALL_ATTENTION_FUNCTIONS.register(_ATTENTION, _scoreless)
    with torch.device("meta"):
        try:
            model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation=_ATTENTION)
        except ValueError as error:
            if "Unrecognized configuration class" in str(error):
                raise ValueError(
                    f"{name}: {type(config).__name__} has no causal language model in transformers"
                ) from error
            model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager")
    return model  # type: ignore[no-any-return]


def _load_config(name: str, transformers: Any) -> Any:
    if name in PRESETS:
        return transformers.LlamaConfig(**PRESETS[name], max_position_embeddings=131072, tie_word_embeddings=False)
    path = Path(name)
    try:
        if path.is_file():
            return transformers.AutoConfig.for_model(**json.loads(path.read_text()))
        return transformers.AutoConfig.from_pretrained(name, local_files_only=True)
    except (OSError, ValueError, TypeError, KeyError) as error:
        if path.exists():
            raise ValueError(f"{name} holds no model configuration that transformers can read: {error}") from error
        hint = f" (did you mean {close}?)" if (close := nearest(name, list(PRESETS))) else ""
        raise ValueError(
            f"{name}: expected a folder with a config.json, such a file, a model in the local cache, or one of "
            f"{', '.join(PRESETS)}{hint}"
        ) from error


class _Meter(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Bytes of all tensors that operators make, while they live."""

    def __init__(self, known: Iterable[torch.Tensor]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.live = self.peak = 0
        self._sizes = {tensor.untyped_storage()._cdata: 0 for tensor in known}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for value in tree_leaves(result):
            if isinstance(value, torch.Tensor):
                self._see(value.untyped_storage())
        return result

    def _see(self, storage: torch.UntypedStorage) -> None:
        key = storage._cdata
        if key in self._sizes:
            return
        self._sizes[key] = storage.nbytes()
        self.live += storage.nbytes()
        self.peak = max(self.peak, self.live)
        weakref.finalize(storage, self._free, key)

    def _free(self, key: int) -> None:
        self.live -= self._sizes.pop(key, 0)


class _Course:
    """Cuts one forward and backward into stages, at the start of each unit's forward and of its backward."""

    def __init__(self, model: nn.Module, units: Sequence[Unit]) -> None:
        self._parameters = list(model.parameters())
        self.meter = _Meter([*self._parameters, *model.buffers()])
        self.units: list[int] = []
        self.forward: list[tuple[int, int]] = []
        self.backward: dict[int, tuple[int, int]] = {}
        self._start = 0
        self._stage = -1
        self._handles = [
            handle
            for index, unit in enumerate(units)
            for module in unit.modules
            for handle in (
                module.register_forward_pre_hook(lambda *_, index=index: self._enter(index)),
                module.register_forward_hook(lambda _, args, output: self._watch(output)),
            )
        ]

    def close(self) -> None:
        for handle in self._handles:
            handle.remove()

    def _enter(self, unit: int) -> None:
        if self.units and self.units[-1] == unit:
            return  # the next module of the same unit
        if self.units:
            self.end_forward()
        self.units.append(unit)

    def end_forward(self) -> None:
        self.forward.append(self._measured())

    def _measured(self) -> tuple[int, int]:
        """Peak and change since the last call, and the start of a new stretch."""
        peak = self.meter.peak - self._start
        for parameter in self._parameters:
            parameter.grad = None
        change = self.meter.live - self._start
        self._start = self.meter.peak = self.meter.live
        return peak, change

    def _watch(self, output: Any) -> None:
        stage = len(self.units) - 1
        for value in tree_leaves(output):
            if isinstance(value, torch.Tensor) and value.requires_grad:
                value.register_hook(lambda _: self._begin_backward(stage))  # type: ignore[no-untyped-call]

    def _begin_backward(self, stage: int) -> None:
        if self._stage == -1:
            self._stage = stage  # what the loss takes belongs to the last stage
        elif stage < self._stage:
            self.end_backward()
            self._stage = stage

    def end_backward(self) -> None:
        self.backward[self._stage] = self._measured()


def measure(model: nn.Module, units: Sequence[Unit], run: Callable[[], torch.Tensor]) -> list[Stage]:
    """Runs a forward and a backward and returns the stages of it.

    Args:
        model: The model, on the meta device, in the dtype of compute.
        units: Its units; stages refer to them by index.
        run: Runs the forward and returns the loss.

    Raises:
        RuntimeError: If the model's code asks for values, which the meta device has not.
    """
    course = _Course(model, units)
    try:
        with course.meter:
            loss = run()
            course.end_forward()
            loss.backward()  # type: ignore[no-untyped-call]
            del loss
            course.end_backward()
    except (NotImplementedError, RuntimeError) as error:
        raise RuntimeError(
            f"activations of {type(model).__name__} cannot be measured without data: {str(error).splitlines()[0]}"
        ) from error
    finally:
        course.close()
    nothing = (0, 0)
    return [
        Stage(unit, Activations(*course.forward[stage], *course.backward.get(stage, nothing)))
        for stage, unit in enumerate(course.units)
    ]


def mixed(plain: Sequence[Stage], checkpointed: Sequence[Stage], blocks: Sequence[int], count: int) -> list[Stage]:
    """The course with the first so many blocks under activation checkpointing.

    Args:
        plain: The course of the model as it is.
        checkpointed: The course with every block checkpointed.
        blocks: Units that are blocks, in order.
        count: Blocks to checkpoint.
    """
    chosen = set(blocks[:count])
    return [b if a.unit in chosen else a for a, b in zip(plain, checkpointed, strict=True)]
