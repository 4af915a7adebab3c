"""A Trainer script that brings its own FSDP settings, and says what came of them."""

import json
import sys

import torch
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments, set_seed

arguments = TrainingArguments(
    sys.argv[1],
    fsdp=True,
    fsdp_config={"reshard_after_forward": False, "num_layers_to_checkpoint": 1, "cpu_ram_efficient_loading": False},
    max_steps=2,
    per_device_train_batch_size=4,
    report_to=[],
    save_strategy="no",
    disable_tqdm=True,
    dataloader_pin_memory=False,
)
set_seed(1)
sizes = {"hidden_size": 40, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}
model = LlamaForCausalLM(LlamaConfig(**sizes, intermediate_size=72, vocab_size=101))
rows = [{"input_ids": row, "labels": row} for row in torch.randint(0, 101, (16, 8))]
trainer = Trainer(model=model, args=arguments, train_dataset=rows)
trainer.train()
if trainer.args.process_index == 0:
    settings = trainer.accelerator.state.fsdp_plugin.settings
    facts = {
        "kinds": sorted({type(parameter).__name__ for parameter in trainer.model.parameters()}),
        "world": trainer.args.world_size,
        "reshard": settings.reshard_after_forward,
        "checkpointed": settings.num_layers_to_checkpoint,
        "efficient": settings.cpu_ram_efficient_loading,
    }
    print("FACTS " + json.dumps(facts), flush=True)
