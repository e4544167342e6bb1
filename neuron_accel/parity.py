# SPDX-License-Identifier: Apache-2.0
"""Compares training with plugins on several ranks to training in one process, for ``neuron-accel test`` and for tests.

The reference is a plain PyTorch loop in one process, without this library. The same model, built with the same seed, is
trained on several ranks through ``NeuronAccelerator`` on the same global batches, and losses, gradient norms, gradients
and weights are compared.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.utils.data
from torch import nn

from neuron_accel.errors import UsageError

_logger = logging.getLogger("neuron_accel.testing.parity")

Batch = Mapping[str, torch.Tensor]


@dataclass(frozen=True, kw_only=True)
class Training:
    """Options of a training.

    Args:
        optimizer: ``optimizer(parameters)`` creates the optimizer; AdamW by default.
        accumulation: number of micro-batches per optimizer step.
        max_norm: norm to which gradients are clipped; None: no clipping.
        prepare_model: called with the model before training, for example to freeze parameters.
    """

    optimizer: Callable[[Any], torch.optim.Optimizer] = field(default_factory=lambda: _adamw)
    accumulation: int = 1
    max_norm: float | None = None
    prepare_model: Callable[[nn.Module], Any] | None = None

    def __repr__(self) -> str:
        made = getattr(self.optimizer, "__name__", type(self.optimizer).__name__)
        return f"<{type(self).__name__}: optimizer {made}, accumulation {self.accumulation}, max_norm {self.max_norm}>"


def _adamw(parameters: Any) -> torch.optim.Optimizer:
    # The gradient of a key's bias is zero in exact arithmetic, since softmax is invariant to it. With Adam's default
    # epsilon of 1e-8 its rounding errors would become full updates, which differ between any two runs.
    return torch.optim.AdamW(parameters, lr=1e-3, eps=1e-6, weight_decay=0.01)


@dataclass(frozen=True)
class Trace:
    """The results of a training.

    Args:
        losses: loss of each global micro-batch.
        norms: gradient norm of each step before clipping; empty without clipping.
        gradients: gradients of the last step, by FQN, in original shapes.
        weights: the state dict at the end.
    """

    losses: list[float]
    norms: list[float]
    gradients: dict[str, torch.Tensor]
    weights: dict[str, torch.Tensor]

    def __repr__(self) -> str:
        losses = f", from {self.losses[0]:.4g} to {self.losses[-1]:.4g}" if self.losses else ""
        return f"<{type(self).__name__}: {len(self.losses)} losses{losses}; {len(self.weights)} weights>"


def train_alone(
    model_fn: Callable[[], nn.Module],
    batches: Sequence[Batch],
    training: Training,
    reference: Callable[[nn.Module], nn.Module] | None = None,
) -> Trace:
    """Trains in this process with PyTorch only.

    Args:
        model_fn: builds the model, after seeding.
        batches: keyword arguments of the model's forward, one mapping per micro-batch.
        training: options of the training.
        reference: turns the built model into the one to train, for plugins that change the function of a model.

    Returns:
        the results.
    """
    torch.manual_seed(0)
    model = model_fn()
    model.train()
    if training.prepare_model:
        training.prepare_model(model)
    if reference:
        model = reference(model)
    optimizer = training.optimizer(model.parameters())
    losses, norms, gradients = [], [], {}
    for i, batch in enumerate(batches):
        loss = loss_of(model(**batch))
        (loss / training.accumulation).backward()
        losses.append(loss.item())
        if (i + 1) % training.accumulation == 0:
            if training.max_norm is not None:
                norms.append(float(nn.utils.clip_grad_norm_(model.parameters(), training.max_norm)))
            gradients = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
            optimizer.step()
            optimizer.zero_grad()
    return Trace(losses, norms, gradients, {k: v.clone() for k, v in model.state_dict().items()})


def train_on_rank(
    model_fn: Callable[[], nn.Module],
    batches: Sequence[Batch],
    config: Mapping[str, Any],
    training: Training,
    plugins: Sequence[Any] = (),
    *,
    gradients: bool = True,
) -> Trace | None:
    """Trains on this rank through ``NeuronAccelerator(config=config, plugins=plugins)``, from a prepared loader.

    Args:
        model_fn: builds the model, after seeding.
        batches: global micro-batches, as for :func:`train_alone`.
        config: configuration of the accelerator.
        training: options of the training.
        plugins: plugins of the accelerator.
        gradients: whether to gather the gradients of the last step.

    Returns:
        the results on rank 0, None on the others.
    """
    from neuron_accel import NeuronAccelerator
    from neuron_accel.backends.xla_channel import one_at_a_time

    accelerator = NeuronAccelerator(
        config={**config, "gradient_accumulation_steps": training.accumulation}, plugins=plugins
    )
    with one_at_a_time():
        torch.manual_seed(0)
        model = model_fn()
        model.train()
        if training.prepare_model:
            training.prepare_model(model)
        optimizer = training.optimizer(model.parameters())
    loader = loader_of(batches, accelerator.data_parallel_size)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    losses, norms, last = [], [], {}
    for index, batch in enumerate(loader):
        with accelerator.accumulate(model):
            loss = loss_of(model(**batch))
            accelerator.backward(loss)
            losses.append(
                accelerator.reduce(loss.detach(), "mean")
            )  # read at the end, so that a lazy device is not interrupted
            if accelerator.sync_gradients:
                if training.max_norm is not None:
                    norms.append(accelerator.clip_grad_norm_(model.parameters(), training.max_norm))
                if gradients and index >= len(batches) - training.accumulation:
                    last = accelerator.get_gradients(model)
            optimizer.step()
            optimizer.zero_grad()
    weights = accelerator.get_state_dict(model)
    if not accelerator.is_main_process:
        return None
    return Trace([float(x) for x in losses], [float(x) for x in norms], last, weights)


def loader_of(batches: Sequence[Batch], data_parallel_size: int) -> torch.utils.data.DataLoader:
    """Returns a loader that, when prepared, yields each data-parallel rank's shard of the global ``batches``.

    Raises:
        UsageError: if the batches have different sizes, or a size that is not a multiple of the number of ranks.
    """
    sizes = {len(value) for batch in batches for value in batch.values()}
    if len(sizes) != 1 or max(sizes) % data_parallel_size:
        raise UsageError(
            f"Batches of {', '.join(map(str, sorted(sizes)))} samples cannot be sharded over {data_parallel_size} "
            "ranks.",
            why="every rank receives the same number of samples of each batch",
            fix="pass batches of equal size, a multiple of the number of data-parallel ranks",
        )
    rows = [{name: value[i] for name, value in batch.items()} for batch in batches for i in range(max(sizes))]
    return torch.utils.data.DataLoader(rows, batch_size=max(sizes) // data_parallel_size)  # type: ignore[arg-type]


def loss_of(output: Any) -> torch.Tensor:
    """The loss in the output of a model: a tensor, or ``loss`` of a mapping or object."""
    if isinstance(output, torch.Tensor):
        return output
    return output["loss"] if isinstance(output, Mapping) else output.loss


@dataclass(frozen=True, kw_only=True)
class Tolerance:
    """Tolerances of a comparison with the reference.

    Args:
        loss: relative error of each loss.
        norm: relative error of each gradient norm.
        gradient, weight: largest absolute error in a tensor, relative to its largest absolute entry.
    """

    loss: float = 1e-5
    norm: float = 1e-5
    gradient: float = 1e-4
    weight: float = 1e-4


def compare(reference: Trace, trace: Trace, tolerance: Tolerance | None = None) -> None:
    """Compares the results of a training with the reference.

    Args:
        reference: the expected results.
        trace: the results.
        tolerance: tolerances; by default those of fp32 rounding.

    Raises:
        AssertionError: with all differences that exceed the tolerance.
    """
    tolerance = tolerance or Tolerance()
    wrong = []
    for name, limit in (("losses", tolerance.loss), ("norms", tolerance.norm)):
        expected, found = getattr(reference, name), getattr(trace, name)
        if len(expected) != len(found):
            wrong.append(f"{len(found)} {name} instead of {len(expected)}")
        for step, (a, b) in enumerate(zip(expected, found, strict=False)):
            if not abs(a - b) <= limit * abs(a):
                wrong.append(f"{name}[{step}] is {b!r} instead of {a!r}")
    for name, limit in (("gradients", tolerance.gradient), ("weights", tolerance.weight)):
        wrong += _compare_tensors(name, getattr(reference, name), getattr(trace, name), limit)
    if wrong:
        raise AssertionError("differs from training in one process:\n  " + "\n  ".join(wrong))
    _logger.debug("like one process", extra={"equal": True})


def _compare_tensors(
    what: str, expected: Mapping[str, torch.Tensor], found: Mapping[str, torch.Tensor], limit: float
) -> list[str]:
    wrong = [f"{what}: only the reference has {n}" for n in expected if n not in found]
    wrong += [f"{what}: the reference has no {n}" for n in found if n not in expected]
    for name in expected.keys() & found.keys():
        a, b = expected[name], found[name]
        if a.shape != b.shape or a.dtype != b.dtype:
            wrong.append(f"{what}[{name}] is {tuple(b.shape)} {b.dtype} instead of {tuple(a.shape)} {a.dtype}")
        elif a.numel():
            error = (a - b).abs().max().item() if a.is_floating_point() else float(not torch.equal(a, b))
            scale = max(a.abs().max().item(), 1e-8)
            if not error <= limit * scale:
                wrong.append(f"{what}[{name}] is off by {error:.3g}, {error / scale:.3g} of its largest entry")
    return wrong
