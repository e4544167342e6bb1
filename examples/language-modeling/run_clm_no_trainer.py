"""Trains or fine-tunes a causal language model with an ordinary loop. `--help` lists every argument.

    neuron-accel launch --nproc-per-node 4 run_clm_no_trainer.py --config ../configs/tp2_dp2_zero1.yaml \\
        --model_name_or_path gpt2 --output_dir out
"""

from __future__ import annotations

import json
import math
import sys
from dataclasses import dataclass, field
from pathlib import Path

# First: it chooses the device for Accelerate.
from neuron_accel import NeuronAccelerator, NeuronAccelError, make_optimizer_constructor_lazy  # isort: skip
import torch
from models import ModelArguments, build_model
from text import TextArguments, TextError, load_blocks
from torch.utils.data import DataLoader
from tqdm.auto import tqdm
from transformers import HfArgumentParser, get_scheduler, set_seed


@dataclass
class LoopArguments:
    """Arguments of the training."""

    output_dir: str = field(metadata={"help": "Where the model and what was learnt about it are written."})
    config: str | None = field(default=None, metadata={"help": "A YAML file of strategies; see examples/configs."})
    per_device_train_batch_size: int = field(default=8, metadata={"help": "Sequences of a rank in a micro-batch."})
    per_device_eval_batch_size: int = field(default=8, metadata={"help": "Sequences of a rank in an evaluation."})
    num_train_epochs: int = field(default=1, metadata={"help": "Passes over the text."})
    max_steps: int | None = field(default=None, metadata={"help": "Optimizer steps after which to stop."})
    learning_rate: float = field(default=5e-5, metadata={"help": "The highest."})
    weight_decay: float = field(default=0.0, metadata={"help": "Of AdamW."})
    warmup_steps: int = field(default=0, metadata={"help": "Steps until the highest learning rate."})
    max_grad_norm: float = field(default=1.0, metadata={"help": "Gradients are scaled down to this norm; 0: never."})
    checkpoint_every: int | None = field(default=None, metadata={"help": "Steps between checkpoints."})
    resume: bool = field(default=False, metadata={"help": "Go on from the last checkpoint in output_dir, if any."})
    seed: int = field(default=42, metadata={"help": "Of everything random."})


def evaluate(accelerator, model, loader) -> float:
    """The mean loss per token."""
    model.eval()
    losses = []
    with torch.no_grad():
        for batch in loader:
            losses.append(accelerator.gather_for_metrics(model(**batch).loss.repeat(len(batch["input_ids"]))))
    model.train()
    return torch.cat(losses).mean().item()


def main() -> int:
    parser = HfArgumentParser((ModelArguments, TextArguments, LoopArguments), description=__doc__)
    model_arguments, text_arguments, arguments = parser.parse_args_into_dataclasses()
    accelerator = NeuronAccelerator(config=arguments.config, project_dir=arguments.output_dir)
    accelerator.project_configuration.automatic_checkpoint_naming = True
    accelerator.print(accelerator.plan.explain())
    set_seed(arguments.seed)
    with accelerator.local_main_process_first():
        blocks = load_blocks(text_arguments, model_arguments.tokenizer, Path(arguments.output_dir, "text"))
    model = build_model(
        model_arguments,
        vocab_size=len(blocks.tokenizer),
        block_size=text_arguments.block_size,
        end=blocks.tokenizer.eos_token_id,
    )
    loader = DataLoader(blocks.train, arguments.per_device_train_batch_size, shuffle=True, drop_last=True)
    eval_loader = DataLoader(blocks.evaluation, arguments.per_device_eval_batch_size)
    optimizer = make_optimizer_constructor_lazy(torch.optim.AdamW)(
        model.parameters(), lr=arguments.learning_rate, weight_decay=arguments.weight_decay
    )
    model, optimizer, loader, eval_loader = accelerator.prepare(model, optimizer, loader, eval_loader)
    per_epoch = max(1, math.ceil(len(loader) / accelerator.gradient_accumulation_steps))
    steps = min(arguments.num_train_epochs * per_epoch, arguments.max_steps or sys.maxsize)
    scheduler = get_scheduler(
        "cosine",
        optimizer,
        num_warmup_steps=arguments.warmup_steps * accelerator.num_processes,
        num_training_steps=steps * accelerator.num_processes,
    )
    scheduler = accelerator.prepare(scheduler)
    progress = Progress(accelerator, steps)
    accelerator.register_for_checkpointing(progress)
    if arguments.resume and accelerator.load_state(resume="latest"):
        accelerator.print(f"continues after step {progress.step}")
    model.train()
    while progress.step < steps:
        for batch in loader:
            with accelerator.accumulate(model):
                loss = model(**batch).loss
                accelerator.backward(loss)
                if arguments.max_grad_norm:
                    accelerator.clip_grad_norm_(model.parameters(), arguments.max_grad_norm)
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
            if not accelerator.sync_gradients:
                continue
            progress.advance(loss)
            if arguments.checkpoint_every and progress.step % arguments.checkpoint_every == 0:
                accelerator.save_state(async_save=True)
            if progress.step >= steps:
                break
    progress.bar.close()
    loss = evaluate(accelerator, model, eval_loader)
    result = {"steps": steps, "losses": progress.losses, "eval_loss": loss, "perplexity": math.exp(min(loss, 700))}
    accelerator.print(f"loss on held-out text: {loss:.4f}, perplexity {result['perplexity']:.2f}")
    accelerator.save_model(model, arguments.output_dir)
    if accelerator.is_main_process:
        blocks.tokenizer.save_pretrained(arguments.output_dir)
        Path(arguments.output_dir, "result.json").write_text(json.dumps(result, indent=1))
    accelerator.end_training()
    return 0


class Progress:
    """The progress of the training, which is part of its checkpoints."""

    def __init__(self, accelerator, steps: int) -> None:
        self._accelerator = accelerator
        self.step, self.losses = 0, []
        self.bar = tqdm(total=steps, unit="step", disable=not accelerator.is_main_process)

    def advance(self, loss: torch.Tensor) -> None:
        """Records a step, with the loss of its last micro-batch on this rank."""
        self.step += 1
        self.losses.append(self._accelerator.reduce(loss.detach(), "mean").item())
        self.bar.update()
        self.bar.set_postfix(loss=f"{self.losses[-1]:.3f}")

    def state_dict(self) -> dict:
        return {"step": self.step, "losses": self.losses}

    def load_state_dict(self, state: dict) -> None:
        self.step, self.losses = state["step"], list(state["losses"])
        self.bar.update(self.step - self.bar.n)


if __name__ == "__main__":
    try:
        sys.exit(main())
    except (NeuronAccelError, TextError) as error:
        sys.exit(f"run_clm_no_trainer.py: {error}")
