"""The optimizer's step on a CPU: on flat tensors and their slices, against one tensor for each parameter.

    OMP_NUM_THREADS=1 python -m benchmarks.optimizer_step [--repeat 40]

AdamW on one thread, by the model whose parameters it steps. Columns: number of parameters, time of a step for each
parameter by that on flat tensors (median and quartiles over repetitions, in which both take turns), and whether weights
are equal to the bit. Time is that of the processor, so that other programs disturb it less.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

import torch
from torch import nn

from benchmarks.harness import in_table, parser, quartiles
from neuron_accel.contract import FlatStep

CASES = {
    "many small: 300 blocks of 4096 + 3 x 64": [4096, 64, 64, 64] * 300,
    "blocks of 1024 x 1024 + 2 x 1024": [1 << 20, 1024, 1024] * 8,
    "one of 17 million": [17 << 20],
}


def build(sizes: Sequence[int]) -> tuple[torch.Tensor, torch.optim.Optimizer]:
    """The weights, and the optimizer of parameters that are views of them, as under ZeRO-1."""
    generator = torch.Generator().manual_seed(0)
    weights, gradients = (torch.randn(sum(sizes), generator=generator) for _ in range(2))
    parameters = [nn.Parameter(part) for part in weights.split(list(sizes))]
    for parameter, gradient in zip(parameters, gradients.split(list(sizes)), strict=True):
        parameter.grad = gradient
    return weights, torch.optim.AdamW(parameters)


def compare(sizes: Sequence[int], repeat: int) -> tuple[list[float], bool]:
    """Ratios of times, and whether the weights are equal."""
    (plain_weights, plain), (flat_weights, optimizer) = build(sizes), build(sizes)
    flat, ratios = FlatStep(optimizer), []
    for number in range(repeat + 2):
        times = []
        for step in (plain.step, flat):
            begin = time.thread_time()
            step()
            times.append(time.thread_time() - begin)
        if number >= 2:
            ratios.append(times[0] / times[1])
    return ratios, torch.equal(plain_weights, flat_weights)


def main() -> None:
    options_parser = parser(__doc__)
    options_parser.set_defaults(repeat=40)
    options = options_parser.parse_args()
    torch.set_num_threads(1)
    rows = [["parameters", "number", "by parameter / flat", "equal"]]
    for name, sizes in CASES.items():
        sizes = [max(1, size // 64) for size in sizes] if options.small else sizes
        ratios, same = compare(sizes, options.repeat)
        rows.append([name, str(len(sizes)), quartiles(ratios), str(same)])
    print(in_table(rows))


if __name__ == "__main__":
    main()
