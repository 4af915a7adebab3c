"""Tiny models in the older wrapper, with the lists that its users write."""

from collections.abc import Mapping
from typing import Any

from torch import nn

from tests.support.models import build_model
from ya_fsdp import YaFSDP


def lists_of(model: nn.Module, names: Mapping[str, str] | None = None) -> dict[str, Any]:
    """Return the wrapper's arguments that name modules: embeddings, blocks and head; all norms in one unit.

    Args:
        model: A model of :func:`tests.support.models.build_model`.
        names: Names to give instead of the model's own paths.
    """
    base = model.base_model_prefix
    blocks = "h" if hasattr(model.get_submodule(base), "h") else "layers"
    embeddings, norm = (["wte", "wpe"], "ln_f") if blocks == "h" else (["embed_tokens"], "norm")
    paths = [f"{base}.{name}" for name in embeddings]
    paths += [f"{base}.{blocks}.{i}" for i in range(len(model.get_submodule(f"{base}.{blocks}")))]
    paths.append("lm_head")
    names = names or {}
    norm_path = f"{base}.{norm}"
    return {
        "modules_to_wrap_with_names": [(model.get_submodule(path), names.get(path, path)) for path in paths],
        "rogue_layer_norm_modules_with_names": {model.get_submodule(norm_path): names.get(norm_path, norm_path)},
        "layer_norm_module_cls": type(model.get_submodule(norm_path)),
    }


def wrap(model: nn.Module | str = "llama", *, names: Mapping[str, str] | None = None, **options: Any) -> YaFSDP:
    """Wrap a model, or a new one of that name; ZeRO-3 and the model's own dtypes unless ``options`` say otherwise."""
    if isinstance(model, str):
        model = build_model(model)
    return YaFSDP(model, **{"zero_stage": 3, "param_dtype": None, **lists_of(model, names), **options})
