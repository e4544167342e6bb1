# SPDX-License-Identifier: Apache-2.0
"""The ranges of a run, in profiles of torch."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch

from neuron_accel.backends.ranges import OpenRange, RangeObserver

if TYPE_CHECKING:
    from neuron_accel.engine.runtime.run import Run


class ProfiledRanges(RangeObserver):
    """Makes each range one of torch's profiler, which belongs to the thread that opens it."""

    def __init__(self) -> None:
        self._open: list[tuple[OpenRange, torch.profiler.record_function]] = []

    def begin(self, opened: OpenRange) -> None:
        group = opened.arguments.get("group")
        marked = torch.profiler.record_function(opened.name if group is None else f"{opened.name} over {group}")
        self._open.append((opened, marked))
        marked.__enter__()

    def end(self, opened: OpenRange) -> None:
        for index in range(len(self._open) - 1, -1, -1):  # another thread may have opened one later
            if self._open[index][0] is opened:
                _, marked = self._open.pop(index)
                marked.__exit__(None, None, None)
                return


@contextmanager
def named_ranges(run: Run) -> Iterator[None]:
    """A context in which profiles of torch have the ranges of a run: parts of a step, hooks under the names of their
    plugins, collectives, and passes of a pipeline."""
    for model in run.models:
        model.make_ranges(run.ranges)
    remove = run.ranges.observe(ProfiledRanges())
    try:
        yield
    finally:
        remove()
