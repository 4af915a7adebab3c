"""Ask a chat model one question, with plain transformers.

    python examples/chat.py runs/smollm2/sharded "What does this Python function do?

    def read(self, size=-1):"

Nothing here imports the engine: what answers is what anybody gets who is handed the folder.
"""

from __future__ import annotations

import argparse
import os
import sys

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer


def main() -> None:
    """Print the reply and nothing else."""
    parser = argparse.ArgumentParser(description="Ask a saved chat model a question.")
    parser.add_argument("folder", help="folder that save_model wrote")
    parser.add_argument("question", help="what the user says")
    parser.add_argument("--max_new_tokens", type=int, default=60, help="length of the reply")
    args = parser.parse_args()

    tokenizer = AutoTokenizer.from_pretrained(args.folder)
    model = AutoModelForCausalLM.from_pretrained(args.folder, dtype=torch.float32).eval()
    inputs = tokenizer.apply_chat_template(
        [{"role": "user", "content": args.question}], add_generation_prompt=True, return_tensors="pt", return_dict=True
    )
    with torch.no_grad():
        tokens = model.generate(**inputs, max_new_tokens=args.max_new_tokens, do_sample=False)
    assert "ya_fsdp" not in sys.modules
    print(tokenizer.decode(tokens[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True).strip())


if __name__ == "__main__":
    main()
