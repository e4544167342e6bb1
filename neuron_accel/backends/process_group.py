"""Torch's default process group: whether it fits a device, and making it."""

from __future__ import annotations

import contextlib
import os
import time
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

from neuron_accel.backends.failures import reported
from neuron_accel.errors import UsageError

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


def let_threads_finish(limit: float = 1.0) -> None:
    """Waits until gloo's threads are at rest, ``limit`` seconds at most.

    A collective counts as complete a moment before the thread that ran it lets go of its tensors, for which it may need
    the interpreter. If that is being torn down by then, the process aborts ("terminate called without an active
    exception"); if a destructor that holds it joins them, both wait for ever (PyTorch issue 56297). Threads of a
    destroyed group live on, so there is nothing to join.
    """
    deadline, at_rest = time.monotonic() + limit, 0
    while at_rest < 2 and time.monotonic() < deadline:
        time.sleep(0.002)  # gives the interpreter away
        at_rest = 0 if _gloo_is_running() else at_rest + 1


def _gloo_is_running() -> bool:
    for stat in Path("/proc/self/task").glob("*/stat"):  # none where there is no such file system
        with contextlib.suppress(OSError):
            name, _, state = stat.read_text().partition(" (")[2].rpartition(") ")
            if "gloo" in name and state.startswith("R"):
                return True
    return False
