# SPDX-License-Identifier: Apache-2.0
"""Initializes torch's default process group, and checks whether it supports a device."""

from __future__ import annotations

import contextlib
import os
import queue
import threading
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from neuron_accel.backends.group import reported
from neuron_accel.doors import TRANSPORTS, entry_points
from neuron_accel.errors import ConfigurationError, UsageError

DEFAULT_TIMEOUT = timedelta(minutes=30)
"""Timeout of a collective. It is long because one rank may prepare data while the others wait; a process that ends
closes its connections, which is noticed at once."""

_LIBRARIES = {"cpu": "gloo", "cuda": "nccl", "neuron": "neuron"}


def installed_library() -> str:
    """Returns what connects CPU ranks: the backend of torch.distributed of an installed package, registered, or gloo.

    Raises:
        ConfigurationError: if several packages have one, or it cannot be imported.
    """
    found = entry_points(TRANSPORTS)
    if len(found) > 1:
        raise ConfigurationError(
            "Several installed packages connect CPU ranks.",
            where=", ".join(f"{each.name} ({each.value})" for each in found),
            why="all ranks must use the same one",
            fix="uninstall all but one",
        )
    for each in found:
        try:
            each.load()
        except ImportError as error:
            raise ConfigurationError(
                f"The package that connects CPU ranks cannot be imported: {error}",
                where=f"entry point {each.name!r} = {each.value!r} of {TRANSPORTS}",
                fix="repair or uninstall it",
            ) from error
        return each.name
    return _LIBRARIES["cpu"]


def join(device: torch.device | str, timeout: timedelta | None, cpu_library: str = "gloo") -> tuple[torch.device, bool]:
    """Initializes the default process group if the environment describes several ranks and it is not initialized yet.

    Args:
        device: of this rank.
        timeout: of a collective.
        cpu_library: torch's name of what connects ranks if the device is the CPU.

    Returns:
        The device of this rank, with its index, and whether the default process group was initialized here.

    Raises:
        UsageError: if there is no such device, or the existing process group does not support it.
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
        library = cpu_library if device.type == "cpu" else _LIBRARIES[device.type]
        dist.init_process_group(library, timeout=timeout or DEFAULT_TIMEOUT)
    return _with_index(device), True  # the native neuron device must not be used before this


def parse(device: torch.device | str) -> torch.device:
    """Returns the device of that name.

    Raises:
        UsageError: if the torch backend does not support it, or this machine has none.
    """
    kind = str(device).partition(":")[0]
    if kind not in _LIBRARIES:
        known = ", ".join(_LIBRARIES)
        raise UsageError(f"The torch backend does not support device {kind!r}.", fix=f"use one of {known}")
    try:
        present = kind == "cpu" or torch.get_device_module(kind).is_available()
    except RuntimeError:  # the package that adds the device is not installed
        present = False
    if not present:
        raise UsageError(
            f"torch finds no device {kind!r} on this machine.", fix="let the backend be chosen, or use cpu"
        )
    return torch.device(device)


def library_of_default(device: str) -> str | None:
    """Returns what the default process group uses for tensors on devices of a type; None if it does not support them,
    or there is no group."""
    if not dist.is_initialized():
        return None
    return dict(pair.split(":", 1) for pair in dist.get_backend_config().split(",")).get(device)  # "cpu:gloo,cuda:nccl"


def check_serves(device: torch.device) -> None:
    """Raises a UsageError if the default process group does not support tensors on ``device``."""
    served, library = dist.get_backend_config(), library_of_default(device.type)
    if library is None or (library == "gloo" and device.type != "cpu"):
        raise UsageError(
            f"The existing process group ({served}) does not support device {device.type!r}.",
            why="its collectives cannot be used with tensors on that device",
            fix="choose the backend that fits the group (NEURON_ACCEL_BACKEND, cpu=True), or do not initialize one: "
            "NeuronAccelerator does",
        )


def _with_index(device: torch.device) -> torch.device:
    """Returns the device of this rank, with its index on this machine."""
    if device.type == "cpu" or device.index is not None:
        return device
    if device.type == "cuda":
        return torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")) % torch.cuda.device_count())
    return torch.device(device.type, torch.get_device_module(device.type).current_device())  # one core is visible


# ---- point-to-point messages and gloo's threads ----------------------------------------------------------------------
_PROBE = timedelta(minutes=2)
"""Timeout of the first message, for which the device compiles both sending and receiving."""
_SENT = 20261.0


def probe_point_to_point(device: torch.device, hosts: Any, timeout: timedelta | None) -> str | None:
    """Tries to send a number from rank 0 to rank 1. Collective over all ranks; returns the same result on each.

    Args:
        hosts: a gloo group of all ranks.
        timeout: timeout of a collective. The message must arrive within half of it, and within two minutes.

    Returns:
        The reason why ranks cannot send to each other, or None if they can.
    """
    seconds = min(_PROBE, (timeout or DEFAULT_TIMEOUT) / 2).total_seconds()
    mine = _try_sending(device, seconds) if dist.get_rank() < 2 else None
    answers: list[str | None] = [None] * dist.get_world_size()
    with reported("connect", f"rank {dist.get_rank()}, exchanging the results of the attempt to send"):
        dist.all_gather_object(answers, mine, group=hosts)
    return next((answer for answer in answers if answer is not None), None)


def _try_sending(device: torch.device, seconds: float) -> str | None:
    rank, outcome = dist.get_rank(), queue.SimpleQueue[str | None]()

    def attempt() -> None:
        try:
            message = torch.full((1,), _SENT if rank == 0 else 0.0, device=device)
            work = dist.isend(message, 1) if rank == 0 else dist.irecv(message, 0)
            if work is not None:
                work.wait()
            arrived = message.cpu().item()
            outcome.put(None if arrived == _SENT else f"{arrived} arrived on rank {rank} where {_SENT} was sent")
        except Exception as error:  # devices raise various types for an unsupported operation
            text = str(error).strip().partition("\n")[0]
            outcome.put(f"{'sending' if rank == 0 else 'receiving'} raised {type(error).__name__}: {text}")

    threading.Thread(target=attempt, name="probe-point-to-point", daemon=True).start()
    try:
        return outcome.get(timeout=seconds)
    except queue.Empty:
        return f"a message from rank 0 to rank 1 was not complete on rank {rank} after {seconds:g} s"


def let_threads_finish(limit: float = 1.0) -> None:
    """Waits until gloo's threads are idle, at most ``limit`` seconds.

    A collective is reported as complete shortly before its thread releases its tensors, for which the thread may need
    the GIL. If the interpreter is shutting down by then, the process aborts ("terminate called without an active
    exception"); if a destructor that holds the GIL joins the thread, both wait forever (PyTorch issue 56297). The
    threads of a destroyed group continue to run, so they cannot be joined.
    """
    deadline, at_rest = time.monotonic() + limit, 0
    while at_rest < 2 and time.monotonic() < deadline:
        time.sleep(0.002)  # releases the GIL
        at_rest = 0 if _gloo_is_running() else at_rest + 1


def _gloo_is_running() -> bool:
    for stat in Path("/proc/self/task").glob("*/stat"):  # none where there is no such file system
        with contextlib.suppress(OSError):
            name, _, state = stat.read_text().partition(" (")[2].rpartition(") ")
            if "gloo" in name and state.startswith("R"):
                return True
    return False
