"""Trains a small Llama on the source code of Python's standard library, sharded over several ranks.

How it is sharded is written in a YAML file; the loop in `train` is an ordinary one and does not know. The batch size is
that of an optimizer step over all ranks, so every way to divide the same run gives the same losses.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from typing import Any

import data
import recipe
import reference
import report
import torch
from options import parse
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import DataLoader
from transformers.utils.logging import disable_progress_bar

from neuron_accel import NeuronAccelerator, NeuronAccelError
from neuron_accel.errors import ConfigurationError


def train(accelerator, model, optimizer, loader, scheduler, progress) -> None:
    model.train()
    for batch in loader:
        with accelerator.accumulate(model):
            loss = model(**batch).loss
            accelerator.backward(loss)
            norm = accelerator.clip_grad_norm_(model.parameters(), recipe.MAX_NORM)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
        progress.micro_batch(loss)
        if accelerator.sync_gradients:
            progress.step(norm)


def evaluate(accelerator, model, loader) -> float:
    """Mean loss over ``loader``, whose batches are all of the same size."""
    model.eval()
    losses = []
    with torch.no_grad():
        for batch in loader:
            loss = model(**batch).loss
            losses.append(accelerator.gather_for_metrics(loss.repeat(len(batch["input_ids"]))))
    return torch.cat(losses).mean().item()


def run(options: argparse.Namespace) -> int:
    """Runs the example; returns the exit code."""
    begin = time.monotonic()
    accelerator = NeuronAccelerator(config=options.config, plan_for=_planned(options))
    micro_batch_size = _micro_batch_size(options, accelerator)
    accelerator.print(accelerator.plan.explain())
    corpus = load_text(accelerator, options)
    sequences = data.Sequences(corpus.train)
    order = data.TrainingOrder(size=len(sequences), total=options.steps * options.batch_size, seed=options.seed)
    eval_batches = min(options.eval_batches, len(corpus.held_out) // options.batch_size)
    eval_sequences = data.Sequences(data.spread(corpus.held_out, eval_batches * options.batch_size))

    config = _llama_config(options, len(corpus.tokenizer), corpus.tokenizer.eos_token_id)
    model = recipe.build_model(config, options.seed)
    accelerator.print(f"model: Llama with {sum(p.numel() for p in model.parameters()):,} parameters\n")
    optimizer = recipe.build_optimizer(model, options.learning_rate)
    loader = DataLoader(sequences, batch_size=micro_batch_size, sampler=order)
    eval_loader = DataLoader(eval_sequences, batch_size=micro_batch_size)
    # As in Accelerate, a scheduler advances by the data-parallel size in each optimizer step.
    ranks = accelerator.num_processes
    scheduler = LambdaLR(optimizer, lambda step: recipe.learning_rate_at(step / ranks, options.steps))
    model, optimizer, loader, eval_loader, scheduler = accelerator.prepare(
        model, optimizer, loader, eval_loader, scheduler
    )

    tokens = options.batch_size * options.sequence_length
    progress = report.Progress(accelerator, steps=options.steps, tokens_per_step=tokens, every=options.log_every)
    train(accelerator, model, optimizer, loader, scheduler, progress)
    seconds = {"training": progress.close()}
    evaluation_loss = evaluate(accelerator, model, eval_loader)

    folder = options.output / "model"
    accelerator.save_model(model, folder)
    is_main_process = accelerator.is_main_process
    if is_main_process:
        corpus.tokenizer.save_pretrained(folder)
    accelerator.end_training()
    if not is_main_process:
        return 0

    # The rest runs on the main process only, with the saved folder.
    show_result(options, progress, evaluation_loss, seconds["training"])
    history = {"losses": progress.losses, "gradient_norms": progress.norms, "evaluation_loss": evaluation_loss}
    if options.verify:
        start = time.monotonic()
        history["reference"] = verify(options, config, sequences, order, history)
        seconds["one process"] = time.monotonic() - start
    else:
        print(f"\n{report.loss_table(progress.losses)}")
    seconds["all"] = time.monotonic() - begin
    print("\n" + ", ".join(f"{what} {value:.1f} s" for what, value in seconds.items()))
    (options.output / "history.json").write_text(json.dumps(history | {"seconds": seconds}, indent=1))
    return 0 if not options.verify or history["reference"]["within_tolerance"] else 1


def load_text(accelerator, options: argparse.Namespace) -> data.Corpus:
    """The corpus, made by one process of each machine while the others wait, then the same on all."""
    start = time.monotonic()
    settings = data.CorpusSettings(
        share=options.corpus_share,
        held_out=options.held_out_share,
        vocab_size=options.vocab_size,
        sequence_length=options.sequence_length,
    )
    with accelerator.local_main_process_first():
        corpus = data.load_corpus(settings, options.output / "corpus.safetensors")
    # Machines with different versions of Python have different standard libraries.
    digest = torch.tensor([int(corpus.digest[:15], 16)], device=accelerator.device)
    if len(set(accelerator.gather(digest).tolist())) > 1:
        raise data.CorpusError(
            "the machines of this run have different text to train on; give them the same version of Python, the same "
            "version of tokenizers, and the same arguments"
        )
    for what, rows in (("train on", corpus.train), ("evaluate with", corpus.held_out)):
        if len(rows) < options.batch_size:
            raise data.CorpusError(
                f"there are only {len(rows)} sequences of {options.sequence_length} tokens to {what}, which is less "
                f"than one batch of {options.batch_size}; choose a larger --corpus-share or --held-out-share"
            )
    accelerator.print(
        f"\ntext: {corpus.train.size:,} tokens to train on, {corpus.held_out.size:,} held out"
        f" ({'reused' if corpus.reused else 'made'} in {time.monotonic() - start:.1f} s)"
    )
    return corpus


def show_result(options: argparse.Namespace, progress: report.Progress, evaluation_loss: float, seconds: float) -> None:
    losses, folder = progress.losses, options.output / "model"
    rate = options.steps * options.batch_size * options.sequence_length / seconds
    print(f"\nloss {report.sparkline(losses)}")
    print(f"     {losses[0]:.3f} at the start, {losses[-1]:.3f} at the end, {evaluation_loss:.3f} on held-out files")
    print(f"     {seconds:.1f} s, {rate:,.0f} tokens/s")
    print(f"\nsaved in {folder}; plain transformers opens it and completes a line of Python:")
    print(f"     prompt:     {options.prompt}")
    print(f"     completion: {report.complete_line(folder, options.prompt)[len(options.prompt) :]}")


def verify(options: argparse.Namespace, config, sequences, order, history: dict) -> dict[str, Any]:
    """Trains the one-process reference and compares. What must agree: losses, gradient norms and weights.

    Accelerate deals batches to data-parallel ranks in turn, so what all ranks see in the micro-batches of one optimizer
    step is the next ``batch_size`` samples of the order: one batch of a loader that is not sharded.
    """
    print()
    loader = DataLoader(sequences, batch_size=options.batch_size, sampler=order)
    model = recipe.build_model(config, options.seed)
    result = reference.train_in_one_process(
        model,
        recipe.build_optimizer(model, options.learning_rate),
        report.progress_bar("one process", loader, total=options.steps),
        lambda step: recipe.learning_rate_at(step, options.steps),
        max_norm=recipe.MAX_NORM,
    )
    difference = reference.largest_difference(history["losses"], result.losses)
    norm_difference = reference.largest_difference(history["gradient_norms"], result.norms)
    first = recipe.build_model(config, options.seed).state_dict()
    weights = reference.weight_difference(options.output / "model", result.weights, first)
    print(f"\n{report.loss_table(history['losses'], result.losses)}")
    print(f"\nlargest relative difference of the losses in {options.steps} steps: ", end="")
    within = [
        report.verdict(difference, options.tolerance),
        report.verdict(norm_difference, 10 * options.tolerance, "of the gradient norms: "),
        report.verdict(weights.of_the_way, 100 * options.tolerance, "of the saved weights, relative to their change: "),
    ]
    print(report.about_weights(weights.entry, weights.tensor))
    return {
        "losses": result.losses,
        "largest_difference": difference,
        "largest_norm_difference": norm_difference,
        "weight_difference": weights.of_the_way,
        "largest_weight_difference": weights.entry,
        "within_tolerance": all(within),
    }


def _micro_batch_size(options: argparse.Namespace, accelerator) -> int:
    """Sequences in a micro-batch of one rank."""
    ranks, accumulation = accelerator.data_parallel_size, accelerator.gradient_accumulation_steps
    size, rest = divmod(options.batch_size, ranks * accumulation)
    if rest or not size:
        raise ConfigurationError(
            f"A batch of {options.batch_size} sequences cannot be split into {ranks * accumulation} equal parts.",
            where=f"--batch-size {options.batch_size}, {options.config}",
            why=f"an optimizer step has {accumulation} micro-batches on each of {ranks} data-parallel ranks",
            fix=f"choose a multiple of {ranks * accumulation} for --batch-size",
        )
    return size


def _planned(options: argparse.Namespace) -> dict[str, Any]:
    """What `plugins: auto` has to know before the model is built; other configurations name their plugins."""
    model = _llama_config(options, options.vocab_size, end=0)
    return {"model": model, "global_batch": options.batch_size, "sequence": options.sequence_length}


def _llama_config(options: argparse.Namespace, vocab_size: int, end: int) -> recipe.LlamaConfig:
    return recipe.llama_config(
        vocab_size=vocab_size,
        hidden_size=options.hidden_size,
        layers=options.layers,
        heads=options.heads,
        key_value_heads=options.key_value_heads,
        positions=options.sequence_length,
        end=end,
    )


def main() -> int:
    options = parse(__doc__)
    disable_progress_bar()  # that of loading weights, beside the one of the training
    try:
        return run(options)
    except (NeuronAccelError, data.CorpusError) as error:
        sys.exit(f"error: {error}")


if __name__ == "__main__":
    sys.exit(main())
