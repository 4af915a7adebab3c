"""Tiny models, built from a config with a fixed seed.

The odd sizes are on purpose: shard edges must fall inside parameters at every world size.
"""

from collections.abc import Callable

import torch
from torch import nn

VOCABULARY = 101


def build_model(name: str, *, seed: int = 0, dtype: torch.dtype = torch.float32, **changes: object) -> nn.Module:
    """Build a tiny causal language model in training mode, the same on every rank.

    Args:
        name: ``llama`` (untied), ``gpt2`` (tied, dropouts 0), ``qwen2`` (tied) or ``mixtral`` (4 experts).
        seed: Seed of the initial weights.
        dtype: Dtype of the parameters and of floating buffers.
        **changes: Fields of the config to change.
    """
    torch.manual_seed(seed)
    model = _BUILDERS[name](changes)
    model.train()
    return model.to(dtype)


def tiny_llama(*, num_layers: int = 3, seed: int = 0, **changes: object) -> nn.Module:
    """Build the Llama of :func:`build_model` with another number of layers."""
    return build_model("llama", seed=seed, num_hidden_layers=num_layers, **changes)


def _llama(changes: dict[str, object]) -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    return LlamaForCausalLM(LlamaConfig(**{**_LLAMA_SIZES, "tie_word_embeddings": False, **changes}))


def _qwen2(changes: dict[str, object]) -> nn.Module:
    from transformers import Qwen2Config, Qwen2ForCausalLM

    return Qwen2ForCausalLM(Qwen2Config(**{**_LLAMA_SIZES, "tie_word_embeddings": True, **changes}))


def _mixtral(changes: dict[str, object]) -> nn.Module:
    from transformers import MixtralConfig, MixtralForCausalLM

    sizes = {**_LLAMA_SIZES, "num_hidden_layers": 2, "num_local_experts": 4, "num_experts_per_tok": 2}
    return MixtralForCausalLM(MixtralConfig(**{**sizes, "tie_word_embeddings": False, **changes}))


def _gpt2(changes: dict[str, object]) -> nn.Module:
    from transformers import GPT2Config, GPT2LMHeadModel

    sizes = {
        "vocab_size": VOCABULARY,
        "n_embd": 36,
        "n_layer": 2,
        "n_head": 4,
        "n_positions": 32,
        "resid_pdrop": 0.0,
        "embd_pdrop": 0.0,
        "attn_pdrop": 0.0,
        "use_cache": False,
        "bos_token_id": 0,
        "eos_token_id": 0,
        "attn_implementation": "eager",
    }
    return GPT2LMHeadModel(GPT2Config(**{**sizes, **changes}))


_LLAMA_SIZES: dict[str, object] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 40,
    "intermediate_size": 72,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "use_cache": False,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "attn_implementation": "eager",
}
_BUILDERS: dict[str, Callable[[dict[str, object]], nn.Module]] = {
    "llama": _llama,
    "gpt2": _gpt2,
    "qwen2": _qwen2,
    "mixtral": _mixtral,
}


def units_of(model: nn.Module) -> list[nn.Module | list[nn.Module]]:
    """Return the units that users wrap: the embedding, each block, and the final norm together with the head.

    With tied weights the embedding and the head have to be in one unit; they are then left to the root.
    """
    backbone = model.get_submodule(model.base_model_prefix)
    blocks = list(backbone.get_submodule("h" if hasattr(backbone, "h") else "layers"))
    embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
    if embedding.weight is head.weight:
        return blocks
    return [embedding, *blocks, [backbone.get_submodule("norm"), head]]


class Mlp(nn.Module):
    """A residual block of two linear layers, for tests that need no attention."""

    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.up = nn.Linear(width, hidden)
        self.down = nn.Linear(hidden, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Map ``[..., width]`` to ``[..., width]``."""
        return x + self.down(torch.tanh(self.up(x)))


class Weights(nn.Module):
    """One vector, whose gradient is the input."""

    def __init__(self, numel: int = 11) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(numel))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Map ``[numel]`` to a number."""
        return (self.weight * x).sum()


class MlpStack(nn.Module):
    """A stack of :class:`Mlp` blocks without parameters of its own."""

    def __init__(self, num_blocks: int = 3, width: int = 10, hidden: int = 14, seed: int = 0) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.blocks = nn.ModuleList(Mlp(width, hidden) for _ in range(num_blocks))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Map ``[..., width]`` to ``[..., width]``."""
        for block in self.blocks:
            x = block(x)
        return x


def token_batches(num_batches: int, rows: int = 12, length: int = 10, seed: int = 1234) -> list[torch.Tensor]:
    """Return global batches of token ids ``[rows, length]``; 12 rows divide evenly over 1, 2, 3 and 4 ranks."""
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(0, VOCABULARY, (rows, length), generator=generator) for _ in range(num_batches)]


def float_batches(num_batches: int, rows: int = 12, width: int = 10, seed: int = 1234) -> list[torch.Tensor]:
    """Return global batches of features ``[rows, width]``."""
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(rows, width, generator=generator) for _ in range(num_batches)]


def my_rows(batch: torch.Tensor, rank: int, world_size: int) -> torch.Tensor:
    """Return the rows of a global batch that belong to ``rank``."""
    assert batch.shape[0] % world_size == 0, f"{batch.shape[0]} rows over {world_size} ranks"
    return batch.chunk(world_size)[rank]


class OddBlock(nn.Module):
    """A residual block with parameters of odd shapes: 0-dim, one element, empty, tiny, and a transposed view."""

    def __init__(self, width: int = 5) -> None:
        super().__init__()
        self.temperature = nn.Parameter(torch.tensor(0.7))
        self.gate = nn.Parameter(torch.tensor([1.3]))
        self.nothing = nn.Parameter(torch.empty(0, width))
        self.three = nn.Parameter(torch.randn(3))
        self.transposed = nn.Parameter(torch.randn(7, width).t())
        self.out = nn.Linear(7, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Map ``[..., 5]`` to ``[..., 5]``; every parameter takes part."""
        hidden = torch.tanh(x @ self.transposed * self.temperature)
        nothing = (x @ self.nothing.t()).sum(-1, keepdim=True)
        return x + self.gate * self.out(hidden) + self.three.sum() * 0.1 + nothing


class OddModel(nn.Module):
    """Two :class:`OddBlock` and a root with odd parameters of its own."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.scale = nn.Parameter(torch.tensor(1.1))
        self.blocks = nn.ModuleList([OddBlock(), OddBlock()])
        self.shift = nn.Parameter(torch.randn(5))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Map ``[..., 5]`` to ``[..., 5]``."""
        x = x * self.scale
        for block in self.blocks:
            x = block(x)
        return x + self.shift
