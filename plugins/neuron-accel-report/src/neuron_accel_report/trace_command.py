# SPDX-License-Identifier: Apache-2.0
"""``neuron-accel trace``: makes a trace of a reported run, for Perfetto or Chrome."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

from neuron_accel.commands import show
from neuron_accel.errors import ConfigurationError
from neuron_accel_report.files import write_whole

DESCRIPTION = """\
Make a trace of steps of a run that the plugin run_report has reported: what every rank did when, with its collectives,
the hooks of plugins and the actions of a pipeline, on one clock. Open it at https://ui.perfetto.dev or chrome://tracing;
both read the file in the browser and send it nowhere.

The plugin writes the ranges of the steps in its option trace_steps; of other steps the trace has only the beginning,
the end and the parts. Needs no torch.
"""
EXAMPLES = """\
examples:
  neuron-accel trace run_report                        the steps that were traced
  neuron-accel trace run_report --steps 3:5            steps 3 and 4
  neuron-accel trace run_report --steps 7 -o 7.json    step 7, into another file
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run_dir", type=Path, metavar="RUN", help="folder of the report")
    parser.add_argument(
        "--steps", metavar="FROM:TO", help="steps from FROM up to, but not including TO; or one number (default: all)"
    )
    parser.add_argument(
        "-o",
        "--output",
        type=Path,
        default=Path("trace.json"),
        metavar="FILE",
        help="file to write (default: trace.json)",
    )


def run(args: argparse.Namespace) -> int:
    from neuron_accel_report.records import read_run
    from neuron_accel_report.trace import trace, traced_steps

    report = read_run(args.run_dir)
    steps = None if args.steps is None else numbers(args.steps, max(report.by_step, default=0) + 1)
    found = trace(report, steps)
    write_whole(args.output, json.dumps(found, separators=(",", ":"), allow_nan=False))
    spans = [event for event in found["traceEvents"] if event["ph"] == "X"]
    ranks = len({event["pid"] for event in spans})
    show(f"{args.output}: {len(spans)} ranges of {ranks} ranks; open it at https://ui.perfetto.dev")
    traced = traced_steps(report)
    if not traced or (steps is not None and not traced & set(steps)):
        show(
            "note: these steps were not traced, so the trace has no ranges inside of them; give their numbers to the "
            "option trace_steps of the plugin run_report",
            sys.stderr,
        )
    return 0


def numbers(text: str, end: int) -> range:
    """Returns the steps that ``--steps`` names.

    Args:
        text: such as ``"3:5"``, ``"3:"``, ``":5"`` or ``"3"``.
        end: the number after the last step.

    Raises:
        ConfigurationError: if it is none of these.
    """
    first, colon, last = text.partition(":")
    try:
        start = int(first) if first or not colon else 0
        stop = start + 1 if not colon else int(last) if last else end
    except ValueError:
        start, stop = 0, -1
    if not 0 <= start < stop:
        raise ConfigurationError(
            f"--steps {text} names no steps.", where="--steps", fix="write one number, or FROM:TO such as 3:5"
        )
    return range(start, stop)
