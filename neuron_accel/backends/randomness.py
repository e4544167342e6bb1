"""The random numbers of a device, and seeds that all ranks draw alike."""

from __future__ import annotations

from typing import Any

import torch

SEEDS = 2**63


class DeviceGenerator:
    """The default generator of a device that torch knows.

    Args:
        device: where the numbers are drawn.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._where = () if device.type == "cpu" else (device,)

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
