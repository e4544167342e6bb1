"""The layout of ``plugins="auto"`` beside the ten layouts of ``benchmarks.plan``, measured on two ranks.

Usage: ``python -m benchmarks.auto [--calibration FILE] [--small]``. The machine is calibrated first (or a calibration
of it is given). The search chooses for the model and batch of ``benchmarks.plan``; its layout and the ten are measured
in the same gloo ranks, taking turns. Aim: no layout is faster than the choice by more than the choice's predicted
interval allows: its time divided by the fastest is at most the upper bound of the interval divided by the likely time.
"""

from __future__ import annotations

import functools
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

from neuron_accel_plan.auto_search import answer

from benchmarks import harness, plan
from neuron_accel.testing import run_ranks

CHOICE = "auto"


def search(small: bool, calibration: Path) -> dict[str, Any]:
    """What the search answers."""
    with tempfile.TemporaryDirectory() as folder:
        plan.model_config(small).save_pretrained(folder)
        return answer(
            {
                "model": folder,
                "ranks": plan.RANKS,
                "memory": 4 << 30,
                "global_batch": plan.GLOBAL_BATCH,
                "sequence": plan.sequence(small),
                "dtype": "float32",
                "attention": "eager",
                "calibration": str(calibration),
                "reserve": None,
                "within": None,
                "jobs": plan.RANKS,
            }
        )


def report(found: dict[str, Any], rounds: dict[str, list[float]]) -> list[str]:
    """The table, and whether the choice is as fast as its interval says. Ratios are of the same round."""
    ratios = {
        name: statistics.median(mine / other for mine, other in zip(rounds[CHOICE], seconds, strict=True))
        for name, seconds in rounds.items()
    }
    rows = [["layout", "ms", "time of auto by it"]]
    rows += [
        [name, f"{1e3 * statistics.median(rounds[name]):.1f}", f"{ratios[name]:.2f}"]
        for name in sorted(rounds, key=lambda name: statistics.median(rounds[name]))
    ]
    likely, low, high = found["seconds"]
    slowest = max(ratios.values())
    verdict = "within" if slowest <= high / likely else "NOT within"
    return [
        f"auto is {found['layout']}, predicted {1e3 * likely:.1f} ms ({1e3 * low:.0f} to {1e3 * high:.0f})",
        harness.in_table(rows),
        f"auto takes at most {slowest:.2f} times the time of another, {verdict} its interval ({high / likely:.2f})",
    ]


def main(arguments: list[str] | None = None) -> None:
    parser = harness.parser(__doc__)
    parser.set_defaults(ranks=[plan.RANKS])
    parser.add_argument("--calibration", type=Path, help="of this machine with two ranks (default: measured now)")
    options = parser.parse_args(arguments)
    begin = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        file = options.calibration or Path(folder, "machine.yaml")
        if options.calibration is None:
            plan.calibrate(file)
        found = search(options.small, file)
    measured = functools.partial(run_ranks, plan.measure, plan.RANKS, timeout=1800)
    rounds = measured({CHOICE: found["configuration"], **plan.configurations()}, options.small, options.repeat)[0]
    print("\n".join(report(found, rounds)))
    print(f"{time.monotonic() - begin:.0f} s")


if __name__ == "__main__":
    main()
