"""What the launcher and ``env`` need to know about this machine, beyond what decides the backend."""

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
        loopback: name of the loopback network interface, if there is one.
        torch_xla: whether torch_xla is installed.
        neuron: whether it has Neuron devices.
        instance: the type of Trainium instance that it is, if it is one that is known.
        product: what it says it is; None where it does not say it.
        kernel: major and minor version of Linux; None elsewhere.
        name: its host name.
        mounts: where file systems are mounted, and their types.
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
    """Cores that this process may use, which taskset, Slurm and containers can make fewer than there are."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def memory_bytes() -> int:
    """The machine's memory; a container's limit is not looked at."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def kernel_version(release: str) -> tuple[int, int] | None:
    """Major and minor version from a release of Linux such as ``5.10.224-212.876.amzn2.x86_64``."""
    found = re.match(r"(\d+)\.(\d+)", release)
    return (int(found[1]), int(found[2])) if found else None


def find_loopback() -> str | None:
    names = [name for _, name in socket.if_nameindex()]
    return next((name for name in ("lo", "lo0") if name in names), None)


def count_neuron_devices(devices: Path = Path("/dev")) -> int:
    """Neuron devices (chips, each with several cores) whose driver files are in ``devices``."""
    return sum(path.name.removeprefix("neuron").isdigit() for path in devices.glob("neuron*"))


def read_mounts(root: Path = Path("/")) -> tuple[tuple[str, str], ...]:
    """Where file systems are mounted and their types, in the order of ``root/proc/mounts``; none where that is
    missing."""
    try:
        lines = (root / "proc" / "mounts").read_text(errors="replace").splitlines()
    except OSError:
        return ()
    fields = [line.split() for line in lines]
    return tuple((re.sub(r"\\([0-7]{3})", lambda code: chr(int(code[1], 8)), f[1]), f[2]) for f in fields if len(f) > 2)
