# SPDX-License-Identifier: Apache-2.0
"""What ranks know of the restarts of their run."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from neuron_accel.errors import ConfigurationError

RUN = "NEURON_ACCEL_RUN"
"""Set by ``neuron-accel launch``: identifies the run on all of its machines, also after restarts."""
FULL_SIZE = "NEURON_ACCEL_FULL_DATA_PARALLEL_SIZE"
"""Set by a launcher that has restarted on fewer ranks: the number of data-parallel ranks of the first start."""


# ---- restarts --------------------------------------------------------------------------------------------------------
@dataclass(frozen=True, kw_only=True)
class Restart:
    """A start of a run that is not its first.

    Args:
        by: what started it again, for messages.
        run: identifies the run in the manifests of its checkpoints; None if that is not known.
    """

    by: str
    run: str | None = None


def find_restart(environ: Mapping[str, str]) -> Restart | None:
    """How this run was started again; None if it is its first start, or nothing says so.

    ``neuron-accel launch`` starts the ranks again after one has failed, and Slurm a job that was queued again.
    """
    if _number(environ, "SLURM_RESTART_COUNT") > 0:
        return Restart(by="Slurm queued the job again")
    if _number(environ, "TORCHELASTIC_RESTART_COUNT") > 0 and environ.get(RUN):
        return Restart(by="the launcher restarted the ranks", run=environ[RUN])
    return None


def _number(environ: Mapping[str, str], name: str) -> float:
    try:
        return float(environ.get(name) or 0)
    except ValueError:
        return 0.0


# ---- fewer ranks -----------------------------------------------------------------------------------------------------
class KeptBatch:
    """Keeps the number of samples of an optimizer step in a run that was restarted on fewer ranks.

    Args:
        environ: the environment.
        size: number of data-parallel ranks.

    Raises:
        ConfigurationError: if the number of samples cannot be kept.
    """

    def __init__(self, environ: Mapping[str, str], size: int) -> None:
        self.size = size
        self.full_size = int(_number(environ, FULL_SIZE)) or size
        """Number of data-parallel ranks of the first start."""
        if self.full_size % size:
            raise ConfigurationError(
                f"{size} data-parallel ranks cannot continue a run of {self.full_size} with as many samples in a step.",
                where=f"environment variable {FULL_SIZE}",
                why="each of them would have to accumulate a fraction of a micro-batch",
                fix=f"choose a number of ranks of which the data-parallel size divides {self.full_size}, or unset it",
            )

    @property
    def is_raised(self) -> bool:
        """Whether there are fewer data-parallel ranks than at the first start."""
        return self.full_size != self.size

    def accumulation(self, steps: int) -> int:
        """The number of micro-batches to accumulate, for a run that accumulated ``steps`` at its first start."""
        return steps * self.full_size // self.size
