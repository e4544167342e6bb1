# SPDX-License-Identifier: Apache-2.0
"""The events of a run, in profiles of torch."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, ClassVar

import torch

from neuron_accel.backends.events import CATEGORIES, Event, Observer

if TYPE_CHECKING:
    from neuron_accel.engine.runtime.run import Run


class ProfiledEvents(Observer):
    """Makes each event a range of torch's profiler, which belongs to the thread that opens it."""

    categories: ClassVar[frozenset[str]] = CATEGORIES - {"deferred"}

    def __init__(self) -> None:
        self._open: list[tuple[Event, torch.profiler.record_function]] = []

    def begin(self, event: Event) -> None:
        group = event.arguments.get("group")
        marked = torch.profiler.record_function(event.name if group is None else f"{event.name} over {group}")
        self._open.append((event, marked))
        marked.__enter__()

    def end(self, event: Event) -> None:
        for index in range(len(self._open) - 1, -1, -1):  # another thread may have opened one later
            if self._open[index][0] is event:
                _, marked = self._open.pop(index)
                marked.__exit__(None, None, None)
                return


@contextmanager
def named_ranges(run: Run) -> Iterator[None]:
    """A context in which profiles of torch have the events of a run: parts of a step, hooks under the names of their
    plugins, collectives, and passes of a pipeline."""
    for model in run.models:
        model.make_events(run.events)
    remove = run.events.observe(ProfiledEvents())
    try:
        yield
    finally:
        remove()
