"""Resizing the embeddings of a sharded model: refused with what to do instead."""

from typing import Any, NoReturn

from torch import nn

__all__ = ["refuse_resize"]


def refuse_resize(model: nn.Module) -> None:
    """Lets ``model.resize_token_embeddings`` say that it comes too late, where it would fail deep inside.

    Args:
        model: a model that has been sharded.
    """
    if not hasattr(model, "resize_token_embeddings"):
        return

    def resize_token_embeddings(*args: Any, **kwargs: Any) -> NoReturn:
        raise RuntimeError(
            f"{type(model).__name__}.resize_token_embeddings: the embeddings are sharded and optimizers hold their "
            "slices; resize before the model is prepared (before the Trainer trains, or before accelerator.prepare)"
        )

    object.__setattr__(model, "resize_token_embeddings", resize_token_embeddings)
