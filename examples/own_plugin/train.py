"""Small plugins, each a file, in a loop of your own: a small network learns to tell two spirals apart.

neuron-accel launch --nproc-per-node 2 train.py --plugin weight_average
neuron-accel launch --nproc-per-node 4 train.py --plugin gradient_noise --zero1
"""

from __future__ import annotations

import argparse
import sys
from typing import Any

from neuron_accel import NeuronAccelerator, NeuronAccelError, Zero1Plugin  # isort: skip  # first: it chooses the device
import torch
from bf16_gradients import BF16Gradients
from block_rates import BlockRates
from freezing import FreezingSchedule
from gradient_noise import GradientNoise
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset
from weight_average import WeightAverage


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


PLUGINS = {
    "weight_average": WeightAverage(decay=0.98),
    "gradient_noise": GradientNoise(micro_batch_size=16),
    "block_rates": BlockRates(decay=0.7),
    "bf16_gradients": BF16Gradients(keep=("*.bias",)),
    "freezing": FreezingSchedule(until={"0.*": 10}, after={"0.*": 200}),
}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--plugin", choices=PLUGINS, default="weight_average", help="(default: %(default)s)")
    parser.add_argument("--zero1", action="store_true", help="shard the optimizer's state as well")
    parser.add_argument("--epochs", type=int, default=6, help="passes over the data (default: %(default)s)")
    options = parser.parse_args()

    plugin = PLUGINS[options.plugin]
    accelerator = NeuronAccelerator(plugins=[plugin, Zero1Plugin()] if options.zero1 else [plugin])
    accelerator.print(accelerator.plan.explain())
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(2, 48), nn.Tanh(), nn.Linear(48, 48), nn.Tanh(), nn.Linear(48, 2))
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-2)
    loader, test = DataLoader(spirals(2048, seed=1), 16, shuffle=True), DataLoader(spirals(500, seed=2), 16)
    model, optimizer, loader, test = accelerator.prepare(model, optimizer, loader, test)
    for epoch in range(options.epochs):
        for points, arm in loader:
            accelerator.backward(F.cross_entropy(model(points), arm))
            optimizer.step()
            optimizer.zero_grad()
        line = f"epoch {epoch + 1}: {accuracy(accelerator, model, test):.1%} right"
        if isinstance(plugin, WeightAverage):
            with plugin.averaged(accelerator.run):
                line += f", {accuracy(accelerator, model, test):.1%} with the average of the weights"
        if isinstance(plugin, GradientNoise):
            line += f", noise scale {plugin.noise_scale(accelerator.run):.0f} samples"
        accelerator.print(line)
    accelerator.end_training()
    return 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except NeuronAccelError as error:
        sys.exit(f"train.py: {error}")
