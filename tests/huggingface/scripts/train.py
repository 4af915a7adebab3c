"""An ordinary Trainer script: it knows nothing of the engine. Word ids come from a fixed generator."""

import json
import sys

import torch
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainerCallback, TrainingArguments, set_seed

output_dir, steps = sys.argv[1], int(sys.argv[2])


class Record(TrainerCallback):
    """Keeps what the Trainer logs."""

    def __init__(self) -> None:
        self.logs: list[dict[str, object]] = []

    def on_log(self, args, state, control, logs=None, **kwargs):
        self.logs.append(dict(logs or {}))


set_seed(1)
config = LlamaConfig(
    hidden_size=40,
    num_hidden_layers=3,
    num_attention_heads=4,
    num_key_value_heads=2,
    intermediate_size=72,
    vocab_size=101,
    max_position_embeddings=64,
    tie_word_embeddings=False,
    attn_implementation="eager",
)
model = LlamaForCausalLM(config)
ids = torch.randint(0, 101, (64, 16), generator=torch.Generator().manual_seed(0))
rows = [{"input_ids": row, "labels": row} for row in ids]
arguments = TrainingArguments(
    output_dir,
    max_steps=steps,
    per_device_train_batch_size=8,
    logging_steps=1,
    report_to=[],
    max_grad_norm=1.0,
    learning_rate=1e-2,
    lr_scheduler_type="constant",
    disable_tqdm=True,
    dataloader_pin_memory=False,
)
record = Record()
trainer = Trainer(model=model, args=arguments, train_dataset=rows, callbacks=[record])
trainer.train()
trainer.save_model(f"{output_dir}/final")
evaluated = trainer.evaluate(rows[:16])
with torch.no_grad():
    logits = trainer.model(input_ids=ids[:2]).logits
facts = {
    "world": trainer.args.world_size,
    "distributed_type": str(trainer.accelerator.distributed_type),
    "kinds": sorted({type(parameter).__name__ for parameter in trainer.model.parameters()}),
    "local": sum(getattr(p, "_local_tensor", p).numel() for p in trainer.model.parameters()),
    "total": sum(p.numel() for p in trainer.model.parameters()),
    "logs": record.logs,
    "eval_loss": evaluated["eval_loss"],
}
with open(f"{output_dir}/facts{trainer.args.process_index}.json", "w") as file:
    json.dump(facts, file)
if trainer.args.process_index == 0:
    torch.save(logits.float(), f"{output_dir}/logits.pt")
