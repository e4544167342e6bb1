# SPDX-License-Identifier: Apache-2.0
"""Properties of this machine that the launcher and ``neuron-accel env`` use."""

from __future__ import annotations

import contextlib
import errno
import ipaddress
import os
import re
import socket
import sys
from dataclasses import dataclass
from pathlib import Path

import psutil


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
        interface: on several machines, the network interface towards the rendezvous, if the host name resolves to the
            loopback, which gloo would use; empty if it is the loopback too, None if the host name is right.
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
    interface: str | None = None
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


def listen(host: str, port: int, *, interface: str | None = None) -> socket.socket:
    """Listens for connections to ``host``, on the network interface with its address only.

    If ``host`` is not an address of this machine, as behind address translation, or is a name that only this machine
    resolves to the loopback, it listens at the address of ``interface``, or without one on all interfaces.

    Args:
        host: name or address at which others reach this machine.
        port: the port; 0 for a free one.
        interface: name of a network interface.

    Raises:
        OSError: if the port cannot be used.
    """
    addresses = [*(["127.0.0.1"] if host == "localhost" else []), *_resolve(host)]
    if host != "localhost" and not _is_loopback(host):
        addresses = [address for address in addresses if not _is_loopback(address)]
    for address in [*addresses, *_addresses_of(interface)]:
        try:
            family = socket.AF_INET6 if ":" in address else socket.AF_INET
            return socket.create_server((address, port), family=family)
        except OSError as error:
            if error.errno not in (errno.EADDRNOTAVAIL, errno.EAFNOSUPPORT):
                raise
    where = f"{host} is not an address of this machine"
    print(f"neuron-accel: {where}; its store listens at port {port} of all interfaces", file=sys.stderr, flush=True)
    return socket.create_server(("", port))


def _resolve(host: str) -> list[str]:
    """The addresses of a host name or address; none if it cannot be resolved."""
    with contextlib.suppress(OSError, UnicodeError):
        return [str(where[0]) for *_, where in socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)]
    return []


def address_towards(host: str, interface: str | None = None) -> str | None:
    """The address of this machine for those that meet at ``host``: that of ``interface``, or the one from which
    ``host`` is reached; nothing is sent. None if it is not known."""
    if interface:
        return next(iter(_addresses_of(interface)), None)
    for address in _resolve(host):
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        with contextlib.suppress(OSError), socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect((address, 9))
            found = str(probe.getsockname()[0])
            if not _is_loopback(found) or host == "localhost" or _is_loopback(host):
                return found
    return None


def interface_towards(host: str) -> str | None:
    """See :attr:`Host.interface`."""
    named = _resolve(socket.gethostname())
    if named and not all(map(_is_loopback, named)):
        return None
    address = address_towards(host)
    every = psutil.net_if_addrs().items()
    return next((name for name, found in every if any(one.address == address for one in found)), "")


def must_host(host: str) -> bool | None:
    """Whether the store at ``host`` belongs to this machine, where torch would not find out, since the name of this
    machine resolves to another address or not at all; None where it does."""
    own = {one.address for found in psutil.net_if_addrs().values() for one in found}
    addresses, named = _resolve(host), _resolve(socket.gethostname())
    ours = [address for address in addresses if address in own and not _is_loopback(address)]
    if host in ("localhost", socket.gethostname()) or _is_loopback(host) or (named and not ours):
        return None
    return bool(ours) if not set(addresses) & set(named) else None


def _is_loopback(address: str) -> bool:
    try:
        return ipaddress.ip_address(address.partition("%")[0]).is_loopback
    except ValueError:
        return False


def _addresses_of(interface: str | None) -> list[str]:
    found = psutil.net_if_addrs().get(interface, []) if interface else []
    return [one.address for one in found if one.family in (socket.AF_INET, socket.AF_INET6)]


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
