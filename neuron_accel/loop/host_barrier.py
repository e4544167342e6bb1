# SPDX-License-Identifier: Apache-2.0
"""Ranks wait for each other on the host wherever Accelerate makes them wait.

On XLA ranks Accelerate's own ``PartialState.wait_for_everyone`` is torch_xla's rendezvous: a collective on the device,
in a graph that differs between ranks. Libraries call it, and ``PartialState().main_process_first``, without an
accelerator. All instances of ``PartialState`` share one ``__dict__``, in which an attribute takes precedence over the
method of the class. It is a value of the state of this run, and ends with it: no class or module of Accelerate is
changed.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from neuron_accel.errors import UsageError

if TYPE_CHECKING:
    from neuron_accel.backends.base import Backend


class HostBarrier:
    """Returns once every rank has called it.

    Args:
        backend: of this rank; None in a copy that another process has received.
    """

    def __init__(self, backend: Backend | None = None) -> None:
        self._backend = backend

    def __call__(self) -> None:
        if self._backend is None:
            raise UsageError(
                "This PartialState was copied from another process.",
                why="a copy has no connection to the other ranks",
                fix="call PartialState() in the process that waits",
            )
        self._backend.barrier()

    def __deepcopy__(self, _: Any) -> HostBarrier:
        return self

    def __reduce__(self) -> Any:
        return HostBarrier, ()


def wait_on_host(backend: Backend) -> None:
    """Makes the ``PartialState`` of this rank wait through ``backend``, if it is a lazy one on real ranks."""
    from accelerate.state import PartialState

    if backend.is_lazy and backend.has_values:
        PartialState().__dict__["wait_for_everyone"] = HostBarrier(backend)
