"""An ordinary Trainer script that restarts by itself; if asked to, rank 1 is killed while checkpoint 4 is written."""

import os
import signal
import sys

import torch
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainerCallback, TrainingArguments, set_seed
from transformers.trainer_utils import get_last_checkpoint

folder, killed = sys.argv[1], sys.argv[2] == "killed"


class Preemption(TrainerCallback):
    """Ends rank 1 where it writes something of checkpoint 4, and keeps the first step of the run."""

    first = 0

    def on_step_begin(self, args, state, control, **kwargs):
        self.first = self.first or state.global_step + 1

    def on_step_end(self, args, state, control, **kwargs):
        if killed and state.global_step == 4 and args.process_index == 1:
            torch.save = lambda *_, **__: os.kill(os.getpid(), signal.SIGKILL)


set_seed(1)
sizes = {"hidden_size": 40, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 72}
model = LlamaForCausalLM(LlamaConfig(vocab_size=101, max_position_embeddings=64, **sizes))
ids = torch.randint(0, 101, (48, 8), generator=torch.Generator().manual_seed(0))
arguments = TrainingArguments(
    folder,
    max_steps=6,
    per_device_train_batch_size=4,
    logging_steps=1,
    save_steps=2,
    save_total_limit=1,
    report_to=[],
    disable_tqdm=True,
    dataloader_pin_memory=False,
)
rows = [{"input_ids": row, "labels": row} for row in ids]
preemption = Preemption()
trainer = Trainer(model=model, args=arguments, train_dataset=rows, callbacks=[preemption])
started = os.path.isdir(folder) and get_last_checkpoint(folder) is not None
trainer.train(resume_from_checkpoint=started)
if arguments.process_index == 0:
    print(f"RAN {preemption.first} TO {trainer.state.global_step}", flush=True)
