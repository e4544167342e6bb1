"""A strategy plugin in the script that uses it: a moving average of the weights, which is evaluated.

It composes with every other strategy, because it only looks at what each rank has.

    neuron-accel launch --nproc-per-node 2 train.py
"""

from __future__ import annotations

import argparse
import sys
from dataclasses import dataclass
from typing import Any, ClassVar

from neuron_accel import NeuronAccelerator, NeuronAccelError, Zero1Plugin  # isort: skip  # first: it chooses the device
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from neuron_accel.contract import ConfigurationError, Phase, PluginSpec, Run, StrategyPlugin


@dataclass(frozen=True, kw_only=True)
class AveragePlugin(StrategyPlugin):
    """Keeps a moving average of the weights on this rank.

    Args:
        decay: how much of the average a step keeps; from 0 to less than 1.
    """

    decay: float = 0.98

    spec: ClassVar[PluginSpec] = PluginSpec(name="average", phase=Phase.OPTIMIZER, after=frozenset({"zero1"}))

    def __post_init__(self) -> None:
        if not 0 <= self.decay < 1:
            raise ConfigurationError(f"decay={self.decay} is not possible.", fix="choose one from 0 to less than 1")

    def after_step(self, optimizer: torch.optim.Optimizer, run: Run) -> None:
        averages = run.state(self)
        for prepared in run.models:
            for record in prepared.parameters:
                if record.current is None:  # on another rank
                    continue
                weight = record.current.detach()
                average = averages.setdefault(record.fqn, weight.clone())
                average.lerp_(weight, 1 - self.decay)

    def swap(self, run: Run) -> None:
        """Swaps weights and averages; calling it twice restores both."""
        for prepared in run.models:
            for record in prepared.parameters:
                if record.fqn in run.state(self) and record.current is not None:
                    average = run.state(self)[record.fqn]
                    weight = record.current.detach().clone()
                    record.current.data.copy_(average)
                    average.copy_(weight)

    def teardown(self, run: Run) -> None:
        run.state(self).clear()


def spirals(count: int, seed: int) -> TensorDataset:
    """Points of two spirals, float32 ``[count, 2]``, and the spiral of each point, int64 ``[count]``."""
    generator = torch.Generator().manual_seed(seed)
    arm = torch.randint(0, 2, (count,), generator=generator)
    turn = 3 * torch.rand(count, generator=generator) + 0.5
    angle = turn * 2 + arm * torch.pi
    points = torch.stack([turn * angle.cos(), turn * angle.sin()], dim=1)
    return TensorDataset(points + 0.4 * torch.randn(points.shape, generator=generator), arm)


def accuracy(accelerator: Any, model: nn.Module, loader: DataLoader) -> float:
    with torch.no_grad():
        right = [accelerator.gather_for_metrics(model(points).argmax(-1) == arm) for points, arm in loader]
    return torch.cat(right).float().mean().item()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--epochs", type=int, default=6, help="passes over the data (default: 6)")
    parser.add_argument("--decay", type=float, default=0.98, help="of the average (default: 0.98)")
    options = parser.parse_args()

    average = AveragePlugin(decay=options.decay)
    accelerator = NeuronAccelerator(plugins=[average, Zero1Plugin()])
    accelerator.print(accelerator.plan.explain())
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(2, 48), nn.Tanh(), nn.Linear(48, 48), nn.Tanh(), nn.Linear(48, 2))
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-2)
    share = 32 // accelerator.num_processes
    loader, test = DataLoader(spirals(2048, seed=1), share, shuffle=True), DataLoader(spirals(500, seed=2), share)
    model, optimizer, loader, test = accelerator.prepare(model, optimizer, loader, test)
    for epoch in range(options.epochs):
        for points, arm in loader:
            accelerator.backward(F.cross_entropy(model(points), arm))
            optimizer.step()
            optimizer.zero_grad()
        last = accuracy(accelerator, model, test)
        average.swap(accelerator.run)
        averaged = accuracy(accelerator, model, test)
        average.swap(accelerator.run)
        accelerator.print(
            f"epoch {epoch + 1}: {last:.1%} right with the last weights, {averaged:.1%} with their average"
        )
    accelerator.end_training()
    return 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except NeuronAccelError as error:
        sys.exit(f"train.py: {error}")
