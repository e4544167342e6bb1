# SPDX-License-Identifier: Apache-2.0
"""Predictions held against training rates that AWS has published, and the interval that follows from them.

``published_runs.json`` has the rates with their sources, and says by which rule they were chosen and ordered. The first
:data:`CALIBRATING` runs of an instance calibrate: the logarithms of published by predicted seconds are taken as drawn
from a normal distribution, and a new run lies in Student's prediction interval with probability :data:`LEVEL`. The
other runs only test how often that is so. Constants of the prediction are not fitted to any of them.
"""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from neuron_accel_plan.time import StepTime

RUNS = Path(__file__).parent / "published_runs.json"
CALIBRATING = 3
"""Runs of an instance that calibrate, the first ones of the file."""
LEVEL = 0.8
"""The probability of the interval, if a run is like those that calibrate."""


@dataclass(frozen=True, kw_only=True)
class Run:
    """A training whose rate is published.

    Args:
        name: model and degrees.
        model: a name of ``known_models.json``, or a configuration of transformers as a mapping.
        instance, instances: what it ran on.
        global_batch, sequence, accumulation, plugins: the layout, as arguments of :func:`neuron_accel_plan.plan`.
        sequences_per_second: the published rate.
        release: release of the Neuron SDK for which it was published.
        earlier: rates of the same layout in earlier releases.
        source, published: the table and its date.
        layout: the script that describes model and layout.
    """

    name: str
    model: str | Mapping[str, Any]
    instance: str
    instances: int
    global_batch: int
    sequence: int
    accumulation: int
    plugins: Sequence[Any]
    sequences_per_second: float
    release: str
    earlier: Mapping[str, float]
    source: str
    published: str
    layout: str

    @property
    def seconds(self) -> float:
        """The published time of a step."""
        return self.global_batch / self.sequences_per_second


@cache
def runs() -> dict[str, list[Run]]:
    """Returns the published runs in the file's order, by instance."""
    found: dict[str, list[Run]] = {}
    for plain in json.loads(RUNS.read_text(encoding="utf-8"))["runs"]:
        run = Run(**plain)
        found.setdefault(run.instance, []).append(run)
    return found


def predict_run(run: Run) -> StepTime:
    """Returns the predicted time of a step of the run, with the constants of its instance."""
    from transformers import AutoConfig

    from neuron_accel import find_instance
    from neuron_accel_plan.entry import plan

    model = run.model if isinstance(run.model, str) else AutoConfig.for_model(**run.model)
    counted = plan(
        model,
        world_size=run.instances * find_instance(run.instance).hardware().full,
        global_batch=run.global_batch,
        sequence=run.sequence,
        accumulation=run.accumulation,
        config={"plugins": list(run.plugins)},
        instance=run.instance,
    )
    return counted.predict()


def factors_of(ratios: Sequence[float]) -> tuple[float, float]:
    """Returns the bounds of published by predicted seconds for a new run, from the ratios of three."""
    assert len(ratios) == CALIBRATING
    logarithms = [math.log(ratio) for ratio in ratios]
    # Student's quantile for two degrees of freedom, one fewer than there are runs, has a closed form.
    upper = (1 + LEVEL) / 2
    quantile = (2 * upper - 1) / math.sqrt(2 * upper * (1 - upper))
    middle, spread = statistics.mean(logarithms), statistics.stdev(logarithms)
    half = quantile * spread * math.sqrt(1 + 1 / len(ratios))
    return math.exp(middle - half), math.exp(middle + half)
