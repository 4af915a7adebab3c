"""Units whose backward reads no weights: embeddings, which look rows up and add gradients to rows.

An embedding is the largest tensor of most models and the last unit of a backward, when all gradients exist. To gather
it there, for a backward that never looks at its values, would set the peak of the whole step.
"""

from torch import nn

__all__ = ["is_lookup"]


def is_lookup(module: nn.Module | None) -> bool:
    """Whether a module's backward is known to read no weights.

    Only the forward of ``nn.Embedding`` is known. One that renormalises (``max_norm``), has a forward of its own, hooks
    beside those of its unit, or modules inside (a parametrisation) may compute with the weight, so the answer is no.
    """
    return (
        isinstance(module, nn.Embedding)
        and type(module).forward is nn.Embedding.forward
        and module.max_norm is None
        and not module._modules
        and "forward" not in module.__dict__
        and len(module._forward_hooks) <= 1
        and len(module._forward_pre_hooks) <= 1
    )
