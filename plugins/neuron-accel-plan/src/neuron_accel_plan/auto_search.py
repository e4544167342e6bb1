# SPDX-License-Identifier: Apache-2.0
"""Searches a layout for :mod:`neuron_accel_plan.auto`: reads a question as JSON, writes the answer as JSON."""

from __future__ import annotations

import contextlib
import json
import sys
from collections import Counter
from collections.abc import Mapping
from typing import Any

from neuron_accel import find_instance
from neuron_accel.errors import ConfigurationError, NeuronAccelError
from neuron_accel_plan.calibration import load_calibration, machine_of
from neuron_accel_plan.layout import Planner, _configuration, _with_depth
from neuron_accel_plan.ranks import CpuRanks, cpu_machine, used_part
from neuron_accel_plan.search import Ranked, Search, search
from neuron_accel_plan.step import DEPTHS

BEST = 3
"""Layouts that are found, of which all but the first are named."""
FEW = 10
"""Layouts that are found of a model with few blocks, before each is counted as it is."""


def answer(question: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the fastest layout that fits.

    Args:
        question: see ``_question`` of :mod:`neuron_accel_plan.auto`.

    Raises:
        ConfigurationError: if none fits, or for an unknown model.
    """
    machine: Any
    ranks = question["ranks"]
    if question.get("instance"):
        machine, instances = used_part(find_instance(question["instance"]), ranks, question["lnc"])
        calibration = machine_of(find_instance(question["instance"]), question["lnc"])
    else:
        machine, instances = CpuRanks(ranks=ranks, memory=question["memory"]), 1
        calibration = cpu_machine()
    if question["calibration"] is not None:
        calibration = load_calibration(question["calibration"])
    config = _configuration(question["model"])
    blocks = getattr(config, "num_hidden_layers", 0)
    is_shallow = 0 < blocks <= max(DEPTHS)
    same = {
        "global_batch": question["global_batch"],
        "sequence": question["sequence"],
        "instance": machine,
        "dtype": question["dtype"],
        "attention": question["attention"],
        "reserve": question["reserve"],
    }
    found = search(
        _with_depth(config, max(DEPTHS) + 1) if is_shallow else config,
        instances=instances,
        calibration=calibration,
        best=FEW if is_shallow else BEST,
        jobs=question["jobs"],
        within=question["within"],
        **same,
    )
    best, parameters = list(found.best), found.parameters
    if is_shallow:  # a search extrapolates from models of two and three blocks
        planner = Planner(config, world_size=ranks, **same)
        best, parameters = _counted(planner, best, calibration), planner.parameters
    if not best:
        _refuse(found)
    first = best[0]
    return {
        "configuration": first.layout.configuration(),
        "layout": str(first.layout),
        "model": found.model,
        "parameters": parameters,
        "mesh": first.count.mesh,
        "rows": first.count.micro_batch * first.count.accumulation // first.layout.accumulation,
        "seconds": [first.time.seconds, first.time.low, first.time.high],
        "memory": first.count.step.peak.total,
        "parts": dict(first.time.parts),
        "others": [{"layout": str(each.layout), "seconds": each.time.seconds} for each in best[1:BEST]],
        "slower": len(found.slower) + len(best[BEST:]),
        "ruled_out": len(found.ruled_out),
        "left": len(found.left),
        "at_most_faster": found.at_most_faster,
    }


def _counted(planner: Planner, found: list[Ranked], calibration: Any) -> list[Ranked]:
    """The layouts that fit the model itself, the fastest first."""
    kept = []
    for each in found:
        try:
            count = planner.count(each.layout.plugins, each.layout.accumulation)
        except NeuronAccelError:
            continue  # such as more stages than blocks
        if count.fits:
            kept.append(Ranked(layout=each.layout, count=count, time=count.predict(calibration)))
    return sorted(kept, key=lambda each: each.time.seconds)


def _refuse(found: Search) -> None:
    reasons = Counter(ruled.reason for ruled in found.ruled_out).most_common(1)
    raise ConfigurationError(
        f'plugins="auto" finds no layout of {found.model} for these ranks.',
        where="plan_for",
        why=f"{len(found.ruled_out)} are ruled out, most of them so: {reasons[0][0]}" if reasons else None,
        fix="start more ranks, choose a global batch that more numbers divide, or give the plugins",
    )


def main() -> int:
    question = json.load(sys.stdin)
    try:
        with contextlib.redirect_stdout(sys.stderr):
            found = answer(question)
    except NeuronAccelError as error:
        parts = {"what": error.what, "where": error.where, "why": error.why, "fix": error.fix}
        found = {"error": {"kind": type(error).__name__, **parts}}
    json.dump(found, sys.stdout)
    return 0


if __name__ == "__main__":
    sys.exit(main())
