# SPDX-License-Identifier: Apache-2.0
"""Random numbers of a device: seeds that are equal on all ranks, and numbers that differ between ranks."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

SEEDS = 2**63
_ODD = 0x9E3779B97F4A7C15  # 2**64 divided by the golden ratio: neighbouring ranks get seeds far apart


class DeviceGenerator:
    """The default random number generator of a torch device.

    Args:
        device: where the numbers are drawn. The meta device, which draws none, has the generator of the CPU.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = torch.device("cpu") if device.type == "meta" else device
        device = self._device
        self._where = () if device.type == "cpu" else (device,)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self._device!r})"

    @property
    def apart(self) -> bool:
        """Whether this is another generator than the CPU's."""
        return self._device.type != "cpu"

    @property
    def _module(self) -> Any:
        return torch.random if self._device.type == "cpu" else torch.get_device_module(self._device)

    def draw_seed(self) -> int:
        """Draws a seed from 0 to 2**63 - 2. It is equal on ranks whose generators have equal state."""
        return int(torch.randint(SEEDS - 1, (), dtype=torch.int64))

    def get_state(self) -> Any:
        return self._module.get_rng_state(*self._where)

    def set_state(self, state: Any) -> None:
        self._module.set_rng_state(state, *self._where)

    def seed(self, value: int) -> None:
        """Seeds the generator of this device and no other."""
        if self._device.type == "cpu":
            torch.default_generator.manual_seed(value)  # not torch.manual_seed, which would seed every device
        else:
            self._module.manual_seed(value)


class XlaGenerator(DeviceGenerator):
    """The generator of an XLA device. Its state is one integer, which is an input of graphs.

    Seeds are drawn from it as well, not from the CPU's generator, which ranks that are threads share.
    """

    def draw_seed(self) -> int:
        state = int(self.get_state())
        # One step of a linear congruential generator of full period modulo 2**63 (Knuth's MMIX constants), so that the
        # next seed differs.
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
    """Gives each rank different random numbers between :meth:`begin` and :meth:`end`, although all have equal seeds.

    The seed is computed from a number drawn from a generator with equal state on all ranks and from the rank's index.
    Running again after the generator's state was restored, as activation checkpointing does, draws the same numbers.

    Args:
        device: the device of the generator.
        index: this rank's position among the ranks that draw different numbers.
        generator: generator of the device; torch's default generator by default.
    """

    def __init__(self, device: torch.device, index: int, generator: DeviceGenerator | None = None) -> None:
        self._generator, self._index = generator or DeviceGenerator(device), index
        self._saved: Any = None

    def __repr__(self) -> str:
        now = "different numbers" if self.differs else "equal numbers"
        return f"<{type(self).__name__}: {self._generator!r}, position {self._index}; ranks draw {now}>"

    @property
    def differs(self) -> bool:
        """Whether ranks currently draw different numbers."""
        return self._saved is not None

    def begin(self, draws: bool) -> None:
        """Makes ranks draw different numbers from here on, if ``draws`` is True. If it is False, only discards the
        state of an earlier :meth:`begin` that was not ended because of an error."""
        self._saved = None
        if draws:
            common = self._generator.draw_seed()
            self._saved = self._generator.get_state()
            self._generator.seed((common + (self._index + 1) * _ODD) % SEEDS)

    def end(self) -> None:
        """Makes ranks draw equal numbers again. Has no effect if they already do."""
        if self._saved is not None:
            saved, self._saved = self._saved, None
            self._generator.set_state(saved)

    @contextmanager
    def apart(self) -> Iterator[None]:
        """Context in which ranks draw different numbers."""
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
        """Context in which ranks draw equal numbers, also between :meth:`begin` and :meth:`end`."""
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
