"""What a launcher says about earlier starts of this run, in environment variables."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

LAUNCHED = "NEURON_ACCEL_LAUNCHED"
"""Set by ``neuron-accel launch``: when it was started, in seconds since the epoch."""


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
