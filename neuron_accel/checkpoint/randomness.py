"""Random numbers of every kind, taken and given back."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from neuron_accel.checkpoint.snapshot import position

if TYPE_CHECKING:
    from neuron_accel.engine.mesh import Mesh

_ODD = 0x9E3779B97F4A7C15  # 2**64 divided by the golden ratio: neighbouring numbers become seeds far apart


def random_state(device: torch.device) -> dict[str, Any]:
    """The state of Python's, numpy's and torch's default generators, and of the device's own."""
    state = {"python": random.getstate(), "numpy": np.random.get_state(), "torch": torch.get_rng_state()}
    module = _device_generator(device)
    if module is not None:
        state["device"] = module.get_rng_state(device)
    return state


def set_random_state(state: dict[str, Any], device: torch.device) -> None:
    """The inverse of :func:`random_state`."""
    version, words, extra = state["python"]
    random.setstate((version, tuple(words), extra))
    np.random.set_state(state["numpy"])
    torch.set_rng_state(state["torch"])
    module = _device_generator(device)
    if module is not None and "device" in state:
        module.set_rng_state(state["device"], device)


def _device_generator(device: torch.device) -> Any:
    if device.type == "cpu":
        return None
    module = torch.get_device_module(device) if hasattr(torch, device.type) else None
    return module if hasattr(module, "get_rng_state") else None


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


def reseed(index: int) -> None:
    """Gives a rank without a saved state its own: a function of the one it was given and its number."""
    seed = (int(torch.randint(2**62, (), dtype=torch.int64)) + index * _ODD) % 2**63
    torch.manual_seed(seed)
    random.seed(seed)
    np.random.seed(seed % 2**32)
