# SPDX-License-Identifier: Apache-2.0
"""What ranks know of the restarts of their run."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

RUN = "NEURON_ACCEL_RUN"
"""Set by ``neuron-accel launch``: identifies the run on all of its machines, also after restarts."""
WAITING_FILE = "waiting.txt"
"""Name of the file, beside that of its error, with a rank's report of ranks that it waits for; empty if it goes on."""


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
