"""DiLoCo in one process, without this library, and a small model: what ranks are compared with."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from neuron_accel_local_sgd import LocalSGDPlugin
from torch import nn

from neuron_accel.testing import Trace, Training

Batch = Mapping[str, torch.Tensor]
NESTEROV = {"lr": 0.7, "momentum": 0.9, "nesterov": True}


class Small(nn.Module):
    """Two linear layers with a bias, and a squared error as loss."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 15), nn.Linear(15, 3)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return (self.down(self.up(x).relu()) - y).square().mean()


def samples(count: int) -> list[Batch]:
    """Batches of eight samples of :class:`Small`."""
    generator = torch.Generator().manual_seed(3)
    return [
        {"x": torch.randn(8, 8, generator=generator), "y": torch.randn(8, 3, generator=generator)} for _ in range(count)
    ]


def sgd(parameters: Any) -> torch.optim.SGD:
    return torch.optim.SGD(parameters, lr=0.1)


def train_islands(
    model_fn: Callable[[], nn.Module],
    batches: Sequence[Batch],
    training: Training,
    *,
    plugin: LocalSGDPlugin,
    reference: Callable[[nn.Module], nn.Module],
    data_parallel_size: int,
) -> Trace:
    """Trains one model for each island on its rows of each batch; fragments, delays and warm-up included. Losses are
    means over islands; norms, gradients and weights those of the first island."""
    torch.manual_seed(0)
    first = model_fn().train()
    if training.prepare_model:
        training.prepare_model(first)
    models = [reference(first)]
    models += [copy.deepcopy(models[0]) for _ in range(plugin.islands - 1)]
    optimizers = [training.optimizer(model.parameters()) for model in models]
    weights = [[p for p in model.parameters() if p.requires_grad] for model in models]
    anchors = [p.detach().clone() for p in weights[0]]
    outer = getattr(torch.optim, plugin.outer_optimizer)(anchors, **(plugin.outer_options or {"lr": 1.0}))
    fragments = _fragments([p.numel() for p in weights[0]], plugin.fragments)
    losses, norms, gradients, arriving, steps = [], [], {}, [], 0
    for index, batch in enumerate(batches):
        rows = [{name: value.chunk(plugin.islands)[i] for name, value in batch.items()} for i in range(plugin.islands)]
        found = [_loss(model(**mine)) for model, mine in zip(models, rows, strict=True)]
        losses.append(torch.stack(found).mean().item())
        for loss in found:
            (loss / training.accumulation).backward()
        if (index + 1) % training.accumulation:
            continue
        for island, (model, optimizer) in enumerate(zip(models, optimizers, strict=True)):
            if training.max_norm is not None:
                norm = nn.utils.clip_grad_norm_(model.parameters(), training.max_norm)
                norms += [float(norm)] if island == 0 else []
            if island == 0:
                gradients = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
            optimizer.step()
            optimizer.zero_grad()
        steps += 1
        with torch.no_grad():
            if steps <= plugin.warmup_steps:
                for at, anchor in enumerate(anchors):
                    anchor.copy_(torch.stack([mine[at] for mine in weights]).mean(0))
                    for mine in weights:
                        mine[at].copy_(anchor)
                continue
            since = steps - plugin.warmup_steps
            for number, members in enumerate(fragments):
                if (since - number * plugin.inner_steps // plugin.fragments) % plugin.inner_steps == 0:
                    mean = {at: anchors[at] - torch.stack([mine[at] for mine in weights]).mean(0) for at in members}
                    arriving.append((steps + plugin.delay, mean))
            for arrival, mean in list(arriving):
                if arrival == steps:
                    arriving.remove((arrival, mean))
                    _outer_step(outer, anchors, mean, weights, plugin.local_weight)
    return Trace(losses, norms, gradients, {n: v.detach().clone() for n, v in models[0].state_dict().items()})


def _loss(output: Any) -> torch.Tensor:
    return output if isinstance(output, torch.Tensor) else output.loss


def _outer_step(outer, anchors, mean, weights, local_weight) -> None:
    for at, anchor in enumerate(anchors):
        anchor.grad = mean.get(at)
    outer.step()
    for at in mean:
        for mine in weights:
            mine[at].mul_(local_weight).add_(anchors[at], alpha=1 - local_weight)


def _fragments(sizes: list[int], count: int) -> list[list[int]]:
    """Parameters by fragment: each belongs where its middle element is."""
    result: list[list[int]] = [[] for _ in range(count)]
    for at, size in enumerate(sizes):
        result[int((sum(sizes[:at]) + size / 2) * count / sum(sizes))].append(at)
    return result
