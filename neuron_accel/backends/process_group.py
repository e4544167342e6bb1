"""Torch's default process group: whether it fits a device, and making it."""

from __future__ import annotations

import os
from datetime import timedelta

import torch
import torch.distributed as dist

from neuron_accel.backends.failures import reported
from neuron_accel.engine.errors import UsageError

DEFAULT_TIMEOUT = timedelta(minutes=30)
"""How long a collective may wait for a peer that lives: one rank may prepare data while the others wait. A peer that
dies closes its connections and is noticed at once."""

_LIBRARIES = {"cpu": "gloo", "cuda": "nccl", "neuron": "neuron"}


def join(device: torch.device | str, timeout: timedelta | None) -> tuple[torch.device, bool]:
    """Sees to it that the ranks which the environment speaks of are connected.

    Returns:
        The device of this rank, with its index, and whether the default process group was made here.

    Raises:
        UsageError: if there is no such device, or the process group that exists does not serve it.
        CommunicationError: if the other ranks cannot be reached.
    """
    device = parse(device)
    if dist.is_initialized():
        check_serves(device)
        return _with_index(device), False
    if int(os.environ.get("WORLD_SIZE", "1")) <= 1:
        return _with_index(device), False
    if device.type == "cuda":  # nccl binds a communicator to the current device
        device = _with_index(device)
        torch.cuda.set_device(device)
    with reported("connect", f"rank {os.environ.get('RANK', '?')} of {os.environ['WORLD_SIZE']}"):
        dist.init_process_group(_LIBRARIES[device.type], timeout=timeout or DEFAULT_TIMEOUT)
    return _with_index(device), True  # native neuron allows no use of the device before this


def parse(device: torch.device | str) -> torch.device:
    """The device of that name.

    Raises:
        UsageError: if the torch backend does not serve it, or this machine has none.
    """
    kind = str(device).partition(":")[0]
    if kind not in _LIBRARIES:
        known = ", ".join(_LIBRARIES)
        raise UsageError(f"The torch backend does not serve device {kind!r}.", fix=f"use one of {known}")
    try:
        present = kind == "cpu" or torch.get_device_module(kind).is_available()
    except RuntimeError:  # the package that adds the device is not installed
        present = False
    if not present:
        raise UsageError(
            f"torch finds no device {kind!r} on this machine.", fix="let the backend be chosen, or use cpu"
        )
    return torch.device(device)


def check_serves(device: torch.device) -> None:
    """Raises a UsageError if the default process group cannot reach tensors on ``device``."""
    served = dist.get_backend_config()  # "cpu:gloo,cuda:nccl"
    library = dict(pair.split(":", 1) for pair in served.split(",")).get(device.type)
    if library is None or (library == "gloo" and device.type != "cpu"):
        raise UsageError(
            f"The process group that exists ({served}) does not serve device {device.type!r}.",
            why="its collectives cannot reach tensors that live there",
            fix="choose the backend that fits it (NEURON_ACCEL_BACKEND, cpu=True), or leave making it to this project",
        )


def _with_index(device: torch.device) -> torch.device:
    """The device of this rank among those of its machine."""
    if device.type == "cpu" or device.index is not None:
        return device
    if device.type == "cuda":
        return torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")) % torch.cuda.device_count())
    return torch.device(device.type, torch.get_device_module(device.type).current_device())  # one core is visible
