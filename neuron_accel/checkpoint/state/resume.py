# SPDX-License-Identifier: Apache-2.0
"""What ``load_state`` says of the checkpoint that it has loaded, and how another number of ranks goes on from it."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from neuron_accel.checkpoint.format.manifest import latest_of, read_manifest
from neuron_accel.errors import ConfigurationError
from neuron_accel.storage import Location, location


@dataclass(frozen=True, kw_only=True)
class Resumed:
    """What `load_state` has loaded. False in a condition if there was nothing to load.

    Args:
        folder: the folder of the checkpoint; None if nothing was loaded.
        saved: when it was saved, in UTC; None for a folder that contains only weights.
        ranks: number of ranks that saved it.
        positions: for each loader the epoch, from 0, and the number of samples that all ranks together have had of it.
    """

    folder: str | None = None
    saved: str | None = None
    ranks: int | None = None
    positions: tuple[tuple[int, int], ...] = ()

    def __bool__(self) -> bool:
        return self.folder is not None

    def __str__(self) -> str:
        if self.folder is None:
            return "nothing to resume: training starts from the beginning"
        if self.saved is None:
            return f"loaded weights from {self.folder}"
        by = "1 rank" if self.ranks == 1 else f"{self.ranks} ranks"
        epochs = "; ".join(f"epoch {epoch}, after {samples} samples" for epoch, samples in self.positions)
        return f"resumed from {self.folder}, saved {self.saved} by {by}" + (f": {epochs}" if epochs else "")


def describe_loaded(folder: Location, info: Mapping[str, Any], loaders: Any) -> Resumed:
    """Describes a checkpoint that was loaded.

    Args:
        folder: its folder.
        info: what its manifest says of the run that saved it; empty for a folder that contains only weights.
        loaders: the prepared loaders, in their new positions.
    """
    places = [loader.position() for loader in loaders if info and hasattr(loader, "position")]
    return Resumed(
        folder=str(folder),
        saved=info.get("saved"),
        ranks=info.get("world_size"),
        positions=tuple((place["epoch"], 0 if place["begin"] is None else place["samples"]) for place in places),
    )


def plan_of_last_checkpoint(project_dir: str | os.PathLike[str] | None) -> Mapping[str, Any] | None:
    """Returns the plan of the run that saved the last complete checkpoint of a project; None if there is none."""
    folder = None if project_dir is None else latest_of(location(project_dir))
    return None if folder is None else read_manifest(folder).info.get("plan")


def step_of(counters: Mapping[str, int], step: int, accumulation: int) -> int:
    """Returns the number of micro-batches since accumulation began, for a run of ``accumulation`` of them per step.

    A run that continues on fewer data-parallel ranks accumulates more micro-batches than the one that saved, and a
    checkpoint between two steps of the one is between two steps of the other.

    Args:
        counters: those of the checkpoint; empty if it has none.
        step: the number if ``counters`` has none.
        accumulation: micro-batches of an optimizer step.
    """
    saved = counters.get("step", step)
    steps, within = divmod(saved, max(1, counters.get("accumulation", accumulation)))
    return saved if within else steps * accumulation


@dataclass(frozen=True, kw_only=True)
class SavedBatch:
    """What a checkpoint says of the optimizer steps of the run that saved it.

    Args:
        data_parallel: number of its data-parallel ranks.
        accumulation: micro-batches of a step on each of them.
        samples: samples of a step on all of them together; 0 if that is not known.
        steps_at_once: by how many steps a schedule advances in a step.
    """

    data_parallel: int
    accumulation: int
    samples: int
    steps_at_once: int

    def accumulation_for(self, data_parallel: int, *, samples: int, splits: bool) -> int:
        """The micro-batches of a step on other ranks, with which it has as many samples.

        Args:
            data_parallel: the number of data-parallel ranks.
            samples: samples of a micro-batch on all of them together; 0 if that is not known.
            splits: whether a batch of the loader is split over the ranks.

        Raises:
            ConfigurationError: if it would not be a whole number.
        """
        before, now = self.samples, samples
        if not before or not now:  # each rank has as many samples as before in a micro-batch
            before, now = (self.accumulation, 1) if splits else (self.accumulation * self.data_parallel, data_parallel)
        if before % now:
            raise ConfigurationError(
                f"{data_parallel} data-parallel ranks cannot continue a run of {self.data_parallel} with as many "
                "samples in an optimizer step.",
                where="keep_batch=True",
                why=f"a step had {before} samples, and a micro-batch of these ranks has {now}"
                if self.samples and samples
                else f"a step had {before} micro-batches, which {now} ranks cannot share",
                fix="choose a number of ranks or a batch size of which the product divides the samples of a step",
            )
        return before // now


def say_batch(saved: SavedBatch, data_parallel: int, before: int, now: int) -> None:
    """Says on the main process how a run continues with as many samples in a step."""
    print(
        f"neuron_accel: data-parallel size {data_parallel} instead of {saved.data_parallel}: each rank accumulates "
        f"{now} micro-batches instead of {before}, so that an optimizer step has as many samples as before",
        file=sys.stderr,
        flush=True,
    )
