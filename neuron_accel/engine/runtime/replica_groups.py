# SPDX-License-Identifier: Apache-2.0
"""Limits the number of partitions of the ranks into replica groups in one graph.

The planner counts the partitions that the mesh needs in advance (:meth:`Hardware.check_mesh`). Groups that a plugin
creates itself are counted when they are used.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import ClassVar

import torch

from neuron_accel.backends.events import Collective, Event, Observer
from neuron_accel.errors import PlanError

_PACKAGE = str(Path(__file__).resolve().parents[2])
_PASSED_THROUGH = tuple(
    folder + os.sep
    for folder in (
        os.path.join(_PACKAGE, "engine"),
        os.path.join(_PACKAGE, "backends"),
        os.path.dirname(torch.__file__),
    )
)


class PartitionLimit(Observer):
    """Raises an error for a collective with which a graph would have more partitions of the ranks than the hardware
    allows.

    All ranks build the same graph, so all of them raise the error for the same collective. Collectives outside of a
    graph (on eager devices, or on objects) are not counted, since each is a program of its own.

    Args:
        most: maximum number of partitions in one graph.
        hardware: name of the machine, for messages.
    """

    categories: ClassVar[frozenset[str]] = frozenset({"deferred", "graph"})

    def __init__(self, most: int, hardware: str) -> None:
        self._most, self._hardware = most, hardware
        self._ways: dict[tuple[tuple[int, ...], ...], str] = {}

    def begin(self, event: Event) -> None:
        """Counts the partition of a collective; an execution ends the graph.

        Raises:
            PlanError: if the graph would have too many partitions. The message names this collective and the earlier
                ones, each with the code that called it.
        """
        if not isinstance(event, Collective):
            self._ways.clear()
            return
        group = event.group
        if group.partition in self._ways:
            return
        asked = f"{group.name!r} ({event.name} in {_who_asks()})"
        if len(self._ways) == self._most:
            raise PlanError(
                f"A graph would divide the ranks into groups in more than {self._most} ways, all that "
                f"{self._hardware} allows: {asked} is one too many.",
                where=f"hardware {self._hardware}, groups {_listing(group.partition)}",
                why="each way needs separate communicators, whose number in one compiled graph is limited; it has "
                + "; ".join(self._ways.values()),
                fix="leave out a plugin that creates its own groups, let it use groups of the mesh (run.group), or "
                "let it end the graph before (run.backend.step_boundary())",
            )
        self._ways[group.partition] = asked


def _who_asks() -> str:
    """Returns the innermost frame outside of the engine, the backends and torch, as
    ``"neuron_accel_lora/layers.py:87"``."""
    frame = sys._getframe(1)
    while frame is not None:
        path = frame.f_code.co_filename
        if not path.startswith((*_PASSED_THROUGH, "<")):
            return f"{os.path.basename(os.path.dirname(path))}/{os.path.basename(path)}:{frame.f_lineno}"
        frame = frame.f_back  # type: ignore[assignment]
    return "a backward pass"


def _listing(partition: tuple[tuple[int, ...], ...]) -> str:
    shown = [str(list(ranks)) for ranks in partition[:4]]
    return ", ".join([*shown, "..."] if len(partition) > 4 else shown)
