"""trl's reference models: sharded like the model that is trained, frozen, without storage for gradients."""

from collections.abc import Callable
from typing import Any

from accelerate_plugin.hooks import unless_asked

__all__ = ["wrap_prepare_fsdp"]

Function = Callable[..., Any]


def wrap_prepare_fsdp(original: Function) -> Function:
    """Shards a reference with this engine, unit by unit; trl would call torch's, with the whole model as one unit."""

    @unless_asked(original)
    def prepare_fsdp(model: Any, accelerator: Any) -> Any:
        from accelerate_plugin.prepare import prepare_model

        # Not handed to the accelerator: it would be saved with every checkpoint.
        prepared = prepare_model(accelerator, model, frozen=True)
        prepared.eval()
        return prepared

    return prepare_fsdp
