# SPDX-License-Identifier: Apache-2.0
"""What packages use that add ranks of another kind to :func:`neuron_accel.testing.run_ranks`.

Such a package has entry points in the group ``neuron_accel.test_devices``. The name of one is a ``backend`` of
``run_ranks``, and its object one of two:

- a :class:`RankDevice`: a device and a process group of the ranks that ``run_ranks`` starts,
- a :class:`RankMachine`: it starts ranks itself, perhaps with :func:`run_forked`.

Names are imported when they are first used, so that importing a device imports no torch.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

if TYPE_CHECKING:
    from ._call import pickle_call as pickle_call
    from ._device_group import DeviceGroup as DeviceGroup
    from ._device_group import Work as Work
    from ._device_group import bits as bits
    from ._device_group import nothing as nothing
    from ._rank import STACK_SIGNAL as STACK_SIGNAL
    from ._rank import pickle_error as pickle_error
    from ._xla_process import XlaTask as XlaTask
    from ._xla_process import enter_task as enter_task
    from ._xla_process import import_script as import_script
    from ._xla_server import serve as serve
    from .xla_ranks import run_forked as run_forked

_WHERE = {
    "DeviceGroup": "_device_group",
    "STACK_SIGNAL": "_rank",
    "Work": "_device_group",
    "XlaTask": "_xla_process",
    "bits": "_device_group",
    "enter_task": "_xla_process",
    "import_script": "_xla_process",
    "nothing": "_device_group",
    "pickle_call": "_call",
    "pickle_error": "_rank",
    "run_forked": "xla_ranks",
    "serve": "_xla_server",
}

__all__ = ["RankDevice", "RankMachine", *_WHERE]


class RankDevice(Protocol):
    """A device of ranks, and the process group that connects them. Ranks receive it as a copy."""

    @property
    def library(self) -> str:
        """The backend of torch.distributed that connects the ranks."""

    def prepare(self, folder: Path) -> Mapping[str, str]:
        """Called by the caller of ``run_ranks`` before ranks start.

        Args:
            folder: a temporary folder that the ranks have in common.

        Returns:
            environment variables of the ranks.
        """

    def enter(self, folder: Path) -> None:
        """Called in each rank, which has imported torch, before it is connected.

        Args:
            folder: that of :meth:`prepare`.
        """


@runtime_checkable
class RankMachine(Protocol):
    """A machine that starts ranks itself."""

    def run(
        self,
        fn: Callable[..., Any],
        n: int,
        *args: Any,
        timeout: float,
        grace: float,
        env: Mapping[str, str] | None,
        **kwargs: Any,
    ) -> list[Any]:
        """Calls ``fn(*args, **kwargs)`` on ``n`` ranks, as :func:`neuron_accel.testing.run_ranks` does."""


def __getattr__(name: str) -> Any:
    if name in _WHERE:
        return getattr(importlib.import_module(f"neuron_accel.testing.{_WHERE[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
