"""Trains a multilayer perceptron to read the digits of a seven-segment display.

python train.py                                          one worker
neuron-accel launch --nproc-per-node 4 train.py          the same on four, each with a quarter of every batch
"""

from __future__ import annotations

import argparse
import sys

from neuron_accel import NeuronAccelerator, NeuronAccelError  # isort: skip  # first: it chooses the device
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

SEGMENTS = (
    "1110111",
    "0010010",
    "1011101",
    "1011011",
    "0111010",
    "1101011",
    "1101111",
    "1010010",
    "1111111",
    "1111011",
)
"""The segments that are lit for each digit."""


def displays(count: int, seed: int, noise: float = 0.5) -> TensorDataset:
    """Noisy displays, float32 ``[count, 28]`` (four sensors for each segment), and their digits, int64 ``[count]``."""
    generator = torch.Generator().manual_seed(seed)
    digits = torch.randint(0, 10, (count,), generator=generator)
    lit = torch.tensor([[float(bit) for bit in segments] for segments in SEGMENTS])
    sensors = lit[digits].repeat_interleave(4, dim=1)
    return TensorDataset(sensors + noise * torch.randn(sensors.shape, generator=generator), digits)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--epochs", type=int, default=4, help="passes over the data (default: 4)")
    parser.add_argument("--batch_size", type=int, default=64, help="samples of all workers in a step (default: 64)")
    parser.add_argument("--samples", type=int, default=4096, help="displays to learn from (default: 4096)")
    options = parser.parse_args()

    accelerator = NeuronAccelerator()
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(28, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    share = options.batch_size // accelerator.num_processes
    order = torch.Generator().manual_seed(0)  # the order of samples does not depend on the number of ranks
    loader = DataLoader(displays(options.samples, seed=1), batch_size=share, shuffle=True, generator=order)
    test = DataLoader(displays(1000, seed=2), batch_size=share)
    model, optimizer, loader, test = accelerator.prepare(model, optimizer, loader, test)

    for epoch in range(options.epochs):
        losses = []
        for inputs, digits in loader:
            optimizer.zero_grad()
            loss = F.cross_entropy(model(inputs), digits)
            accelerator.backward(loss)
            optimizer.step()
            losses.append(loss.detach())
        right = []
        with torch.no_grad():
            for inputs, digits in test:
                right.append(accelerator.gather_for_metrics(model(inputs).argmax(-1) == digits))
        accuracy = torch.cat(right).float().mean().item()
        mean = accelerator.reduce(torch.stack(losses).mean(), "mean").item()  # over the epoch and all ranks
        accelerator.print(f"epoch {epoch + 1}: loss {mean:.3f}, {accuracy:.1%} of {len(torch.cat(right))} read")
    accelerator.end_training()
    return 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except NeuronAccelError as error:
        sys.exit(f"train.py: {error}")
