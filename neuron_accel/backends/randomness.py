"""The random numbers of a device, seeds that all ranks draw alike, and numbers that differ between ranks."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

SEEDS = 2**63
_ODD = 0x9E3779B97F4A7C15  # 2**64 divided by the golden ratio: neighbouring ranks get seeds far apart


class DeviceGenerator:
    """The default generator of a device that torch knows.

    Args:
        device: where the numbers are drawn.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._where = () if device.type == "cpu" else (device,)

    @property
    def apart(self) -> bool:
        """Whether it is another one than the host's."""
        return self._device.type != "cpu"

    @property
    def _module(self) -> Any:
        return torch.random if self._device.type == "cpu" else torch.get_device_module(self._device)

    def draw_seed(self) -> int:
        """A number from 0 to 2**63 - 2 that ranks seeded alike draw alike."""
        return int(torch.randint(SEEDS - 1, (), dtype=torch.int64))

    def get_state(self) -> Any:
        return self._module.get_rng_state(*self._where)

    def set_state(self, state: Any) -> None:
        self._module.set_rng_state(state, *self._where)

    def seed(self, value: int) -> None:
        """Seeds this device alone."""
        if self._device.type == "cpu":
            torch.default_generator.manual_seed(value)  # not torch.manual_seed, which would seed every device
        else:
            self._module.manual_seed(value)


class XlaGenerator(DeviceGenerator):
    """The generator of an XLA device: one integer, which enters graphs as data.

    Seeds come from it, too, and not from the host's generator: threads that are ranks share that one.
    """

    def draw_seed(self) -> int:
        state = int(self.get_state())
        # One step of a full-period linear congruential generator modulo 2**63 (Knuth's MMIX constants), so that the
        # next seed is another one.
        self.seed((state * 6364136223846793005 + 1442695040888963407) % SEEDS)
        return state % (SEEDS - 1)

    def get_state(self) -> int:
        import torch_xla.core.xla_model as xm

        return xm.get_rng_state(str(self._device))

    def set_state(self, state: int) -> None:
        import torch_xla.core.xla_model as xm

        xm.set_rng_state(state, str(self._device))

    def seed(self, value: int) -> None:
        self.set_state(value)


class RankRandomness:
    """Gives each rank its own random numbers between :meth:`begin` and :meth:`end`, although all are seeded alike.

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

    @property
    def differs(self) -> bool:
        """Whether ranks draw different numbers now."""
        return self._saved is not None

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

    @contextmanager
    def apart(self) -> Iterator[None]:
        """Ranks draw different numbers inside, wherever that is."""
        if self.differs:
            yield
            return
        self.begin(True)
        try:
            yield
        finally:
            self.end()

    @contextmanager
    def together(self) -> Iterator[None]:
        """Ranks draw the same numbers inside, also between :meth:`begin` and :meth:`end`."""
        if not self.differs:
            yield
            return
        own = self._generator.get_state()
        self._generator.set_state(self._saved)
        try:
            yield
        finally:
            self._saved = self._generator.get_state()
            self._generator.set_state(own)
