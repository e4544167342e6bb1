"""Random numbers that differ between ranks for a while, although all ranks are seeded alike."""

from __future__ import annotations

from typing import Any

import torch

_ODD = 0x9E3779B97F4A7C15  # 2**64 divided by the golden ratio: neighbouring ranks get seeds far apart
_SEEDS = 2**63


class RankRandomness:
    """Gives each rank its own random numbers between :meth:`begin` and :meth:`end`.

    The seed comes from the default generator, which is alike on all ranks, and the rank's index. Nothing else is kept,
    so running again from a restored generator, as activation checkpointing does, draws the same numbers again.

    Args:
        device: where the numbers are drawn.
        index: this rank's position among those that shall differ.
    """

    def __init__(self, device: torch.device, index: int) -> None:
        self._device, self._index = device, index
        self._saved: torch.Tensor | None = None

    def begin(self, draws: bool) -> None:
        """From here on ranks differ, if ``draws``. Without, an earlier :meth:`begin` that an error left open is
        forgotten."""
        self._saved = None
        if draws:
            common = int(torch.randint(_SEEDS - 1, (), dtype=torch.int64))
            self._saved = _generator(self._device).get_rng_state(*self._where())
            _seed(self._device, (common + (self._index + 1) * _ODD) % _SEEDS)

    def end(self) -> None:
        """From here on ranks agree again. Does nothing if they do."""
        if self._saved is not None:
            saved, self._saved = self._saved, None
            _generator(self._device).set_rng_state(saved, *self._where())

    def _where(self) -> tuple[Any, ...]:
        return () if self._device.type == "cpu" else (self._device,)


def _generator(device: torch.device) -> Any:
    return torch.random if device.type == "cpu" else torch.get_device_module(device)


def _seed(device: torch.device, seed: int) -> None:
    if device.type == "cpu":
        # not torch.manual_seed, which would seed every device
        torch.default_generator.manual_seed(seed)
    else:
        torch.get_device_module(device).manual_seed(seed)
