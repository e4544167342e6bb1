# SPDX-License-Identifier: Apache-2.0
"""Errors of collectives."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager

from neuron_accel.errors import CommunicationError

# torch raises RuntimeError for a lost connection and for a wrong argument; only the message distinguishes them
_LOST = re.compile(
    r"gloo[/\\]|nccl (error|communicator)|connect|socket|timed? ?out|reset by peer|broken pipe|rendezvous",
    re.IGNORECASE,
)
_TIMEOUT = re.compile(r"timed? ?out", re.IGNORECASE)


@contextmanager
def reported(op: str, where: str) -> Iterator[None]:
    """Context that converts the failure of a collective into a :class:`CommunicationError`.

    Args:
        op: name of the collective.
        where: rank and group, for the message.

    Raises:
        CommunicationError: if the body raised a RuntimeError because of another rank or the network.
    """
    try:
        yield
    except RuntimeError as error:
        if not is_communication_failure(error):
            raise
        slow = _TIMEOUT.search(str(error)) is not None
        raise CommunicationError(
            f"The collective {op!r} did not complete: {_summary(error)}",
            where=where,
            why="a peer did not arrive in time" if slow else "a peer has most likely ended",
            fix="look for the first error in the output of the other ranks"
            + ("; if they only were slow, allow more time (timeout)" if slow else ""),
        ) from error


def is_communication_failure(error: RuntimeError) -> bool:
    """Returns whether ``error`` was raised because of another rank or the network, not because of an argument."""
    return isinstance(error, _network_errors()) or _LOST.search(str(error)) is not None


def _network_errors() -> tuple[type[Exception], ...]:
    import torch.distributed as dist

    return tuple(getattr(dist, name) for name in ("DistNetworkError", "DistStoreError") if hasattr(dist, name))


def _summary(error: Exception) -> str:
    """Returns the first line of the message, without the advice that gloo appends."""
    return str(error).strip().partition("\n")[0].partition(". This is typically")[0] or type(error).__name__
