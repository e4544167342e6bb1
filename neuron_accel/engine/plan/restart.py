# SPDX-License-Identifier: Apache-2.0
"""What a launcher and the ranks tell each other about restarts: variables of the environment, and files with notes.

A launcher that may start a run again on fewer ranks asks the first rank, by the folder :data:`NOTES`, on which numbers
of ranks the mesh of the run still fits. On fewer ranks the degrees of all axes are kept but that of data parallelism,
and each rank accumulates more micro-batches, so that an optimizer step has as many samples as before.
"""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

from neuron_accel.engine.plan.mesh import DATA_AXIS, Mesh
from neuron_accel.engine.plan.plan import Plan
from neuron_accel.errors import ConfigurationError, NeuronAccelError

LAUNCHED = "NEURON_ACCEL_LAUNCHED"
"""Set by ``neuron-accel launch``: when it was started, in seconds since the epoch."""
NOTES = "NEURON_ACCEL_NOTES"
"""Set by a launcher that may restart on fewer ranks: the folder for the notes of the first rank."""
FULL_SIZE = "NEURON_ACCEL_FULL_DATA_PARALLEL_SIZE"
"""Set by a launcher that has restarted on fewer ranks: the number of data-parallel ranks of the first start."""

_FITS, _ACCUMULATES = "fits.json", "accumulates"


# ---- restarts --------------------------------------------------------------------------------------------------------
@dataclass(frozen=True, kw_only=True)
class Restart:
    """A start of a run that is not its first.

    Args:
        by: what started it again, for messages.
        since: when the run was first started, in seconds since the epoch; 0.0 if that is not known.
    """

    by: str
    since: float = 0.0


def find_restart(environ: Mapping[str, str]) -> Restart | None:
    """How this run was started again; None if it is its first start, or nothing says so.

    ``neuron-accel launch`` starts the ranks again after one has failed, and Slurm a job that was queued again.
    """
    if _number(environ, "SLURM_RESTART_COUNT") > 0:
        return Restart(by="Slurm queued the job again")
    if _number(environ, "TORCHELASTIC_RESTART_COUNT") > 0 and LAUNCHED in environ:
        return Restart(by="the launcher restarted the ranks", since=_number(environ, LAUNCHED))
    return None


def _number(environ: Mapping[str, str], name: str) -> float:
    try:
        return float(environ.get(name) or 0)
    except ValueError:
        return 0.0


# ---- fewer ranks -----------------------------------------------------------------------------------------------------
@dataclass(frozen=True, kw_only=True)
class Fit:
    """A number of ranks on which the plugins of a run can be planned.

    Args:
        ranks: the number of ranks.
        data_parallel: how many of them process different samples.
        mesh: the mesh as text.
    """

    ranks: int
    data_parallel: int
    mesh: str


@dataclass(frozen=True, kw_only=True)
class Notes:
    """What the first rank has told the launcher.

    Args:
        fits: the mesh of the run, then those on fewer ranks that have the same degrees but for data parallelism, whose
            size divides that of the run; from more to fewer ranks. Empty if no rank has come so far.
        accumulates: whether the run accumulates gradients in a way that more micro-batches can be added to.
    """

    fits: tuple[Fit, ...] = ()
    accumulates: bool = False


def find_fits(plan: Plan, make: Callable[[int], Plan]) -> tuple[Fit, ...]:
    """See :class:`Notes`.

    Args:
        plan: the plan of the run.
        make: makes the plan for another number of ranks; raises NeuronAccelError if there is none.
    """
    full, found = plan.mesh, [_fit(plan.mesh)]
    step = full.world_size // full.degree(DATA_AXIS)
    for ranks in range(full.world_size - step, 0, -step):
        with contextlib.suppress(NeuronAccelError):
            mesh = make(ranks).mesh
            if _others(mesh) == _others(full) and full.size(full.data_axes) % mesh.size(mesh.data_axes) == 0:
                found.append(_fit(mesh))
    return tuple(found)


def _fit(mesh: Mesh) -> Fit:
    return Fit(ranks=mesh.world_size, data_parallel=mesh.size(mesh.data_axes), mesh=str(mesh))


def _others(mesh: Mesh) -> dict[str, int]:
    return {axis.name: axis.degree for axis in mesh.axes if axis.name != DATA_AXIS}


def read_notes(folder: Path) -> Notes:
    """The notes of the first rank; without ``fits`` if it has left none, or they are incomplete."""
    try:
        fits = tuple(Fit(**entry) for entry in json.loads((folder / _FITS).read_text()))
    except (OSError, ValueError, TypeError):
        return Notes()
    return Notes(fits=fits, accumulates=(folder / _ACCUMULATES).exists())


class KeptBatch:
    """Keeps the number of samples of an optimizer step in a run that was restarted on fewer ranks, and leaves notes for
    the launcher if it asks for them.

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
        self._notes = Path(environ[NOTES]) if environ.get(NOTES) else None
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

    def leave_fits(self, find: Callable[[], tuple[Fit, ...]]) -> None:
        """Notes on which ranks the run fits, if the launcher asks. Called on the first rank only."""
        if self._notes is not None and not self.is_raised:
            with contextlib.suppress(OSError):
                partial = self._notes / f".{_FITS}"
                partial.write_text(json.dumps([asdict(fit) for fit in find()]))
                os.replace(partial, self._notes / _FITS)

    def leave_accumulates(self) -> None:
        """Notes that micro-batches can be added to a step, if the launcher asks."""
        if self._notes is not None:
            with contextlib.suppress(OSError):
                (self._notes / _ACCUMULATES).touch()
            self._notes = None
