"""The overhead of a prepared loop without plugins, compared with plain torch and stock Accelerate.

Usage: ``python -m benchmarks.loop_overhead [--rounds N] [--steps N] [--sizes tiny,medium] [--libraries gloo host]
[--cuda]``. Starts two ranks with one thread each, on each of ``--libraries``, which connects the ranks of all three
loops; plain torch is DDP with gradients in its buckets and a static graph. With ``--cuda``: one process on a GPU,
without DDP, with clipping, and models of transformers in bfloat16. The loops take turns within one run, in an order
that changes from round to round, so that what else the machine does hits them alike; reported is the median over rounds
of the ratio of their times, with quartiles.
"""

from __future__ import annotations

import argparse
import os
import random
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from benchmarks.harness import libraries, ranks_on

SIZES = {"tiny": (64, 2, 8), "small": (512, 6, 16), "medium": (1024, 10, 16)}
"""Width, number of layers, batch size."""
ON_GPU = {"gpt2": (1, 64), "qwen3-0.6b": (2, 1024)}
"""Samples and tokens of a sample: of the first, most of the time is the host's."""


def make_model(width: int, layers: int) -> nn.Module:
    blocks = [nn.Sequential(nn.Linear(width, width), nn.LayerNorm(width), nn.GELU()) for _ in range(layers)]
    return nn.Sequential(*blocks, nn.Linear(width, width))


def make_transformer(name: str) -> nn.Module:
    from neuron_accel_plan.models import known_models
    from transformers import AutoConfig, AutoModelForCausalLM, GPT2Config

    config = GPT2Config() if name == "gpt2" else AutoConfig.for_model(**known_models()[name])
    config.use_cache = False
    with torch.device("cuda"):
        return AutoModelForCausalLM.from_config(config).to(torch.bfloat16)


def bare(model: nn.Module, max_norm: float | None):
    """A step of a loop that uses torch only."""
    if torch.distributed.is_initialized():
        model = nn.parallel.DistributedDataParallel(model, gradient_as_bucket_view=True, static_graph=True)
    optimizer = torch.optim.AdamW(model.parameters())

    def step(loss: Callable[[nn.Module], torch.Tensor]) -> None:
        loss(model).backward()
        if max_norm is not None:
            nn.utils.clip_grad_norm_(model.parameters(), max_norm)
        optimizer.step()
        optimizer.zero_grad()

    return step


def prepared(accelerator: Any, model: nn.Module, max_norm: float | None):
    """A step of a loop with an accelerator."""
    model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters()))

    def step(loss: Callable[[nn.Module], torch.Tensor]) -> None:
        accelerator.backward(loss(model))
        if max_norm is not None:
            accelerator.clip_grad_norm_(model.parameters(), max_norm)
        optimizer.step()
        optimizer.zero_grad()

    return step


def measure(size: str, rounds: int, steps: int, cuda: bool) -> dict[str, list[float]]:
    """Seconds per step of each loop in each round, on this rank."""
    from neuron_accel import NeuronAccelerator  # chooses the device before Accelerate is imported

    from accelerate import Accelerator  # isort: skip

    torch.manual_seed(0)
    if cuda:
        rows, tokens = ON_GPU[size]
        build, wait = lambda: make_transformer(size), torch.cuda.synchronize
        ids = torch.randint(0, 50000, (rows, tokens), device="cuda")
        loss = lambda model: model(input_ids=ids, labels=ids).loss  # noqa: E731
    else:
        width, layers, batch_size = SIZES[size]
        build, wait = lambda: make_model(width, layers), torch.distributed.barrier
        batch = torch.randn(batch_size, width)
        loss = lambda model: model(batch).square().mean()  # noqa: E731
    max_norm = 1.0 if cuda else None
    loops = {
        "neuron_accel": prepared(NeuronAccelerator(cpu=not cuda), build(), max_norm),
        "torch": bare(build(), max_norm),
        "Accelerate": prepared(Accelerator(cpu=not cuda), build(), max_norm),
    }
    order = random.Random(0)
    for step in loops.values():
        for _ in range(3):
            step(loss)
    seconds: dict[str, list[float]] = {name: [] for name in loops}
    for _ in range(rounds):
        names = list(loops)
        order.shuffle(names)
        for name in names:
            wait()
            begin = time.perf_counter()
            for _ in range(steps):
                loops[name](loss)
            if cuda:
                wait()
            seconds[name].append((time.perf_counter() - begin) / steps)
    return seconds


def report(size: str, parameters: int, seconds: dict[str, list[float]]) -> None:
    print(f"\n{size}: {parameters / 1e6:.1f} M parameters")
    ours = seconds["neuron_accel"]
    for name, times in seconds.items():
        line = f"  {name:13} {statistics.median(times) * 1e3:8.2f} ms a step"
        if times is not ours:
            ratios = [theirs / mine for theirs, mine in zip(times, ours, strict=True)]
            low, middle, high = statistics.quantiles(ratios, n=4)
            line += f"   neuron_accel is {middle:.3f} x as fast (quartiles {low:.3f} to {high:.3f})"
        print(line, flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--sizes", help=f"default: {','.join(SIZES)}; with --cuda {','.join(ON_GPU)}")
    parser.add_argument("--libraries", nargs="+", default=libraries(), help="what connects the ranks of all loops")
    parser.add_argument("--cuda", action="store_true", help="one process on a GPU")
    options = parser.parse_args()
    place = torch.cuda.get_device_name() if options.cuda else f"{os.cpu_count()} cores, 2 ranks"
    print(f"torch {torch.__version__}, Python {sys.version.split()[0]}, {place}")
    for size in (options.sizes or ",".join(ON_GPU if options.cuda else SIZES)).split(","):
        given = (size, options.rounds, options.steps, options.cuda)
        if options.cuda:
            parameters = sum(p.numel() for p in make_transformer(size).parameters())
            report(size, parameters, measure(*given))
            torch.cuda.empty_cache()
        else:
            parameters = sum(p.numel() for p in make_model(*SIZES[size][:2]).parameters())
            for library in options.libraries:
                report(f"{size}, {library}", parameters, ranks_on(library, measure, 2, *given, timeout=600)[0])


if __name__ == "__main__":
    main()
