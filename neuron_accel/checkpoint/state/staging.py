# SPDX-License-Identifier: Apache-2.0
"""Host memory that background saves copy tensors to.

New memory costs more than copying, since the system has to find and clear every page. All tensors are therefore copied
to one region, which is kept and reused by each save. It does not ask for huge pages: where memory is fragmented, the
system moves other pages to make them, which takes several times as long as small ones.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from neuron_accel.checkpoint.format.files import in_order

_ALIGNMENT = 64


class StagingMemory:
    """A region of host memory that grows as needed. One save at a time may use it."""

    def __init__(self) -> None:
        self._region = torch.empty(0, dtype=torch.uint8)

    @property
    def size(self) -> int:
        """Size in bytes."""
        return self._region.numel()

    def copy(self, tensors: Sequence[torch.Tensor], threads: int) -> list[torch.Tensor]:
        """Returns contiguous copies of ``tensors`` on the CPU. The next call overwrites them.

        Args:
            tensors: tensors on any device.
            threads: number of threads to use if all tensors are on the CPU.
        """
        offsets, size = [], 0
        for tensor in tensors:
            offsets.append(size)
            size += -(-tensor.numel() * tensor.element_size() // _ALIGNMENT) * _ALIGNMENT
        if size > self.size:
            self._region = torch.empty(0, dtype=torch.uint8)  # releases the memory before more is allocated
            self._region = torch.empty(size, dtype=torch.uint8)
        copies = [
            self._region[offset : offset + tensor.numel() * tensor.element_size()].view(tensor.dtype).view(tensor.shape)
            for tensor, offset in zip(tensors, offsets, strict=True)
        ]
        if any(tensor.device.type != "cpu" for tensor in tensors):
            threads = 1  # devices may be used by the training thread only
        for _ in in_order(_copy, zip(copies, tensors, strict=True), threads):
            pass
        return copies


def _copy(pair: tuple[torch.Tensor, torch.Tensor]) -> None:
    with torch.no_grad():
        pair[0].copy_(pair[1])
