"""The optimizer's step on a CPU: torch's AdamW as it is against ``fused=True``.

    OMP_NUM_THREADS=1 python -m benchmarks.optimizer_step [--repeat 40]

On one thread, by the model whose parameters are stepped. Columns: number of parameters, and time of a plain step by
that of a fused one (median and quartiles over repetitions, in which both take turns). Time is that of the processor, so
that other programs disturb it less.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

import torch
from torch import nn

from benchmarks.harness import in_table, parser, quartiles

CASES = {
    "many small: 300 blocks of 4096 + 3 x 64": [4096, 64, 64, 64] * 300,
    "blocks of 1024 x 1024 + 2 x 1024": [1 << 20, 1024, 1024] * 8,
    "one of 17 million": [17 << 20],
}


def build(sizes: Sequence[int], fused: bool) -> torch.optim.Optimizer:
    """The optimizer of parameters that are views of one tensor, as under ZeRO-1."""
    generator = torch.Generator().manual_seed(0)
    weights, gradients = (torch.randn(sum(sizes), generator=generator) for _ in range(2))
    parameters = [nn.Parameter(part) for part in weights.split(list(sizes))]
    for parameter, gradient in zip(parameters, gradients.split(list(sizes)), strict=True):
        parameter.grad = gradient
    return torch.optim.AdamW(parameters, fused=fused)


def compare(sizes: Sequence[int], repeat: int) -> list[float]:
    """Ratios of times."""
    steps, ratios = [build(sizes, fused).step for fused in (False, True)], []
    for number in range(repeat + 2):
        times = []
        for step in steps:
            begin = time.thread_time()
            step()
            times.append(time.thread_time() - begin)
        if number >= 2:
            ratios.append(times[0] / times[1])
    return ratios


def main() -> None:
    options_parser = parser(__doc__)
    options_parser.set_defaults(repeat=40)
    options = options_parser.parse_args()
    torch.set_num_threads(1)
    rows = [["parameters", "number", "plain / fused"]]
    for name, sizes in CASES.items():
        sizes = [max(1, size // 64) for size in sizes] if options.small else sizes
        rows.append([name, str(len(sizes)), quartiles(compare(sizes, options.repeat))])
    print(in_table(rows))


if __name__ == "__main__":
    main()
