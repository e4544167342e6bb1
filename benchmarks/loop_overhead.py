"""The overhead of a prepared loop without plugins, compared with DistributedDataParallel and stock Accelerate.

Usage: ``python benchmarks/loop_overhead.py [--rounds N] [--steps N] [--sizes tiny,medium]``. Starts two gloo ranks with
one thread each. DDP has gradients in its buckets and a static graph. The three loops take turns within one run, in an
order that changes from round to round, so that what else the machine does hits them alike; reported is the median over
rounds of the ratio of their times, with quartiles.
"""

from __future__ import annotations

import argparse
import os
import random
import statistics
import sys
import time

import torch
from torch import nn

from neuron_accel.testing import run_ranks

SIZES = {"tiny": (64, 2, 8), "small": (512, 6, 16), "medium": (1024, 10, 16)}
"""Width, number of layers, batch size."""


def make_model(width: int, layers: int) -> nn.Module:
    blocks = [nn.Sequential(nn.Linear(width, width), nn.LayerNorm(width), nn.GELU()) for _ in range(layers)]
    return nn.Sequential(*blocks, nn.Linear(width, width))


def bare(width: int, layers: int):
    """A step of a loop that uses torch only."""
    model = nn.parallel.DistributedDataParallel(
        make_model(width, layers), gradient_as_bucket_view=True, static_graph=True
    )
    optimizer = torch.optim.AdamW(model.parameters())

    def step(batch: torch.Tensor) -> None:
        model(batch).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def prepared(accelerator_class: type, width: int, layers: int):
    """A step of a loop with an accelerator."""
    accelerator = accelerator_class(cpu=True)
    model = make_model(width, layers)
    model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters()))

    def step(batch: torch.Tensor) -> None:
        accelerator.backward(model(batch).square().mean())
        optimizer.step()
        optimizer.zero_grad()

    return step


def measure(size: str, rounds: int, steps: int) -> dict[str, list[float]]:
    """Seconds per step of each loop in each round, on this rank."""
    from neuron_accel import NeuronAccelerator  # chooses the device before Accelerate is imported

    from accelerate import Accelerator  # isort: skip

    width, layers, batch_size = SIZES[size]
    torch.manual_seed(0)
    loops = {
        "neuron_accel": prepared(NeuronAccelerator, width, layers),
        "DDP": bare(width, layers),
        "Accelerate": prepared(Accelerator, width, layers),
    }
    batch, order = torch.randn(batch_size, width), random.Random(0)
    for step in loops.values():
        for _ in range(3):
            step(batch)
    seconds: dict[str, list[float]] = {name: [] for name in loops}
    for _ in range(rounds):
        names = list(loops)
        order.shuffle(names)
        for name in names:
            torch.distributed.barrier()
            begin = time.perf_counter()
            for _ in range(steps):
                loops[name](batch)
            seconds[name].append((time.perf_counter() - begin) / steps)
    return seconds


def report(size: str, seconds: dict[str, list[float]]) -> None:
    width, layers, _ = SIZES[size]
    parameters = sum(p.numel() for p in make_model(width, layers).parameters())
    print(f"\n{size}: {parameters / 1e6:.1f} M parameters")
    ours = seconds["neuron_accel"]
    for name, times in seconds.items():
        line = f"  {name:13} {statistics.median(times) * 1e3:8.2f} ms a step"
        if times is not ours:
            ratios = [theirs / mine for theirs, mine in zip(times, ours, strict=True)]
            low, middle, high = statistics.quantiles(ratios, n=4)
            line += f"   neuron_accel is {middle:.3f} x as fast (quartiles {low:.3f} to {high:.3f})"
        print(line)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--sizes", default="tiny,small,medium")
    options = parser.parse_args()
    print(f"torch {torch.__version__}, Python {sys.version.split()[0]}, {os.cpu_count()} cores, 2 gloo ranks")
    for size in options.sizes.split(","):
        seconds = run_ranks(measure, 2, size, options.rounds, options.steps, timeout=600)[0]
        report(size, seconds)


if __name__ == "__main__":
    main()
