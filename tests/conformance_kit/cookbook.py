"""What the plugins of ``examples/own_plugin`` are compared with: plain loops in one process, without this library."""

from __future__ import annotations

import re
from collections.abc import Sequence

import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from neuron_accel.testing import Trace, Training
from neuron_accel.testing.parity import Batch, loss_of


def train(
    model_fn, batches, training, reference, *, optimizer=None, gradients=None, complete=None, before=None, after=None
) -> Trace:
    """A plain loop.

    Args:
        optimizer: ``optimizer(model)`` creates the optimizer; None: that of ``training``, for all parameters.
        gradients: ``gradients(model, rows)`` computes ``parameter.grad`` of a micro-batch and returns its loss.
        complete: ``complete(model)`` is called with the gradients of a step, before they are clipped.
        before, after: called with the model and the number of steps so far, before forward and after each step.
    """
    torch.manual_seed(0)
    model = model_fn().train()
    if training.prepare_model:
        training.prepare_model(model)
    model = reference(model)
    chosen = training.optimizer(model.parameters()) if optimizer is None else optimizer(model)
    losses, norms, last = [], [], {}
    for index, batch in enumerate(batches):
        step, left = divmod(index, training.accumulation)
        if before and not left:
            before(model, step)
        if gradients:
            losses.append(gradients(model, batch))
        else:
            loss = loss_of(model(**batch))
            (loss / training.accumulation).backward()
            losses.append(loss.item())
        if left + 1 < training.accumulation:
            continue
        if complete:
            complete(model)
        if training.max_norm is not None:
            norms.append(float(nn.utils.clip_grad_norm_(model.parameters(), training.max_norm)))
        last = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
        chosen.step()
        if after:
            after(model, step + 1)
        chosen.zero_grad()
    return Trace(losses, norms, last, {name: value.clone() for name, value in model.state_dict().items()})


# ---- per-block learning rates ----------------------------------------------------------------------------------------
def llama_groups(model, lr: float, decay: float) -> list[dict]:
    """Groups of a Llama of two layers, written by hand."""
    depths = {"model.embed_tokens": 3, "model.layers.0": 2, "model.layers.1": 1}  # others: 0
    groups: list[dict] = [{"params": [], "lr": lr * decay**depth} for depth in range(4)]
    for name, parameter in model.named_parameters():
        depth = next((depth for prefix, depth in depths.items() if name.startswith(prefix)), 0)
        groups[depth]["params"].append(parameter)
    return groups


def train_with_block_rates(model_fn, batches, training: Training, *, plugin, reference, data_parallel_size) -> Trace:
    def optimizer(model):
        made = training.optimizer(model.parameters())
        options = {k: v for k, v in made.defaults.items() if k in ("eps", "weight_decay")}
        return type(made)(llama_groups(model, made.defaults["lr"], plugin.decay), **options)

    return train(model_fn, batches, training, reference, optimizer=optimizer)


# ---- gradients in bfloat16 -------------------------------------------------------------------------------------------
def rows_of(batch: Batch, ranks: int) -> list[Batch]:
    return [{name: value.chunk(ranks)[i] for name, value in batch.items()} for i in range(ranks)]


def train_in_bf16(model_fn, batches: Sequence[Batch], training, *, plugin, reference, data_parallel_size) -> Trace:
    """Every rank's gradient of a step is rounded, and so is their sum."""
    held: dict = {}

    def gradients(model, batch):
        """Keeps the gradient of each rank apart, and sums them anew after every micro-batch."""
        losses = []
        for rank, rows in enumerate(rows_of(batch, data_parallel_size)):
            loss = loss_of(model(**rows))
            wanted = [(n, p) for n, p in model.named_parameters() if p.requires_grad]
            found = torch.autograd.grad(loss / training.accumulation, [p for _, p in wanted], allow_unused=True)
            for (name, _), gradient in zip(wanted, found, strict=True):
                if gradient is not None:
                    held.setdefault(name, {})[rank] = held.get(name, {}).get(rank, 0) + gradient
            losses.append(loss.item())
        for name, parameter in model.named_parameters():
            if name in held:
                parts = [(g / data_parallel_size).bfloat16() for g in held[name].values()]
                parameter.grad = torch.stack(parts).sum(0).float() if data_parallel_size > 1 else held[name][0]
        return sum(losses) / len(losses)

    return train(model_fn, batches, training, reference, gradients=gradients, after=lambda model, step: held.clear())


# ---- freezing --------------------------------------------------------------------------------------------------------
def frozen_by_hand(model, step: int) -> None:
    """The schedule of the test: the embedding rests for one step, the first layer stops after two."""
    for name, parameter in model.named_parameters():
        if not hasattr(parameter, "trained_first"):
            parameter.trained_first = parameter.requires_grad
        if parameter.trained_first:
            rests = "embed" in name and step < 1
            stops = re.search(r"layers\.0\.", name) is not None and step >= 2
            parameter.requires_grad_(not rests and not stops)


def train_by_schedule(model_fn, batches, training, *, plugin, reference, data_parallel_size) -> Trace:
    return train(model_fn, batches, training, reference, before=frozen_by_hand)


# ---- the gradient noise scale ----------------------------------------------------------------------------------------
def noise_scale(model_fn, batches, training: Training, *, ranks: int, decay: float, micro_batch_size: int) -> float:
    """From the gradients of every micro-batch of every rank, one after another; ``batches`` are those of all ranks
    together."""
    variance = square = 0.0
    squares: list[float] = []

    def flat(gradients) -> torch.Tensor:
        return torch.cat([gradient.flatten() for gradient in gradients if gradient is not None]).double()

    def gradients(model, batch):
        losses = []
        parameters = list(model.parameters())
        for rows in rows_of(batch, ranks):
            loss = loss_of(model(**rows))
            found = torch.autograd.grad(loss, parameters, allow_unused=True)
            squares.append(flat(found).square().sum().item())
            for parameter, gradient in zip(parameters, found, strict=True):
                if gradient is None:
                    continue
                part = gradient / ranks / training.accumulation
                parameter.grad = part if parameter.grad is None else parameter.grad + part
            losses.append(loss.item())
        return sum(losses) / len(losses)

    def before_clipping(model) -> None:
        nonlocal variance, square
        n = len(squares)
        one, mean = sum(squares) / n, flat(p.grad for p in model.parameters()).square().sum().item()
        variance = decay * variance + (1 - decay) * (one - mean) / (1 - 1 / n)
        square = decay * square + (1 - decay) * (n * mean - one) / (n - 1)
        squares.clear()

    train(model_fn, batches, training, lambda model: model, gradients=gradients, complete=before_clipping)
    return micro_batch_size * variance / square


# ---- the average of the weights --------------------------------------------------------------------------------------
def average_of_weights(model_fn, batches, training: Training, decay: float) -> tuple[dict[str, torch.Tensor], float]:
    """The average that torch computes, and its loss on the first batch."""
    averaged: list[AveragedModel] = []

    def follow(model, _) -> None:
        if not averaged:
            averaged.append(AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(decay)))
            averaged[0].update_parameters(model)  # the first call copies

    def update(model, _) -> None:
        averaged[0].update_parameters(model)

    train(model_fn, batches, training, lambda model: model, before=follow, after=update)
    with torch.no_grad():
        loss = loss_of(averaged[0].module(**batches[0])).item()
    return {name: value.clone() for name, value in averaged[0].module.state_dict().items()}, loss
