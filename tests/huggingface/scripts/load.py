"""Loads a saved folder with plain transformers and compares its logits with those of the live model."""

import sys

import torch
from transformers import AutoModelForCausalLM

folder = sys.argv[1]
model, info = AutoModelForCausalLM.from_pretrained(f"{folder}/final", output_loading_info=True)
assert not info["missing_keys"], info
assert not info["unexpected_keys"], info
assert "ya_fsdp" not in sys.modules
ids = torch.randint(0, 101, (64, 16), generator=torch.Generator().manual_seed(0))
with torch.no_grad():
    logits = model(input_ids=ids[:2]).logits
print((logits - torch.load(f"{folder}/logits.pt", weights_only=True)).abs().max().item())
