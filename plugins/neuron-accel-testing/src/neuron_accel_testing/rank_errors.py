# SPDX-License-Identifier: Apache-2.0
"""The exceptions of ranks that fail."""

from __future__ import annotations

import os
import signal
from collections.abc import Mapping

from neuron_accel.errors import CommunicationError


class RankExit(Exception):
    """A rank ended before the function returned or raised, by ``os._exit`` or a signal.

    Args:
        code: its exit code; minus the number of the signal if one ended it.
    """

    def __init__(self, code: int | None) -> None:
        self.code = code
        named = f"signal {signal.Signals(-code).name}" if code is not None and code < 0 else f"exit code {code}"
        super().__init__(f"ended with {named} before it returned")

    def __reduce__(self):
        return type(self), (self.code,)


class RankTimeout(Exception):
    """A rank was still running at its time limit, and was ended."""


class RanksError(Exception):
    """At least one rank failed.

    Attributes:
        errors: the exception of each rank that failed, by rank. ``__cause__`` is the first one; consequences of other
            failures, such as a lost connection, come after all others.
        tracebacks: the text of their tracebacks, or of the stacks of ranks that ran out of time, by rank. The message
            contains those that differ.
        outputs: the end of the stdout and stderr of each rank, by rank; without ranks that wrote nothing.
    """

    def __init__(
        self, size: int, errors: Mapping[int, BaseException], tracebacks: Mapping[int, str], outputs: Mapping[int, str]
    ) -> None:
        self.size, self.errors = size, dict(errors)
        self.tracebacks, self.outputs = dict(tracebacks), dict(outputs)
        first = min(self.errors, key=lambda rank: _is_consequence(self.errors[rank]))  # errors come in order of time
        self.__cause__ = self.errors[first]
        super().__init__(self._describe(first))

    def __reduce__(self):
        return type(self), (self.size, self.errors, self.tracebacks, self.outputs)

    def _describe(self, first: int) -> str:
        lines = [f"rank {first} of {self.size}: {_name(self.errors[first])}"]
        lines += [f"rank {r} of {self.size}: {_name(e)}" for r, e in self.errors.items() if r != first]
        for rank in sorted(self.errors, key=lambda r: (r != first, r)):
            if rank in self.tracebacks and (rank == first or not self._follows(rank, first)):
                lines += [f"--- traceback of rank {rank} ---", _without_harness(self.tracebacks[rank])]
            if rank in self.outputs:
                lines += [f"--- output of rank {rank} ---", self.outputs[rank].rstrip()]
        return "\n".join(lines)

    def _follows(self, rank: int, first: int) -> bool:
        """Whether a rank raised the same exception as the first one, or one that is a consequence of it."""
        error = self.errors[rank]
        if isinstance(error, RankTimeout):  # its stack shows where it waits
            return False
        return _is_consequence(error) or _name(error) == _name(self.errors[first])


_HARNESS = ("_rank.py", "_xla_process.py", "_neuron_process.py")


def _without_harness(text: str) -> str:
    """A traceback without the frames of this package around the call, and without lines of carets."""
    folder = os.path.dirname(os.path.abspath(__file__))
    harness = tuple(f'  File "{os.path.join(folder, name)}"' for name in _HARNESS)
    kept, skipping = [], False
    for line in text.rstrip().splitlines():
        if line.startswith("  File ") or not line.startswith(" "):
            skipping = line.startswith(harness)
        if not skipping and line.strip(" ^~"):
            kept.append(line)
    return "\n".join(kept) if any(line.startswith("  File ") for line in kept) else text.rstrip()


def _is_consequence(error: BaseException) -> bool:
    from neuron_accel.backends.group import is_communication_failure

    lost_peer = isinstance(error, RuntimeError) and is_communication_failure(error)
    return lost_peer or isinstance(error, (CommunicationError, RankTimeout))


def _name(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
