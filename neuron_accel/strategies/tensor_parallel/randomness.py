"""Random numbers that differ between ranks for a while, although all ranks are seeded alike."""

from __future__ import annotations

from typing import Any

import torch

from neuron_accel.backends.randomness import SEEDS, DeviceGenerator

_ODD = 0x9E3779B97F4A7C15  # 2**64 divided by the golden ratio: neighbouring ranks get seeds far apart


class RankRandomness:
    """Gives each rank its own random numbers between :meth:`begin` and :meth:`end`.

    The seed comes from a generator that is alike on all ranks, and the rank's index. Nothing else is kept, so running
    again from a restored generator, as activation checkpointing does, draws the same numbers again.

    Args:
        device: where the numbers are drawn.
        index: this rank's position among those that shall differ.
        generator: of the device; torch's own by default.
    """

    def __init__(self, device: torch.device, index: int, generator: DeviceGenerator | None = None) -> None:
        self._generator, self._index = generator or DeviceGenerator(device), index
        self._saved: Any = None

    def begin(self, draws: bool) -> None:
        """From here on ranks differ, if ``draws``. Without, an earlier :meth:`begin` that an error left open is
        forgotten."""
        self._saved = None
        if draws:
            common = self._generator.draw_seed()
            self._saved = self._generator.get_state()
            self._generator.seed((common + (self._index + 1) * _ODD) % SEEDS)

    def end(self) -> None:
        """From here on ranks agree again. Does nothing if they do."""
        if self._saved is not None:
            saved, self._saved = self._saved, None
            self._generator.set_state(saved)
