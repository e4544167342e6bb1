# SPDX-License-Identifier: Apache-2.0
"""A base class of process groups of a device that are implemented with a gloo group of the same ranks."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

_Base: Any = dist.ProcessGroup  # untyped, since its overloads are not implemented


class Work:
    """A collective on host memory that has been issued.

    Args:
        work: the work object of gloo.
        finish: called once when the collective has completed.
        keeps: objects to keep alive until then.
    """

    def __init__(self, work: Any, finish: Callable[[], Any], keeps: Any) -> None:
        self._work, self._finish, self._keeps = work, finish, keeps

    def wait(self, timeout: timedelta | None = None) -> bool:
        if self._work is not None:
            self._work.wait(timeout) if timeout else self._work.wait()
            self._finish()
            self._work = self._keeps = None
        return True

    def is_completed(self) -> bool:
        return self._work is None or self._work.is_completed()


class DeviceGroup(_Base):
    """A process group without collectives, which subclasses add.

    Args:
        name: name of the backend.
        device: type of the device whose tensors it communicates.
        gloo: the gloo group of the same ranks, for host memory.
        rank: this rank.
        size: number of ranks.
    """

    def __init__(self, name: str, device: str, gloo: Any, rank: int, size: int) -> None:
        super().__init__(rank, size)
        self._backend_name, self._device, self._gloo = name, device, gloo
        self._rank, self._size = rank, size
        # torch keeps the name of a group, and from 2.15 on its flight recorder, in the backend of a device.
        self._register_backend(torch.device(device), dist.ProcessGroup.BackendType.CUSTOM, gloo)
        self._set_default_backend(dist.ProcessGroup.BackendType.CUSTOM)

    def getBackendName(self) -> str:
        return self._backend_name

    @property
    def _device_types(self) -> list[torch.device]:
        return [torch.device(self._device)]

    def shutdown(self) -> None:
        pass

    def abort(self) -> None:
        pass


def bits(host: torch.Tensor) -> torch.Tensor:
    """A 1-dim uint8 view of the memory of a tensor, which gloo can send whatever the dtype."""
    return host.view(-1).view(torch.uint8)


def nothing() -> None:
    """The ``finish`` of collectives after which nothing has to be done."""
