"""What a run report takes: processor time of a step with it, less that without it.

    OMP_NUM_THREADS=1 python -m benchmarks.run_report [--repeat 40]

One CPU rank trains a small model, and each step opens a number of ranges, which are those of collectives, with their
bytes, or of hooks. Runs with and without a report take turns. A figure is the least of all steps, since other programs
only add to it. Columns: kind of range, microseconds of a step without such ranges and of each of them, and the number
of ranges up to which a step of 20 ms takes less than 1 % longer.
"""

from __future__ import annotations

import gc
import tempfile
import time
from collections.abc import Callable

import torch

from benchmarks.harness import in_table, parser
from neuron_accel import NeuronAccelerator, RunReportPlugin
from neuron_accel.contract import Group

COUNTS = (0, 200)
ALLOWED = 0.01 * 20e3  # microseconds


def stepper(folder: str | None) -> Callable[[str, int], float]:
    """A function that trains for a step with so many ranges of a kind, and returns its seconds."""
    plugins = [] if folder is None else [RunReportPlugin(folder=folder, show="nothing")]
    accelerator = NeuronAccelerator(cpu=True, plugins=plugins)
    model = torch.nn.Linear(4, 4)
    model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters()))
    events, batch = accelerator.run.events, torch.ones(2, 4)
    group = Group(ranks=(0, 1), index=0, partition=((0, 1),), name="dp")

    def step(kind: str, count: int) -> float:
        began = time.thread_time()
        accelerator.backward(model(batch).sum())
        for _ in range(count):
            if kind == "collective":
                with events.collective("all_gather", group, 64, torch.float32):  # as of two ranks
                    pass
            else:
                with events.open("zero1.backward_pass", "hook"):
                    pass
        optimizer.step()
        optimizer.zero_grad()
        return time.thread_time() - began

    return step


def main() -> None:
    options_parser = parser(__doc__)
    options_parser.set_defaults(repeat=40)
    options = options_parser.parse_args()
    torch.set_num_threads(1)
    steps = 2 if options.small else 20
    rows = [["ranges", "step, us", "range, us", "ranges in 1 % of 20 ms"]]
    with tempfile.TemporaryDirectory() as folder:
        with_report, without = stepper(folder), stepper(None)
        gc.disable()
        for kind in ("collective", "hook"):
            least = {(count, step): float("inf") for count in COUNTS for step in (with_report, without)}
            for _ in range(2 if options.small else options.repeat):
                for count, step in least:
                    least[count, step] = min(least[count, step], *(step(kind, count) for _ in range(steps)))
                gc.collect()
            none, many = ((least[count, with_report] - least[count, without]) * 1e6 for count in COUNTS)
            each = (many - none) / COUNTS[1]
            rows.append([kind, f"{none:.0f}", f"{each:.2f}", f"{max(0.0, (ALLOWED - none) / each):.0f}"])
    print(in_table(rows))


if __name__ == "__main__":
    main()
