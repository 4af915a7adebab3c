"""Train a small Llama from scratch on Python's own standard library: an ordinary Hugging Face Trainer script.

Nothing in the training part knows about ya-fsdp; `accelerate launch` decides how the model is sharded:

    accelerate launch --config_file configs/fsdp_config.yaml --fsdp_ya_fsdp_enabled true examples/train_clm.py

Only the report at the end looks at the engine, to show what each rank holds. Every option of `TrainingArguments` works.
"""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path

# Text and tokenizer are made on this machine, so no run of this script has a reason to ask a hub for anything.
os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch
from measure import MemoryProbe, RunReport, first_and_last_loss, gather_rank_bytes, save_report
from stdlib_text import load_or_train_tokenizer, packed_blocks, read_texts, standard_library_files
from transformers import (
    HfArgumentParser,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
    ProgressCallback,
    Trainer,
    TrainerControl,
    TrainerState,
    TrainingArguments,
    default_data_collator,
    set_seed,
)

# Launch variables that would make the plain process which reads the saved folder look like one more rank of this run.
LAUNCH_VARIABLES = ("ACCELERATE_", "FSDP_", "PARALLELISM_CONFIG_", "TORCHELASTIC_", "GROUP_", "ROLE_", "MASTER_")
RANK_VARIABLES = {"RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE"}


@dataclass
class ModelArguments:
    """Size of the model and of its text; the defaults give about 10 million parameters."""

    vocab_size: int = field(default=4096, metadata={"help": "Tokens of the BPE tokenizer trained on the text."})
    hidden_size: int = field(default=384, metadata={"help": "Width of the model."})
    intermediate_size: int = field(default=1024, metadata={"help": "Width of the feed-forward part."})
    num_layers: int = field(default=4, metadata={"help": "Number of decoder layers."})
    num_heads: int = field(default=6, metadata={"help": "Number of attention heads."})
    tie_word_embeddings: bool = field(default=False, metadata={"help": "Use one matrix as embedding and as head."})
    block_size: int = field(default=256, metadata={"help": "Tokens per training example."})
    text_megabytes: float = field(default=4.0, metadata={"help": "How much of the standard library to train on."})
    prompt: str = field(default="def read(self, ", metadata={"help": "Start of the sample generated at the end."})


class LossInProgressBar(ProgressCallback):
    """The Trainer's progress bar with the loss in it, instead of one printed line a step."""

    def on_log(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        logs: dict[str, float] | None = None,
        **kwargs: object,
    ) -> None:
        """Show the latest loss."""
        if self.training_bar is not None and logs and "loss" in logs:
            self.training_bar.set_postfix(loss=f"{float(logs['loss']):.3f}", refresh=False)


def parse_arguments() -> tuple[ModelArguments, TrainingArguments]:
    """Read the command line; the defaults below are the demo, and every one of them can be given another value."""
    parser = HfArgumentParser((ModelArguments, TrainingArguments))
    parser.set_defaults(
        output_dir="runs/demo",
        max_steps=64,
        per_device_train_batch_size=4,
        learning_rate=2e-3,
        warmup_steps=8,
        lr_scheduler_type="cosine",
        adam_beta2=0.95,
        weight_decay=0.1,
        logging_steps=1,
        save_strategy="no",
        dataloader_pin_memory=torch.cuda.is_available(),
    )
    model_args, training_args = parser.parse_args_into_dataclasses()
    return model_args, training_args


def build_model(args: ModelArguments, tokenizer: PreTrainedTokenizerFast) -> LlamaForCausalLM:
    """Return a Llama with random weights, the same on every rank if the seed is."""
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=args.hidden_size,
        intermediate_size=args.intermediate_size,
        num_hidden_layers=args.num_layers,
        num_attention_heads=args.num_heads,
        num_key_value_heads=args.num_heads,
        max_position_embeddings=4 * args.block_size,
        tie_word_embeddings=args.tie_word_embeddings,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
    )
    model = LlamaForCausalLM(config)
    if not args.tie_word_embeddings:
        # Tokens that start out as distinct as layers make them later let so short a run get past mere word counts. A
        # head must start small, so this is not for a matrix that is both.
        torch.nn.init.normal_(model.model.embed_tokens.weight, std=0.5)
    return model


def save_live_logits(trainer: Trainer, input_ids: torch.Tensor, file: Path) -> None:
    """Write the logits of the model as it was trained, still sharded, for fixed input. All ranks take part."""
    model = trainer.model_wrapped
    model.eval()
    with torch.no_grad():
        logits = model(input_ids=input_ids.to(trainer.args.device), use_cache=False).logits
    if trainer.is_world_process_zero():
        torch.save({"input_ids": input_ids, "logits": logits.cpu()}, file)


def check_in_fresh_process(folder: Path, live_logits: Path, device: str, prompt: str) -> None:
    """Let a process that has no part in this run load the folder with plain transformers, compare, and generate."""
    environment = {
        name: value
        for name, value in os.environ.items()
        if name not in RANK_VARIABLES and not name.startswith(LAUNCH_VARIABLES)
    }
    script = Path(__file__).with_name("check_saved.py")
    command = [sys.executable, str(script), str(folder), "--live_logits", str(live_logits), "--device", device]
    command += ["--prompt", prompt]
    subprocess.run(command, env=environment, check=True)


def main() -> None:
    """Train, save, and show what came out."""
    model_args, training_args = parse_arguments()
    folder = Path(training_args.output_dir)
    with training_args.main_process_first(desc="text and tokenizer"):
        texts = read_texts(standard_library_files(), int(model_args.text_megabytes * 1e6))
        tokenizer = load_or_train_tokenizer(folder / "cache", texts, model_args.vocab_size)
    blocks = packed_blocks(tokenizer, texts, model_args.block_size)

    set_seed(training_args.seed)
    model = build_model(model_args, tokenizer)
    num_parameters = model.num_parameters()
    probe = MemoryProbe()
    trainer = Trainer(
        model=model,
        args=training_args,
        train_dataset=blocks,
        data_collator=default_data_collator,
        processing_class=tokenizer,
        callbacks=[probe],
    )
    if trainer.pop_callback(ProgressCallback) is not None:
        trainer.add_callback(LossInProgressBar())
    result = trainer.train()
    trainer.save_model()

    live_logits = folder / "cache" / "live_logits.pt"
    fixed_input = torch.tensor(blocks[:2]["input_ids"])
    save_live_logits(trainer, fixed_input, live_logits)
    rank_bytes = gather_rank_bytes(trainer, probe)
    if trainer.is_world_process_zero():
        first, last = first_and_last_loss(trainer.state.log_history)
        report = RunReport(
            engine=probe.engine,
            num_parameters=num_parameters,
            num_processes=training_args.world_size,
            device=training_args.device.type,
            num_steps=trainer.state.global_step,
            first_loss=first,
            last_loss=last,
            seconds=result.metrics["train_runtime"],
            tokens_per_second=result.metrics["train_samples_per_second"] * model_args.block_size,
            rank_bytes=rank_bytes,
        )
        save_report(report, trainer.state.log_history, folder)
        check_in_fresh_process(folder, live_logits, str(training_args.device), model_args.prompt)
    trainer.accelerator.wait_for_everyone()
    trainer.accelerator.end_training()


if __name__ == "__main__":
    main()
