"""Properties of this machine that the launcher and ``neuron-accel env`` use."""

from __future__ import annotations

import os
import re
import socket
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, kw_only=True)
class Host:
    """This machine as the launcher sees it.

    Args:
        cores: CPU cores that this process may run on.
        loopback: name of the loopback network interface; None if there is none.
        torch_xla: whether torch_xla is installed.
        neuron: whether the machine has Neuron devices.
        instance: type of the Trainium instance; None if it is not recognised.
        product: the product name in its firmware (DMI); None if there is none.
        kernel: major and minor version of Linux; None on other systems.
        name: host name.
        mounts: mount point and type of every file system.
    """

    cores: int
    loopback: str | None
    torch_xla: bool
    neuron: bool = False
    instance: str | None = None
    product: str | None = None
    kernel: tuple[int, int] | None = None
    name: str = ""
    mounts: tuple[tuple[str, str], ...] = ()


def count_cores() -> int:
    """Number of CPU cores that this process may use, which taskset, Slurm or a container may limit."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def memory_bytes() -> int:
    """Memory of the machine in bytes, regardless of the limit of a container."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def kernel_version(release: str) -> tuple[int, int] | None:
    """Major and minor version of a Linux release such as ``5.10.224-212.876.amzn2.x86_64``."""
    found = re.match(r"(\d+)\.(\d+)", release)
    return (int(found[1]), int(found[2])) if found else None


def find_loopback() -> str | None:
    """Name of the loopback network interface, or None."""
    names = [name for _, name in socket.if_nameindex()]
    return next((name for name in ("lo", "lo0") if name in names), None)


def count_neuron_devices(devices: Path = Path("/dev")) -> int:
    """Number of Neuron devices (chips, each with several cores) in the folder ``devices``."""
    return sum(path.name.removeprefix("neuron").isdigit() for path in devices.glob("neuron*"))


def read_mounts(root: Path = Path("/")) -> tuple[tuple[str, str], ...]:
    """Mount point and type of every file system, in the order of ``root/proc/mounts``; empty if that is missing."""
    try:
        lines = (root / "proc" / "mounts").read_text(errors="replace").splitlines()
    except OSError:
        return ()
    fields = [line.split() for line in lines]
    return tuple((re.sub(r"\\([0-7]{3})", lambda code: chr(int(code[1], 8)), f[1]), f[2]) for f in fields if len(f) > 2)
