"""Trains by a recipe: pre-training, or fine-tuning with LoRA.

python train.py qwen3-8b/pretrain-trn1.32xlarge.yaml --plan
    what it needs, by neuron-accel-plan
neuron-accel launch --nproc-per-node 2 train.py qwen3-8b/pretrain-trn1.32xlarge.yaml --tiny
    the same files with a tiny model of the family, on a laptop
neuron-accel launch --nproc-per-node 32 train.py qwen3-8b/pretrain-trn1.32xlarge.yaml --data tokens
    the training
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
import os
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

# First: it chooses the device for Accelerate.
from neuron_accel import (  # isort: skip
    NeuronAccelError,
    NeuronAccelerator,
    lazy_load_for_parallelism,
    make_optimizer_constructor_lazy,
)
import torch
import yaml
from data import IGNORED, Counting, DataError, Rows
from torch.utils.data import DataLoader
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, set_seed

LOG_EVERY = 10
"""Steps between lines of progress."""


class RecipeError(Exception):
    """The recipe, or an argument, cannot be used."""


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """A file: what is trained, how long, and with which strategies.

    Args:
        model: a file with the model's configuration, beside the recipe's folder.
        instance, instances: type and number of instances.
        sequence: tokens in a sample.
        global_batch: samples in an optimizer step, over all ranks and micro-batches.
        steps, warmup_steps: optimizer steps, and those in which the learning rate rises; it then falls as a cosine.
        learning_rate: the highest.
        weight_decay: of matrices.
        save_every: steps between checkpoints.
        accelerator: configuration of `NeuronAccelerator`, with the strategies.
    """

    model: str
    instance: str
    instances: int
    sequence: int
    global_batch: int
    steps: int
    warmup_steps: int
    learning_rate: float
    weight_decay: float
    save_every: int
    accelerator: dict[str, Any]

    @classmethod
    def read(cls, path: Path) -> Recipe:
        try:
            values = yaml.safe_load(path.read_text(encoding="utf-8"))
        except (OSError, yaml.YAMLError) as error:
            raise RecipeError(f"{path} cannot be read: {error}") from error
        known = {field.name for field in dataclasses.fields(cls)}
        if not isinstance(values, dict) or set(values) != known:
            wrong = sorted(known ^ set(values)) if isinstance(values, dict) else values
            raise RecipeError(f"{path} must have exactly the keys of Recipe in train.py; these differ: {wrong}")
        return cls(**{**values, "model": str(path.parent / values["model"])})

    @property
    def accumulation(self) -> int:
        return self.accelerator.get("gradient_accumulation_steps", 1)

    def options(self, plugin: str) -> dict[str, Any] | None:
        """The options of a plugin; None if the recipe does not have it."""
        for entry in self.accelerator["plugins"]:
            if isinstance(entry, dict) and plugin in entry:
                return entry[plugin]
        return None

    def tiny(self, ranks: int) -> Recipe:
        """The same recipe for a tiny model and a few ranks: each degree is 2 as long as there are ranks for it."""
        plugins: list[Any] = json.loads(json.dumps(self.accelerator["plugins"]))
        for size in ("pipeline_parallel_size", "expert_parallel_size", "hybrid_shard_size", "tensor_parallel_size"):
            for options in (value for entry in plugins if isinstance(entry, dict) for value in entry.values()):
                if options.get(size, 1) > 1:
                    options[size] = 2 if ranks >= 2 else 1
                    ranks //= options[size]
                    if size == "pipeline_parallel_size":
                        del options["num_microbatches"]
                        options |= {"num_microbatches": 2} if options[size] == 2 else {}
                    if size == "tensor_parallel_size" and options[size] == 1:
                        plugins = [p for p in plugins if "sequence_parallel" not in p]  # its name, or a mapping of it
        accumulation = min(2, self.accumulation)
        return dataclasses.replace(
            self,
            sequence=32,
            global_batch=16,
            steps=6,
            warmup_steps=1,
            learning_rate=1e-2,
            save_every=3,
            accelerator={"gradient_accumulation_steps": accumulation, "plugins": plugins},
        )


def tiny_config(config: Any) -> Any:
    """A model of the same family in which everything is small."""
    one_each = config.num_key_value_heads == config.num_attention_heads
    small = {
        "vocab_size": 160,
        "hidden_size": 32,
        "intermediate_size": 48,
        "moe_intermediate_size": 24,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 4 if one_each else min(2, config.num_key_value_heads),
        "head_dim": 8,
        "query_pre_attn_scalar": 8,
        "q_lora_rank": 8,
        "kv_lora_rank": 8,
        "qk_nope_head_dim": 8,
        "qk_rope_head_dim": 8,
        "v_head_dim": 8,
        "num_experts": 4,
        "n_routed_experts": 4,
        "n_group": 1,
        "topk_group": 1,
        "first_k_dense_replace": 1,
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "sliding_window": 8,
        "max_position_embeddings": 64,
        "initializer_range": 0.1,
    }
    missing = object()
    own = {name: getattr(config, name, missing) for name in small}
    kept = {name: None if own[name] is None else value for name, value in small.items() if own[name] is not missing}
    if kinds := list(dict.fromkeys(getattr(config, "layer_types", None) or ())):  # a layer of each kind
        kept["layer_types"] = (kinds * 2)[:2]
    return AutoConfig.for_model(config.model_type, **kept, bos_token_id=1, eos_token_id=1, pad_token_id=0)


def build(recipe: Recipe, weights: str | None, tiny: bool) -> Any:
    """The model in bfloat16, without memory for its weights: each rank reads, or initialises, what it holds."""
    config = AutoConfig.from_pretrained(recipe.model if weights is None else weights)
    config = tiny_config(config) if tiny else config
    config._attn_implementation = "eager"  # FlashAttentionPlugin replaces it; others read values on the host
    with lazy_load_for_parallelism():
        if weights is not None:
            return AutoModelForCausalLM.from_pretrained(weights, config=config, dtype=torch.bfloat16)
        return AutoModelForCausalLM.from_config(config, dtype=torch.float32 if tiny else torch.bfloat16)


def build_optimizer(model: Any, recipe: Recipe) -> torch.optim.Optimizer:
    """AdamW, with weight decay for matrices only."""
    groups = [
        {"params": [p for p in model.parameters() if p.dim() > 1], "weight_decay": recipe.weight_decay},
        {"params": [p for p in model.parameters() if p.dim() <= 1], "weight_decay": 0.0},
    ]
    return make_optimizer_constructor_lazy(torch.optim.AdamW)(groups, lr=recipe.learning_rate, betas=(0.9, 0.95))


def rate_at(step: int, recipe: Recipe) -> float:
    """The learning rate as a fraction of the highest: it rises, then falls to a tenth as a cosine."""
    if step < recipe.warmup_steps:
        return (step + 1) / recipe.warmup_steps
    progress = min(1.0, (step - recipe.warmup_steps) / max(1, recipe.steps - recipe.warmup_steps))
    return 0.1 + 0.9 * 0.5 * (1 + math.cos(math.pi * progress))


def micro_batch(recipe: Recipe, accelerator: NeuronAccelerator) -> int:
    """Samples of a rank in a call of the model."""
    calls = accelerator.num_processes * accelerator.gradient_accumulation_steps
    if recipe.global_batch % calls:
        raise RecipeError(
            f"a global batch of {recipe.global_batch} samples cannot be shared by {accelerator.num_processes} "
            f"data-parallel ranks with {accelerator.gradient_accumulation_steps} micro-batches each: choose a multiple "
            f"of {calls}"
        )
    return recipe.global_batch // calls


class Progress:
    """The step, which is part of checkpoints, and the losses of this start."""

    def __init__(self) -> None:
        self.step = 0
        self.losses: list[torch.Tensor] = []

    def state_dict(self) -> dict[str, int]:
        return {"step": self.step}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.step = state["step"]


def train(accelerator, recipe: Recipe, model, optimizer, loader, scheduler, progress: Progress, uneven: bool) -> None:
    begin, first = time.monotonic(), progress.step
    interruption = accelerator.watch_for_interruption()
    every = min(LOG_EVERY, max(1, recipe.steps // 6))
    model.train()
    while progress.step < recipe.steps:
        for batch in loader:
            with accelerator.accumulate(model):
                # With a mask, transformers does not read positions on the host to find packed sequences.
                loss = model(**batch, attention_mask=torch.ones_like(batch["input_ids"]), use_cache=False).loss
                # Samples with different numbers of labels: the mean is over the tokens of all ranks and micro-batches.
                tokens = (batch["labels"] != IGNORED).sum() if uneven else None
                accelerator.backward(loss, **({} if tokens is None else {"num_items": tokens}))
                accelerator.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                optimizer.zero_grad()
            if not accelerator.sync_gradients:
                continue
            scheduler.step()
            progress.step += 1
            if progress.step % every == 0:
                mean = accelerator.reduce(loss.detach(), "mean")
                progress.losses.append(mean)
                seconds = (time.monotonic() - begin) / (progress.step - first)
                rate = recipe.global_batch * recipe.sequence / seconds
                accelerator.print(f"step {progress.step}, {rate:,.0f} tokens/s, loss", mean)
            if progress.step % recipe.save_every == 0:
                accelerator.save_state(async_save=True)
            if progress.step >= recipe.steps:
                return
            if interruption.requested():
                accelerator.save_state()
                raise SystemExit(0)


def show_plan(path: Path, recipe: Recipe, price_per_hour: float | None) -> int:
    """Runs `neuron-accel plan` with the model and the strategies of a recipe; returns its exit code."""
    from neuron_accel import find_instance
    from neuron_accel.commands import main as neuron_accel

    with tempfile.TemporaryDirectory() as folder:
        config = Path(folder, f"{path.stem}.yaml")
        config.write_text(yaml.safe_dump(recipe.accelerator))
        command = ["plan", "--model", recipe.model, "--config", str(config), "--instance", recipe.instance]
        command += ["--world-size", str(recipe.instances * find_instance(recipe.instance).cores())]
        command += ["--global-batch", str(recipe.global_batch), "--sequence", str(recipe.sequence)]
        command += ["--tokens", f"{recipe.steps * recipe.global_batch * recipe.sequence / 1e6:.6g}M"]
        listed = Path(__file__).with_name("prices.json")
        if price_per_hour is None and listed.is_file():
            price_per_hour = json.loads(listed.read_text()).get(recipe.instance, {}).get("usd_per_hour")
        command += [] if price_per_hour is None else ["--price-per-hour", str(price_per_hour)]
        return neuron_accel(command)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("recipe", type=Path, help="a YAML file of this folder, or one of your own")
    parser.add_argument("--data", type=Path, help="a folder that data.py wrote")
    parser.add_argument("--weights", help="folder of the model that training begins with (default: random weights)")
    parser.add_argument("--output", type=Path, default=Path("out"), help="where everything is written (default: out)")
    parser.add_argument("--steps", type=int, help="optimizer steps, instead of the recipe's")
    parser.add_argument("--seed", type=int, default=1234, help="of everything random (default: 1234)")
    parser.add_argument("--tiny", action="store_true", help="a tiny model of the family, on the ranks that there are")
    parser.add_argument("--plan", action="store_true", help="print memory, time and price, and train nothing")
    parser.add_argument(
        "--price-per-hour", type=float, metavar="USD", help="of an instance, with --plan (default: that of prices.json)"
    )
    return parser.parse_args()


def main() -> int:
    options = parse()
    recipe = Recipe.read(options.recipe)
    if options.plan:
        recipe = dataclasses.replace(recipe, steps=options.steps or recipe.steps)
        return show_plan(options.recipe, recipe, options.price_per_hour)
    if options.price_per_hour is not None:
        raise RecipeError("--price-per-hour has no effect without --plan: add it, or leave the price out")
    recipe = recipe.tiny(int(os.environ.get("WORLD_SIZE", "1"))) if options.tiny else recipe
    recipe = dataclasses.replace(recipe, steps=options.steps or recipe.steps)
    lora = recipe.options("lora") is not None
    if lora and options.weights is None and not options.tiny:
        raise RecipeError("LoRA adapts a model that was trained: name its folder with --weights")
    if options.data is None and not options.tiny:
        raise RecipeError("there is nothing to train on: make tokens with data.py, and name their folder with --data")
    accelerator = NeuronAccelerator(
        config=recipe.accelerator, step_scheduler_with_optimizer=False, project_dir=options.output
    )
    accelerator.project_configuration.automatic_checkpoint_naming = True
    accelerator.project_configuration.total_limit = 2
    accelerator.print(accelerator.plan.explain())
    set_seed(options.seed)
    model = build(recipe, options.weights, options.tiny)
    if options.data is not None:
        rows: Rows | Counting = Rows(options.data, recipe.sequence)
    else:
        rows = Counting(8 * recipe.global_batch, recipe.sequence, model.config.vocab_size)
    optimizer = build_optimizer(model, recipe)
    loader = DataLoader(rows, micro_batch(recipe, accelerator), shuffle=True, drop_last=True)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    if not len(loader):
        raise DataError(
            f"{options.data} has {len(rows)} samples, fewer than the {micro_batch(recipe, accelerator)} of a "
            f"micro-batch on each of {accelerator.num_processes} data-parallel ranks: add text, or choose a smaller "
            "global_batch"
        )
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: rate_at(step, recipe))
    scheduler, progress = accelerator.prepare(scheduler), Progress()
    accelerator.register_for_checkpointing(progress)
    if accelerator.load_state(resume="latest"):
        accelerator.print(f"continues after step {progress.step}")
    train(accelerator, recipe, model, optimizer, loader, scheduler, progress, rows.uneven)
    save(accelerator, model, options, lora, progress)
    accelerator.end_training()
    return 0


def save(accelerator, model, options: argparse.Namespace, lora: bool, progress: Progress) -> None:
    """Writes a folder that transformers, peft and vLLM load, and what was learnt about it."""
    if accelerator.is_precompiling:
        return
    folder = options.output / ("adapter" if lora else "model")
    if lora:
        from neuron_accel_lora import save_adapter

        save_adapter(accelerator, model, folder)
    else:
        accelerator.save_model(model, folder, max_shard_size="5GB")
    if accelerator.is_main_process:
        if options.data is not None:
            AutoTokenizer.from_pretrained(options.data).save_pretrained(folder)
        losses = [float(loss) for loss in progress.losses]
        (options.output / "result.json").write_text(json.dumps({"steps": progress.step, "losses": losses}))


if __name__ == "__main__":
    try:
        sys.exit(main())
    except (NeuronAccelError, RecipeError, DataError) as error:
        sys.exit(f"train.py: {error}")
