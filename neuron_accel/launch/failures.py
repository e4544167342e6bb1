# SPDX-License-Identifier: Apache-2.0
"""Finds the rank that failed first and describes its failure."""

from __future__ import annotations

import signal
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

LINES_SHOWN = 40
TOGETHER_SECONDS = 1.0

HINTS: dict[int, str] = {
    signal.SIGKILL: "often the system running out of memory: see `dmesg`, or use fewer ranks or a smaller model",
    signal.SIGSEGV: "a crash in native code; the Python stack is in the rank's output",
    signal.SIGABRT: "native code aborted; its message and the Python stack are in the rank's output",
    signal.SIGBUS: "often a full /dev/shm: enlarge it, or use fewer data loading workers",
}


@dataclass(frozen=True, kw_only=True)
class RankFailure:
    """A rank that failed.

    Args:
        rank: its global rank.
        exit_code: its exit code, or minus the signal that ended it.
        noticed: when the launcher noticed, in seconds since the epoch (whole seconds); of a rank that got SIGKILL, not
            from the launcher, when the launcher noticed the first failure.
        summary: the exception as one line; None if the rank ended without recording one.
        raised: when the exception was raised, in seconds since the epoch.
        stderr: the file with its error output; None if that went to the terminal.
        stack: the traceback of the exception, shown if that file is empty, as on a full disk.
    """

    rank: int
    exit_code: int
    noticed: float
    summary: str | None = None
    raised: float | None = None
    stderr: Path | None = None
    stack: str = ""

    @property
    def shell_code(self) -> int:
        """The exit code as in a shell: 128 + n for a process ended by signal n."""
        return 128 - self.exit_code if self.exit_code < 0 else self.exit_code

    @property
    def how(self) -> str:
        """The signal or exit code, and the exception, as text."""
        if self.exit_code < 0:
            return f"ended by {signal_name(-self.exit_code)}"
        return f"exit code {self.exit_code}" + (f", {self.summary}" if self.summary else "")


@dataclass(frozen=True, kw_only=True)
class RankSuccess:
    """A rank that ended with exit code 0 in a launch that failed.

    Args:
        rank: its global rank.
        host: the name of its machine.
        ended: when it reached the end of the script or called ``sys.exit``, in seconds since the epoch; None: it did
            neither, and ended by ``os._exit`` or in native code.
        left_at: file and line of the ``sys.exit``; None without one.
    """

    rank: int
    host: str
    ended: float | None = None
    left_at: str | None = None

    @property
    def left(self) -> str | None:
        """How it ended before the end of the script, as text; None if it reached the end."""
        if self.ended is None:
            return "exit code 0 without reaching the end of the script, as with os._exit(0)"
        return f"sys.exit at {self.left_at} (exit code 0)" if self.left_at is not None else None


def signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def first_failure(failures: Sequence[RankFailure]) -> RankFailure:
    """Returns the failure that most likely caused the others.

    When a rank ends, the ranks that communicate with it fail soon after, as their connections close, and the launcher
    ends the rest with SIGTERM. So, of the failures noticed within :data:`TOGETHER_SECONDS` of the first: one without a
    recorded exception is preferred, since ranks whose connections closed record one; else the one with the earliest
    exception; a rank ended by SIGTERM only if there is no other.

    Args:
        failures: in the order in which the launcher noticed them.
    """
    earliest = min(failure.noticed for failure in failures)
    together = [failure for failure in failures if failure.noticed <= earliest + TOGETHER_SECONDS]
    suspects = [failure for failure in together if failure.exit_code != -signal.SIGTERM]
    if not suspects:
        suspects = [failure for failure in failures if failure.exit_code != -signal.SIGTERM] or together
    return min(suspects, key=lambda failure: failure.raised or 0.0)


def describe(
    failures: Sequence[RankFailure], successes: Sequence[RankSuccess] = (), reports: Sequence[str] = ()
) -> str:
    """The message at the end of a failed launch.

    It begins with the ranks that had ended with exit code 0 in the middle of the script before the first failure, since
    the others may have waited for them, and ends with what ranks had reported of ranks that they waited for.
    """
    first = first_failure(failures)
    until = first.raised or first.noticed + TOGETHER_SECONDS
    before = sorted((one for one in successes if (one.ended or 0.0) <= until), key=lambda one: one.ended or 0.0)
    lines = [
        f"rank {one.rank} on {one.host} ended before the others: {one.left}" for one in before if one.left is not None
    ]
    lines.append(f"rank {first.rank} failed first: {first.how}")
    if ended := [str(one.rank) for one in before if one.left is None]:
        lines.append(f"  ranks that had reached the end of the script before, with exit code 0: {', '.join(ended)}")
    hint = HINTS.get(-first.exit_code)
    if hint:
        lines.append(f"  {hint}")
    if first.stderr is None:
        lines.append("  its output is above")
    else:
        shown = last_lines(first.stderr) or first.stack.splitlines()[-LINES_SHOWN:]
        lines.append(
            f"  its output is in {first.stderr.parent}" + ("; its last lines:" if shown else "; no error output")
        )
        lines.extend(f"  | {line}" for line in shown)
    others = [failure for failure in failures if failure is not first]
    ended = [str(failure.rank) for failure in others if failure.exit_code == -signal.SIGTERM]
    lines.extend(
        f"  then rank {failure.rank}: {failure.how}" for failure in others if failure.exit_code != -signal.SIGTERM
    )
    if ended:
        lines.append(f"  ended as a consequence: rank {', '.join(ended)}")
    lines.extend(f"  before: {line}" for report in reports for line in report.splitlines())
    return "\n".join(lines)


def last_lines(path: Path, number: int = LINES_SHOWN) -> list[str]:
    """The last ``number`` lines of a file; none if it is missing."""
    try:
        return path.read_text(errors="replace").splitlines()[-number:]
    except OSError:
        return []
