"""Random numbers of every kind, taken and given back."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from neuron_accel.checkpoint.snapshot import position

if TYPE_CHECKING:
    from neuron_accel.backends.randomness import DeviceGenerator
    from neuron_accel.engine.mesh import Mesh

_ODD = 0x9E3779B97F4A7C15  # 2**64 divided by the golden ratio: neighbouring numbers become seeds far apart


def random_state(device: DeviceGenerator) -> dict[str, Any]:
    """The state of Python's, numpy's and torch's default generators, and of the device's own."""
    state = {"python": random.getstate(), "numpy": np.random.get_state(), "torch": torch.get_rng_state()}
    if device.apart:
        state["device"] = device.get_state()
    return state


def set_random_state(state: dict[str, Any], device: DeviceGenerator) -> None:
    """The inverse of :func:`random_state`. A device of its own that the saved training did not have gets a seed that
    follows from the rest of the state."""
    version, words, extra = state["python"]
    random.setstate((version, tuple(words), extra))
    np.random.set_state(state["numpy"])
    torch.set_rng_state(state["torch"])
    if device.apart:
        if "device" in state:
            device.set_state(state["device"])
        else:
            device.seed(_seed())
            torch.set_rng_state(state["torch"])


def state_for(states: list[dict[str, Any]], saved: Mesh, mesh: Mesh, rank: int) -> tuple[dict[str, Any], int | None]:
    """The saved state that a rank of another mesh goes on with.

    On an equal mesh every rank gets its own. On another, ranks that share data must draw the same numbers, so the state
    comes from the saved ranks that were first along all axes but the data's.

    Returns:
        The state, and the number of a data-parallel rank that the saved mesh did not have: it makes itself a seed from
        the state and this number, so that it does not draw what another rank does.
    """
    if saved == mesh:
        return states[rank], None
    index = position(mesh, mesh.coordinates(rank), mesh.data_axes)
    rows = saved.groups(*saved.data_axes)[0]
    return states[rows[index % len(rows)]], index if index >= len(rows) else None


def reseed(index: int, device: DeviceGenerator) -> None:
    """Gives a rank without a saved state its own: a function of the one it was given and its number."""
    seed = (_seed() + index * _ODD) % 2**63
    torch.manual_seed(seed)
    random.seed(seed)
    np.random.seed(seed % 2**32)
    if device.apart:
        device.seed(seed)


def _seed() -> int:
    return int(torch.randint(2**62, (), dtype=torch.int64))
