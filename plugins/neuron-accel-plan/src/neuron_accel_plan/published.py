# SPDX-License-Identifier: Apache-2.0
"""Predictions held against training rates that AWS has published, and the interval that follows from them.

``published_runs.json`` has the rates with their sources, and says by which rule they were chosen and ordered. The first
:data:`CALIBRATING` runs of an instance calibrate: the logarithms of published by predicted seconds are taken as drawn
from a normal distribution, and a new run lies in Student's prediction interval with probability :data:`LEVEL`. The
other runs only test how often that is so. Constants of the prediction are not fitted to any of them.

``published_predictions.json`` has what was predicted for each, so that a plan need not count them again; ``python -m
benchmarks.published`` writes it.
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
    from neuron_accel_plan.layout import LayoutCount
    from neuron_accel_plan.time import StepTime

RUNS = Path(__file__).parent / "published_runs.json"
PREDICTIONS = Path(__file__).parent / "published_predictions.json"
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


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """Published and predicted times of the runs of an instance.

    Args:
        ratios: published by predicted seconds, by name, in the file's order.
        low, high: bounds of this ratio for a new run, from the first :data:`CALIBRATING`.
    """

    ratios: Mapping[str, float]
    low: float
    high: float

    @property
    def tested(self) -> tuple[float, ...]:
        """The ratios of the runs that do not calibrate."""
        return tuple(self.ratios.values())[CALIBRATING:]

    @property
    def inside(self) -> int:
        """How many of these are within the bounds."""
        return sum(self.low <= ratio <= self.high for ratio in self.tested)


@cache
def compared() -> dict[str, Comparison]:
    """Returns what is known of each instance with enough published runs."""
    predicted = json.loads(PREDICTIONS.read_text(encoding="utf-8"))
    found = {}
    for instance, of in runs().items():
        if len(of) > CALIBRATING:
            ratios = {run.name: run.seconds / predicted[run.name]["seconds"] for run in of}
            low, high = factors_of(list(ratios.values())[:CALIBRATING])
            found[instance] = Comparison(ratios=ratios, low=low, high=high)
    return found


@dataclass(frozen=True, kw_only=True)
class Interval:
    """The time of a step by what published runs took, or why they say nothing.

    Args:
        low, high: seconds; 0 if there are none.
        comparison: of the instance.
        why: why there are none.
    """

    low: float = 0.0
    high: float = 0.0
    comparison: Comparison | None = None
    why: str = ""

    def to_dict(self) -> dict[str, Any] | None:
        """Returns plain numbers; None if there are none."""
        if self.comparison is None:
            return None
        tested = {"tested_on": len(self.comparison.tested), "inside": self.comparison.inside}
        calibrated = list(self.comparison.ratios)[:CALIBRATING]
        return {"low": self.low, "high": self.high, "probability": LEVEL, "calibrated_on": calibrated, **tested}


def interval_of(counted: LayoutCount, predicted: StepTime) -> Interval:
    """Returns the interval of a prediction with the constants of an instance."""
    found = compared().get(counted.instance or "")
    if found is None:
        return Interval(why=f"no rates of {counted.instance or 'this machine'} are published with their layouts")
    if counted.findings:  # of a mixture of experts, that sorts
        return Interval(why="all that are published are of dense models")
    return Interval(low=found.low * predicted.seconds, high=found.high * predicted.seconds, comparison=found)
