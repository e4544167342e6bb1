"""``neuron-accel schedule``: what a pipeline schedule looks like, before anything is trained with it."""

from __future__ import annotations

import argparse
from pathlib import Path

from neuron_accel.cli.schedule_chart import make_timeline, summary, svg, text
from neuron_accel.strategies.pipeline.schedules import SCHEDULES, Kind, make_schedule

SUMMARY = "draw a pipeline schedule"
DESCRIPTION = """\
Draw a pipeline schedule as a Gantt chart, with the share of time that is lost to the bubble and the number of
micro-batches whose activations a rank keeps. Transfers take no time in the picture.
"""
EXAMPLES = """\
examples:
  neuron-accel schedule --stages 4 --microbatches 8 --schedule 1f1b
  neuron-accel schedule --stages 4 --microbatches 8 --schedule interleaved --virtual-stages 2
  neuron-accel schedule --stages 4 --microbatches 8 --schedule zero-bubble --svg schedule.svg
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--stages", type=int, default=4, help="ranks along the pipeline (default: 4)")
    parser.add_argument("--microbatches", type=int, default=8, help="parts of a batch (default: 8)")
    parser.add_argument("--schedule", default="1f1b", help=f"{', '.join(SCHEDULES)} (default: 1f1b)")
    parser.add_argument("--virtual-stages", type=int, default=1, help="stages on each rank (default: 1)")
    parser.add_argument(
        "--backward-cost", type=float, default=2.0, help="duration of a backward pass in forward passes (default: 2)"
    )
    parser.add_argument("--svg", type=Path, help="write an SVG picture to this file, too")


def run(args: argparse.Namespace) -> int:
    schedule = make_schedule(
        args.schedule, stages=args.stages, microbatches=args.microbatches, virtual_stages=args.virtual_stages
    )
    half = args.backward_cost / 2
    costs = {Kind.BACKWARD: args.backward_cost, Kind.BACKWARD_INPUT: half, Kind.BACKWARD_WEIGHT: half}
    timeline = make_timeline(schedule, costs)
    print(summary(timeline))
    print(text(timeline))
    if args.svg:
        args.svg.write_text(svg(timeline), encoding="utf-8")
        print(f"written to {args.svg}")
    return 0
