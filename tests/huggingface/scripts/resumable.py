"""A Trainer script that saves at its last step, and goes on from what it finds in its folder."""

import json
import os
import sys

import torch
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments, set_seed
from transformers.trainer_utils import get_last_checkpoint

output_dir, steps = sys.argv[1], int(sys.argv[2])
set_seed(1)
sizes = {"hidden_size": 40, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}
config = LlamaConfig(**sizes, intermediate_size=72, vocab_size=101, max_position_embeddings=64)
ids = torch.randint(0, 101, (64, 16), generator=torch.Generator().manual_seed(0))
arguments = TrainingArguments(
    output_dir,
    max_steps=steps,
    per_device_train_batch_size=8 // int(os.environ.get("WORLD_SIZE", "1")),
    logging_steps=1,
    save_steps=steps,
    report_to=[],
    learning_rate=1e-2,
    lr_scheduler_type="constant",
    disable_tqdm=True,
    dataloader_pin_memory=False,
)
rows = [{"input_ids": row, "labels": row} for row in ids]
trainer = Trainer(model=LlamaForCausalLM(config), args=arguments, train_dataset=rows)
last = get_last_checkpoint(output_dir) if os.path.isdir(output_dir) else None
trainer.train(resume_from_checkpoint=last)
facts = {
    "resumed": last is not None,
    "rank": trainer.args.process_index,
    "local_rank": trainer.args.local_process_index,
    "world": trainer.args.world_size,
    "kinds": sorted({type(parameter).__name__ for parameter in trainer.model.parameters()}),
    "local": sum(getattr(p, "_local_tensor", p).numel() for p in trainer.model.parameters()),
    "total": sum(p.numel() for p in trainer.model.parameters()),
    "losses": [log["loss"] for log in trainer.state.log_history if "loss" in log],
}
if trainer.is_fsdp_enabled:
    trainer.accelerator.state.fsdp_plugin.set_state_dict_type("FULL_STATE_DICT")
trainer.save_model(f"{output_dir}/final")
with open(f"{output_dir}/facts{trainer.args.process_index}.json", "w") as file:
    json.dump(facts, file)
