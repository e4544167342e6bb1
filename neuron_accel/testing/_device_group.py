"""What process groups of a device have in common that are made of a gloo group of the same ranks. Imported by ranks."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

_Base: Any = dist.ProcessGroup  # whose methods have overloads that nothing here is called by


class Work:
    """A collective on host memory that is under way.

    Args:
        work: gloo's.
        finish: is called once it has ended.
        keeps: stays alive until then.
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
    """A process group without collectives, which derived classes add.

    Args:
        name: of the backend.
        device: type of the device that it serves.
        gloo: the group of the same ranks that serves host memory.
    """

    def __init__(self, name: str, device: str, gloo: Any, rank: int, size: int) -> None:
        super().__init__(rank, size)
        self._backend_name, self._device, self._gloo = name, device, gloo
        self._rank, self._size = rank, size

    def getBackendName(self) -> str:
        return self._backend_name

    def _set_group_name(self, name: str) -> None:
        self._name = name

    @property
    def group_name(self) -> str:
        return self._name

    @property
    def _device_types(self) -> list[torch.device]:
        return [torch.device(self._device)]

    def shutdown(self) -> None:
        pass

    def abort(self) -> None:
        pass


def bits(host: torch.Tensor) -> torch.Tensor:
    """The same memory in a dtype that gloo carries."""
    return host.view(-1).view(torch.uint8)


def nothing() -> None:
    """For collectives after which nothing is left to do."""
