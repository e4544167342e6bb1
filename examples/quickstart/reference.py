"""The same training in one process, with PyTorch and transformers only, and its comparison with the sharded run."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM


@dataclass(frozen=True, kw_only=True)
class Reference:
    """The results of one process.

    Args:
        losses: of every step.
        norms: global norm of the gradients before clipping, of every step.
        weights: of the trained model, by name.
    """

    losses: list[float]
    norms: list[float]
    weights: dict[str, torch.Tensor]


def train_in_one_process(
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer,
    batches: Iterable[dict[str, torch.Tensor]],
    schedule: Callable[[int], float],
    *,
    max_norm: float,
) -> Reference:
    """Trains on one global batch per step: the batches of all ranks of the sharded run in that step.

    Args:
        model: with the weights the sharded run began with.
        optimizer: of ``model``.
        batches: one for every optimizer step.
        schedule: fraction of the learning rate at a step.
        max_norm: to clip gradients to.
    """
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, schedule)
    losses, norms = [], []
    for batch in batches:
        loss = model(**batch).loss
        loss.backward()
        norms.append(torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm).item())
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return Reference(losses=losses, norms=norms, weights=model.state_dict())


def largest_difference(values: Sequence[float], reference: Sequence[float]) -> float:
    """The largest relative difference; infinite where either is not a number.

    Raises:
        ValueError: if they are not equally many.
    """
    differences = [abs(a - b) / abs(b) for a, b in zip(values, reference, strict=True)]
    return max((d if d == d else float("inf") for d in differences), default=0.0)


@dataclass(frozen=True)
class WeightDifference:
    """The differences between two trainings.

    Args:
        of_the_way: norm of the difference of all weights, relative to that of what training changed in them.
        entry: the largest difference of an entry, relative to the largest entry of its tensor.
        tensor: the name of that tensor.
    """

    of_the_way: float
    entry: float
    tensor: str


def weight_difference(
    folder: Path, weights: dict[str, torch.Tensor], first: dict[str, torch.Tensor]
) -> WeightDifference:
    """Between the weights saved in ``folder`` and ``weights``, where both trainings began with ``first``.

    Raises:
        ValueError: if names or shapes are not the same.
    """
    saved = AutoModelForCausalLM.from_pretrained(folder).state_dict()
    if {n: t.shape for n, t in saved.items()} != {n: t.shape for n, t in weights.items()}:
        raise ValueError(f"{folder} does not hold the weights of the one-process model: names or shapes differ")
    apart = sum((saved[n] - w).double().square().sum() for n, w in weights.items())
    way = sum((w - first[n]).double().square().sum() for n, w in weights.items())
    entries = {n: ((saved[n] - w).abs().max() / w.abs().max()).item() for n, w in weights.items()}
    tensor = max(entries, key=lambda n: entries[n])
    return WeightDifference(float((apart / way).sqrt()), entries[tensor], tensor)
