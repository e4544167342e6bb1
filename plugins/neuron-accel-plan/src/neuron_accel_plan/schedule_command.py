# SPDX-License-Identifier: Apache-2.0
"""``neuron-accel schedule``: draws a pipeline schedule."""

from __future__ import annotations

import argparse
import math
import textwrap
from pathlib import Path

from neuron_accel import PipelineParallelPlugin
from neuron_accel.commands import naming_options, show, terminal_width
from neuron_accel.errors import ConfigurationError
from neuron_accel_plan.schedule_chart import summary, svg, text
from neuron_accel_plan.timeline import Kind, Timeline, make_timeline, schedule_of

DESCRIPTION = """\
Draw a pipeline schedule as a Gantt chart, with its bubble (the fraction of time in which a rank is idle) and the number
of micro-batches whose activations a rank keeps. Transfers are drawn as taking no time.
"""
EXAMPLES = """\
examples:
  neuron-accel schedule --pipeline-parallel-size 4 --num-microbatches 8 --schedule 1f1b
  neuron-accel schedule --pipeline-parallel-size 4 --schedule interleaved --virtual-stages 2
  neuron-accel schedule --pipeline-parallel-size 4 --schedule zero-bubble --svg schedule.svg
"""


MAX_COMPUTATIONS = 200_000
_OPTIONS = {
    "num_microbatches": "--num-microbatches",
    "microbatches": "--num-microbatches",
    "virtual_stages": "--virtual-stages",
    "pipeline_parallel_size": "--pipeline-parallel-size",
    "schedule": "--schedule",
}
"""Arguments of functions in error messages, and the options that they correspond to."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--pipeline-parallel-size", type=int, default=4, metavar="N", help="ranks along the pipeline (default: 4)"
    )
    parser.add_argument(
        "--num-microbatches", type=int, default=8, metavar="N", help="number of micro-batches (default: 8)"
    )
    for former, name in (("--stages", "pipeline_parallel_size"), ("--microbatches", "num_microbatches")):
        parser.add_argument(former, dest=name, type=int, default=argparse.SUPPRESS, help=argparse.SUPPRESS)
    parser.add_argument(
        "--schedule",
        default="1f1b",
        metavar="NAME",
        help="1f1b, gpipe, interleaved or zero-bubble (default: 1f1b)",
    )
    parser.add_argument("--virtual-stages", type=int, default=1, metavar="N", help="stages on each rank (default: 1)")
    parser.add_argument(
        "--backward-cost",
        type=float,
        default=2.0,
        metavar="X",
        help="duration of a backward pass in forward passes (default: 2)",
    )
    parser.add_argument("--svg", type=Path, metavar="FILE", help="also write the chart as SVG to this file")


def run(args: argparse.Namespace) -> int:
    timeline = _timeline(args)
    if args.svg:
        _write(args.svg, svg(timeline))
    print(textwrap.fill(summary(timeline), terminal_width()))
    print(text(timeline, terminal_width()))
    if args.svg:
        show(f"written to {args.svg}")
    return 0


def _timeline(args: argparse.Namespace) -> Timeline:
    if not 0 < args.backward_cost < math.inf:
        raise ConfigurationError(
            f"A backward pass cannot take {args.backward_cost:g} forward passes.",
            where="--backward-cost",
            fix="pass a number above 0; 2 is usual",
        )
    stages, microbatches = args.pipeline_parallel_size, args.num_microbatches
    if stages < 2:
        raise ConfigurationError(
            f"--pipeline-parallel-size is {stages}; a pipeline has at least 2 ranks.", fix="pass at least 2"
        )
    computations = stages * max(1, microbatches) * max(1, args.virtual_stages)
    if computations > MAX_COMPUTATIONS:
        raise ConfigurationError(
            f"{computations} forward passes are too many to draw.",
            where="--pipeline-parallel-size, --num-microbatches, --virtual-stages",
            fix=f"pass numbers whose product is at most {MAX_COMPUTATIONS}",
        )
    with naming_options(_OPTIONS):
        plugin = PipelineParallelPlugin(
            pipeline_parallel_size=stages,
            num_microbatches=microbatches,
            schedule=args.schedule,
            virtual_stages=args.virtual_stages,
        )
        schedule = schedule_of(plugin)
    half = args.backward_cost / 2
    return make_timeline(
        schedule, {Kind.BACKWARD: args.backward_cost, Kind.BACKWARD_INPUT: half, Kind.BACKWARD_WEIGHT: half}
    )


def _write(path: Path, picture: str) -> None:
    try:
        path.write_text(picture, encoding="utf-8")
    except OSError as error:
        raise ConfigurationError(
            f"{path} cannot be written: {error.strerror or error}.",
            where="--svg",
            fix="pass a file in an existing folder that can be written",
        ) from error
