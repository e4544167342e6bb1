"""Trains GPT2-XL (1,557,611,200 parameters) on wikitext-103 with ZeRO-1.

neuron-accel launch --nproc-per-node 32 train.py --precision MIXED       a trn1.32xlarge; run.sh sets what it needs
neuron-accel launch --nproc-per-node 2 train.py --scale tiny             the same program in a minute on a laptop
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections import deque
from pathlib import Path

# First: it chooses the device for Accelerate.
from neuron_accel import (  # isort: skip
    NeuronAccelError,
    NeuronAccelerator,
    Zero1Plugin,
    lazy_load_for_parallelism,
    make_optimizer_constructor_lazy,
)
import torch
from accelerate.tracking import GeneralTracker, on_main_process
from torch.utils.data import DataLoader
from tqdm.auto import tqdm
from transformers import GPT2Config, GPT2LMHeadModel, get_scheduler, set_seed

sys.path.append(str(Path(__file__).resolve().parents[1] / "language-modeling"))
from text import TextArguments, TextError, load_blocks

SCALES = {
    # GPT-2's largest model as it was published.
    "xl": {"n_layer": 48, "n_embd": 1600, "n_head": 25, "vocab_size": 50257, "n_positions": 1024},
    # 25 heads and an odd vocabulary size, so that the same padding is needed as for the large one.
    "tiny": {"n_layer": 2, "n_embd": 100, "n_head": 25, "vocab_size": 1031, "n_positions": 64},
}
WINDOW = 10
"""Number of steps over which the throughput is averaged."""


class Throughput:
    """Sequences per second of all ranks together, over the last :data:`WINDOW` steps.

    Args:
        sequences: of one step, on all ranks and in all micro-batches.
    """

    def __init__(self, sequences: int) -> None:
        self._sequences = sequences
        self._times: deque[float] = deque(maxlen=WINDOW)
        self._last = time.monotonic()

    def step(self) -> float:
        """Records the end of a step; returns the current throughput."""
        now = time.monotonic()
        self._times.append(now - self._last)
        self._last = now
        return len(self._times) * self._sequences / sum(self._times)


class JsonLines(GeneralTracker):
    """A tracker that writes one line of JSON per step to ``metrics.jsonl``."""

    name = "jsonl"
    requires_logging_directory = False
    main_process_only = True

    def __init__(self, folder: Path) -> None:
        super().__init__()
        self._path = folder / "metrics.jsonl"

    @property
    def tracker(self) -> Path:
        return self._path

    @on_main_process
    def start(self) -> None:
        self._path.parent.mkdir(parents=True, exist_ok=True)
        self._path.write_text("")

    @on_main_process
    def store_init_configuration(self, values: dict) -> None:
        """Does nothing: the options are written to `result.json`."""

    @on_main_process
    def log(self, values: dict, step: int | None = None, **_) -> None:
        numbers = {name: float(value) for name, value in values.items()}
        with self._path.open("a") as file:
            file.write(json.dumps({"step": step, **numbers}) + "\n")


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--scale", choices=SCALES, default="xl", help="size of the model (default: xl, the true one)")
    parser.add_argument(
        "--precision",
        choices=("FP32", "BF16", "MIXED"),
        default="MIXED",
        help="FP32: all of it. BF16: weights, activations and gradients, with master weights and optimizer in float32. "
        "MIXED: matrix products in bfloat16, everything else in float32 (default)",
    )
    parser.add_argument("--dataset_config", default="wikitext-103-raw-v1", help="configuration of wikitext on the hub")
    parser.add_argument("--train_file", help="a local text file instead; without it and without a network, the source "
                        "code of Python's standard library")  # fmt: skip
    parser.add_argument("--output_dir", default="out", type=Path, help="where everything goes (default: out)")
    parser.add_argument("--max_steps", type=int, help="optimizer steps (default: 3000; tiny: 20)")
    parser.add_argument("--batch_size", type=int, default=1, help="sequences of a rank in a micro-batch (default: 1)")
    parser.add_argument("--gradient_accumulation_steps", type=int, default=1, help="micro-batches (default: 1)")
    parser.add_argument("--learning_rate", type=float, default=1.5e-4, help="the highest (default: 1.5e-4)")
    parser.add_argument("--warmup_steps", type=int, default=75, help="steps until then (default: 75)")
    parser.add_argument("--weight_decay", type=float, default=0.01, help="of matrices (default: 0.01)")
    parser.add_argument("--max_norm", type=float, default=1.0, help="of gradients (default: 1)")
    parser.add_argument("--seed", type=int, default=1234, help="of everything random (default: 1234)")
    parser.add_argument("--checkpoint_every", type=int, help="steps between checkpoints (default: none but the last)")
    parser.add_argument("--resume", action="store_true", help="go on from the last checkpoint in output_dir, if any")
    parser.add_argument("--tracker", help="also report to one of Accelerate's trackers, such as tensorboard")
    options = parser.parse_args()
    options.max_steps = options.max_steps or (3000 if options.scale == "xl" else 20)
    return options


def load_text(accelerator, options, config: GPT2Config):
    """Wikitext if the hub can be reached, else a local text."""
    offline = TextArguments(
        train_file=options.train_file,
        block_size=config.n_positions,
        corpus_share=1.0 if options.scale == "xl" else 0.05,
        vocab_size=min(8192, config.vocab_size),
        max_eval_samples=1,
    )
    cache = options.output_dir / "text"
    with accelerator.local_main_process_first():
        if options.train_file is not None or options.scale == "tiny":
            return load_blocks(offline, None, cache)
        try:
            wikitext = TextArguments(
                dataset_name="wikitext", dataset_config_name=options.dataset_config, block_size=config.n_positions
            )
            return load_blocks(wikitext, "gpt2", cache)
        except (OSError, TextError) as error:
            accelerator.print(f"wikitext cannot be had ({error}); training on the source code of Python's library")
            return load_blocks(offline, None, cache)


def build(options, config: GPT2Config):
    """The model, without memory for its weights, and its optimizer, with weight decay for matrices only."""
    set_seed(options.seed)
    with lazy_load_for_parallelism():
        model = GPT2LMHeadModel(config)
    if options.precision == "BF16":
        model = model.to(torch.bfloat16)
    model.gradient_checkpointing_enable()
    groups = [
        {"params": [p for p in model.parameters() if p.dim() > 1], "weight_decay": options.weight_decay},
        {"params": [p for p in model.parameters() if p.dim() <= 1], "weight_decay": 0.0},
    ]
    return model, make_optimizer_constructor_lazy(torch.optim.AdamW)(groups, lr=options.learning_rate)


def main() -> int:
    options = parse()
    jsonl = JsonLines(options.output_dir)
    accelerator = NeuronAccelerator(
        plugins=[Zero1Plugin(optimizer_dtype=torch.float32)],
        mixed_precision="bf16" if options.precision == "MIXED" else "no",
        gradient_accumulation_steps=options.gradient_accumulation_steps,
        log_with=[jsonl, *([options.tracker] if options.tracker else [])],
        project_dir=options.output_dir,
    )
    accelerator.project_configuration.automatic_checkpoint_naming = True
    accelerator.init_trackers("gpt2_xl_zero1")
    config = GPT2Config(**SCALES[options.scale], bos_token_id=0, eos_token_id=0)
    config.use_cache = False
    config._attn_implementation = "eager"  # the others read values on the host in every step
    blocks = load_text(accelerator, options, config)
    model, optimizer = build(options, config)
    parameters = sum(p.numel() for p in model.parameters())
    shuffle = not accelerator.is_precompiling
    loader = DataLoader(blocks.train, options.batch_size, shuffle=shuffle, drop_last=True)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    ranks = accelerator.num_processes
    scheduler = get_scheduler(
        "cosine",
        optimizer,
        num_warmup_steps=min(options.warmup_steps, options.max_steps // 4) * ranks,
        num_training_steps=options.max_steps * ranks,
    )
    scheduler = accelerator.prepare(scheduler)
    accelerator.print(f"GPT-2 with {parameters:,} parameters, {options.precision}, {ranks} data-parallel ranks")
    state = State()
    accelerator.register_for_checkpointing(state)
    if options.resume and accelerator.load_state(resume="latest"):
        accelerator.print(f"continues after step {state.step}")
    train(accelerator, options, model, optimizer, loader, scheduler, state)
    accelerator.save_state()
    accelerator.save_model(model, options.output_dir / "model")
    if accelerator.is_main_process and not accelerator.is_precompiling:
        blocks.tokenizer.save_pretrained(options.output_dir / "model")
        result = {"parameters": parameters, "steps": state.step, "seconds": state.seconds, "options": vars(options)}
        (options.output_dir / "result.json").write_text(json.dumps(result, indent=1, default=str))
    accelerator.end_training()
    return 0


class State:
    """The progress of the training, which is part of its checkpoints."""

    step = 0
    seconds = 0.0

    def state_dict(self) -> dict:
        return {"step": self.step, "seconds": self.seconds}

    def load_state_dict(self, state: dict) -> None:
        self.step, self.seconds = state["step"], state["seconds"]


def train(accelerator, options, model, optimizer, loader, scheduler, state: State) -> None:
    throughput = Throughput(options.batch_size * options.gradient_accumulation_steps * accelerator.num_processes)
    begin = time.monotonic() - state.seconds
    main = accelerator.is_main_process
    bar = tqdm(total=options.max_steps, initial=state.step, unit="step", disable=not main)
    model.train()
    while state.step < options.max_steps:
        for batch in loader:
            with accelerator.accumulate(model):
                # With a mask, transformers does not read positions on the host to find packed sequences.
                loss = model(**batch, attention_mask=torch.ones_like(batch["input_ids"])).loss
                accelerator.backward(loss)
                norm = accelerator.clip_grad_norm_(model.parameters(), options.max_norm)
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
            if not accelerator.sync_gradients:
                continue
            state.step, state.seconds = state.step + 1, time.monotonic() - begin
            rate = throughput.step()
            values = {
                "loss": accelerator.reduce(loss.detach(), "mean"),
                "gradient_norm": norm,
                "learning_rate": scheduler.get_last_lr()[0],
                "sequences_per_second": rate,
            }
            accelerator.log(values, step=state.step)
            bar.update()
            bar.set_postfix_str(f"{rate:.1f} sequences/s")
            if options.checkpoint_every and state.step % options.checkpoint_every == 0:
                accelerator.save_state(async_save=True)
            if state.step == options.max_steps:
                break
    bar.close()


if __name__ == "__main__":
    try:
        sys.exit(main())
    except (NeuronAccelError, TextError) as error:
        sys.exit(f"train.py: {error}")
