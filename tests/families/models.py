"""Tiny models of many families, and batches for each, the same on every rank.

Widths and vocabularies are odd on purpose: shard edges must fall inside parameters.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import nn

VOCABULARY = 101
Batch = dict[str, torch.Tensor]


@dataclass(frozen=True)
class Family:
    """One architecture.

    Attributes:
        class_name: model class in transformers; its config class is taken from it.
        config: fields of the config.
        units: how many units the engine shall find by itself, the root with its own parameters included.
        make_batch: builds a global batch of ``ROWS`` rows from a generator.
        tied: names of two modules that share one weight, or None.
    """

    class_name: str
    config: dict[str, object]
    units: int
    make_batch: Callable[[torch.Generator], Batch]
    tied: tuple[str, str] | None = None

    def build(self, seed: int = 0, **changes: object) -> nn.Module:
        """Builds the model in training mode, in fp32, with eager attention."""
        import transformers

        model_class = getattr(transformers, self.class_name)
        torch.manual_seed(seed)
        config = model_class.config_class(**{**self.config, **changes})
        config._attn_implementation = "eager"
        model: nn.Module = model_class(config)
        return model.train()

    def batches(self, count: int, seed: int = 7) -> list[Batch]:
        """Global batches; all rows have the same number of labels, so that means of means are means."""
        generator = torch.Generator().manual_seed(seed)
        return [self.make_batch(generator) for _ in range(count)]


ROWS = 8
LENGTH = 10


def _tokens(generator: torch.Generator, length: int = LENGTH) -> torch.Tensor:
    return torch.randint(3, VOCABULARY, (ROWS, length), generator=generator)


def _causal(generator: torch.Generator) -> Batch:
    tokens = _tokens(generator)
    return {"input_ids": tokens, "labels": tokens.clone()}


def _masked(generator: torch.Generator) -> Batch:
    tokens = _tokens(generator)
    labels = torch.full_like(tokens, -100)
    labels[:, 2:9:3] = tokens[:, 2:9:3]
    hidden = tokens.clone()
    hidden[:, 2:9:3] = 2
    return {"input_ids": hidden, "labels": labels, "attention_mask": torch.ones_like(tokens)}


def _translated(generator: torch.Generator) -> Batch:
    return {"input_ids": _tokens(generator), "labels": _tokens(generator, 7)}


def _pictures(generator: torch.Generator) -> Batch:
    pixels = torch.randn(ROWS, 3, 12, 12, generator=generator)
    return {"pixel_values": pixels, "labels": torch.randint(0, 5, (ROWS,), generator=generator)}


_SIZES: dict[str, object] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 40,
    "intermediate_size": 68,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 32,
    "use_cache": False,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_NO_DROPOUT: dict[str, object] = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
_GPT2: dict[str, object] = {
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
}
_T5: dict[str, object] = {
    "vocab_size": VOCABULARY,
    "d_model": 40,
    "d_kv": 10,
    "d_ff": 68,
    "num_layers": 2,
    "num_heads": 4,
    "dropout_rate": 0.0,
    "decoder_start_token_id": 0,
    "use_cache": False,
}
_VIT: dict[str, object] = {
    **_NO_DROPOUT,
    "hidden_size": 40,
    "intermediate_size": 68,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "image_size": 12,
    "patch_size": 4,
    "num_labels": 5,
}
_OPT: dict[str, object] = {
    **{key: value for key, value in _SIZES.items() if key not in ("intermediate_size", "num_key_value_heads")},
    "ffn_dim": 68,
    "word_embed_proj_dim": 40,
    "dropout": 0.0,
}
_MOE: dict[str, object] = {
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 28,
    "decoder_sparse_step": 1,
}
_HEAD_DIM: dict[str, object] = {"head_dim": 12}

FAMILIES: dict[str, Family] = {
    # embedding, blocks, norm with head
    "llama": Family("LlamaForCausalLM", _SIZES, 4, _causal),
    "mistral": Family("MistralForCausalLM", {**_SIZES, **_HEAD_DIM, "sliding_window": 6}, 4, _causal),
    "qwen2": Family("Qwen2ForCausalLM", _SIZES, 4, _causal),
    "qwen3": Family("Qwen3ForCausalLM", {**_SIZES, **_HEAD_DIM}, 4, _causal),
    "phi": Family("PhiForCausalLM", {**_SIZES, "num_attention_heads": 2}, 4, _causal),
    "phi3": Family("Phi3ForCausalLM", _SIZES, 4, _causal),
    "gpt_neox": Family("GPTNeoXForCausalLM", {**_SIZES, "hidden_dropout": 0.0, "attention_dropout": 0.0}, 4, _causal),
    "mixtral": Family("MixtralForCausalLM", {**_SIZES, "num_local_experts": 4, "num_experts_per_tok": 2}, 4, _causal),
    "qwen2_moe": Family("Qwen2MoeForCausalLM", {**_SIZES, **_MOE, "shared_expert_intermediate_size": 36}, 4, _causal),
    "qwen3_moe": Family("Qwen3MoeForCausalLM", {**_SIZES, **_HEAD_DIM, **_MOE}, 4, _causal),
    # tied embeddings
    "gpt2": Family("GPT2LMHeadModel", _GPT2, 4, _causal, ("transformer.wte", "lm_head")),
    "opt": Family("OPTForCausalLM", _OPT, 4, _causal, ("model.decoder.embed_tokens", "lm_head")),
    "qwen2_tied": Family(
        "Qwen2ForCausalLM", {**_SIZES, "tie_word_embeddings": True}, 3, _causal, ("model.embed_tokens", "lm_head")
    ),
    "gemma": Family("GemmaForCausalLM", {**_SIZES, **_HEAD_DIM}, 3, _causal, ("model.embed_tokens", "lm_head")),
    "gemma2": Family(
        "Gemma2ForCausalLM",
        {**_SIZES, **_HEAD_DIM, "query_pre_attn_scalar": 12, "sliding_window": 6},
        3,
        _causal,
        ("model.embed_tokens", "lm_head"),
    ),
    "gemma3": Family(
        "Gemma3ForCausalLM",
        {**_SIZES, **_HEAD_DIM, "query_pre_attn_scalar": 12, "sliding_window": 6},
        3,
        _causal,
        ("model.embed_tokens", "lm_head"),
    ),
    # not decoders
    "bert": Family(
        "BertForMaskedLM",
        {**_SIZES, **_NO_DROPOUT},
        3,
        _masked,
        ("bert.embeddings.word_embeddings", "cls.predictions.decoder"),
    ),
    "t5": Family("T5ForConditionalGeneration", _T5, 6, _translated, ("encoder.embed_tokens", "lm_head")),
    "vit": Family("ViTForImageClassification", _VIT, 4, _pictures),
}
