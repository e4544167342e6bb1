# SPDX-License-Identifier: Apache-2.0
"""``neuron-accel report``: a page about one run, or several overlaid."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from neuron_accel.commands import fit, format_table, show, table_width
from neuron_accel.errors import ConfigurationError
from neuron_accel_report.files import write_whole

if TYPE_CHECKING:
    from neuron_accel_report.summary import RunSummary

DESCRIPTION = """\
Write a page about a run that trained with the plugin run_report, and print a summary: loss, throughput, parts of a
step, memory by part, predicted and measured traffic by axis, and a heat map of ranks and steps that names stragglers.
Of several runs, each is a line of the same charts.

The page is one file that needs no network. Runs of any length and number of ranks can be read, also while they continue
or after they were interrupted; long ones are thinned, without losing the lowest and highest values. Needs no torch.
"""
EXAMPLES = """\
examples:
  neuron-accel report run_report                            write report.html
  neuron-accel report runs/before runs/after -o both.html   compare two runs
  neuron-accel report run_report --text                     print only
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "runs", nargs="+", type=Path, metavar="RUN", help="folder that the plugin run_report has written"
    )
    parser.add_argument(
        "-o", "--output", type=Path, default=Path("report.html"), metavar="FILE", help="the page (default: report.html)"
    )
    parser.add_argument("--text", action="store_true", help="print the summary only, and write no page")
    parser.add_argument("-q", "--quiet", action="store_true", help="print nothing but errors")


def run(args: argparse.Namespace) -> int:
    from neuron_accel_report.page import page
    from neuron_accel_report.summary import several

    with _progress(hidden=args.quiet) as progress:
        runs = several(args.runs, progress=progress)
    if not args.quiet:
        # Names of hosts and plugins are those of a file: nothing in them may steer the terminal.
        text = "".join(char if char.isprintable() or char == "\n" else "?" for char in describe(runs))
        print(fit(text, sys.stdout), flush=True)
    if not args.text:
        _write(args.output, page(runs))
        if not args.quiet:
            show(f"\nwritten: {args.output}")
    return 0


def describe(runs: Sequence[RunSummary]) -> str:
    """Returns the contents of the page without its charts, as text."""
    from neuron_accel_report.page import LATE_HEAD, TRAFFIC_HEAD, facts, late_rows, part_rows, traffic_rows

    width, several = table_width(), len(runs) > 1
    sections = [format_table(["", *(run.name for run in runs)], facts(runs), width)]
    sections += [f"{run.name}: {note}" if several else note for run in runs for note in run.notes]
    if rows := part_rows(runs):
        sections.append(format_table(["a step on average", *(run.name for run in runs)], rows, width))
    for run in runs:
        before = f"{run.name}: " if several else ""
        if run.traffic:
            title = f"{before}sent by rank {min(run.headers)} in the last step"
            sections.append(f"{title}\n{format_table(TRAFFIC_HEAD, traffic_rows(run.traffic), width)}")
        if run.late:
            title = f"{before}ranks that others waited for"
            sections.append(f"{title}\n{format_table(LATE_HEAD, late_rows(run.late, run), width)}")
    return "\n\n".join(sections)


def _write(path: Path, text: str) -> None:
    if not path.parent.is_dir() or path.is_dir():
        raise ConfigurationError(
            f"{path} cannot be written: it is not a file in an existing folder.", where="--output", fix="name another"
        )
    write_whole(path, text)


@contextmanager
def _progress(*, hidden: bool) -> Iterator[Callable[[int, int], None] | None]:
    """A context that yields what shows the bytes that were read, on a terminal, and removes that line at the end."""
    if hidden or not sys.stderr.isatty():
        yield None
        return

    def shown(done: int, total: int) -> None:
        print(f"\r{done / 1e6:.0f} of {total / 1e6:.0f} MB", end="\033[K", file=sys.stderr, flush=True)

    try:
        yield shown
    finally:
        print("\r\033[K", end="", file=sys.stderr, flush=True)
