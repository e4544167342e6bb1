# SPDX-License-Identifier: Apache-2.0
"""``neuron-accel calibrate``: measures this machine, for predictions of time."""

from __future__ import annotations

import argparse
import os
import time
from pathlib import Path
from typing import TYPE_CHECKING

from neuron_accel.commands import format_table, main, show, table_width
from neuron_accel.errors import ConfigurationError

if TYPE_CHECKING:
    from neuron_accel_plan.calibration import Machine

DESCRIPTION = """\
Measure the constants that the time of a step is predicted with, on ranks of this machine: products of matrices by size
and dtype, kernels that are bound by memory, the fixed cost of a kernel, how much slower kernels are in a training step
than alone, collectives by kind, size and number of ranks, and how much of a collective is hidden behind computation.
All ranks measure at the same time, as they train.

The constants are written to a YAML file, for `neuron-accel plan --calibration`. Measure with as many ranks as will
train on the machine, while nothing else runs on it. It takes about a minute.
"""
EXAMPLES = """\
examples:
  neuron-accel calibrate                                        two ranks, on accelerators if there are any
  neuron-accel calibrate --nproc-per-node 4 --cpu --output machine.yaml
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--nproc-per-node", "--nproc_per_node", type=int, default=2, metavar="N", help="ranks (default: 2)"
    )
    parser.add_argument("--cpu", action="store_true", help="use the CPU even if there are accelerators")
    parser.add_argument(
        "-o",
        "--output",
        type=Path,
        default=Path("machine.yaml"),
        metavar="FILE",
        help="file to write (default: machine.yaml)",
    )
    parser.add_argument("--quick", action="store_true", help="two sizes of everything, in a few seconds: less exact")


def run(args: argparse.Namespace) -> int:
    from neuron_accel_plan.calibration import load_calibration

    _check_writable(args.output)
    start = time.monotonic()
    words = ["launch", "--quiet", "--nproc-per-node", str(args.nproc_per_node), *(["--cpu"] if args.cpu else [])]
    words += ["--module", "neuron_accel_plan.measure", str(args.output.absolute()), *(["quick"] if args.quick else [])]
    code = main(words)
    if code != 0:
        return code
    show(describe(load_calibration(args.output), table_width()))
    show(f"written to {args.output} in {time.monotonic() - start:.0f} s")
    return 0


def describe(machine: Machine, width: int | None = None) -> str:
    """Returns the measured constants as text, wrapped to ``width`` columns."""
    rows = []
    for kind, by_dtype in machine.kernels.items():
        for dtype, constant in by_dtype.items():
            unit = "operations" if "product" in kind else "bytes"
            rates = [rate / 1e9 for _, rate in constant.points]
            rows.append([kind, dtype, f"{min(rates):.2f} to {max(rates):.2f} G {unit}/s"])
    for op, by_ranks in machine.collectives.items():
        for ranks, constant in by_ranks.items():
            (_, least), (size, most) = constant.points[0], constant.points[-1]
            rows.append([op, f"{ranks} ranks", f"{least * 1e6:.0f} us, and {size / most / 1e9:.2f} GB/s"])
    for phase, constant in machine.fixed.items():
        rows.append(["fixed cost of a kernel", phase or "otherwise", f"{constant.at() * 1e6:.1f} us"])
    for phase, constant in machine.in_training.items():
        rows.append(["kernels in a training step", phase, f"{constant.at():.2f} times the time alone"])
    rows.append(["overlap", "", f"{machine.overlap.at():.0%}"])
    return f"{machine.name}\n{format_table(['constant', 'of', 'measured'], rows, width)}"


def _check_writable(path: Path) -> None:
    """Raises ConfigurationError before anything is measured if the file cannot be written."""
    where = path if path.exists() else path.absolute().parent
    if path.is_dir() or not where.exists() or not os.access(where, os.W_OK):
        raise ConfigurationError(
            f"{path} cannot be written.",
            where="--output",
            why="it is a folder" if path.is_dir() else f"{where} does not exist or is not writable",
            fix="pass a file in an existing folder that can be written",
        )
