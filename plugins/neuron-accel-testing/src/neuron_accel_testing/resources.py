# SPDX-License-Identifier: Apache-2.0
"""Resources of a process according to the kernel and the C library: memory and bytes sent. Linux only."""

from __future__ import annotations

import ctypes
import os
import socket
import struct
from pathlib import Path

_BYTES_SENT = 200  # offset of tcpi_bytes_sent in struct tcp_info, Linux 4.19 and later (include/uapi/linux/tcp.h)


def bytes_sent() -> int:
    """Bytes sent over the open TCP sockets of this process (``tcpi_bytes_sent``), including retransmissions."""
    total = 0
    for entry in Path("/proc/self/fd").iterdir():
        try:
            if not os.readlink(entry).startswith("socket:"):
                continue
            with socket.socket(fileno=os.dup(int(entry.name))) as connection:
                info = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 256)
        except OSError:  # closed in the meantime, or not a TCP socket
            continue
        if len(info) >= _BYTES_SENT + 8:
            total += struct.unpack_from("Q", info, _BYTES_SENT)[0]
    return total


_MALLINFO = "arena ordblks smblks hblks hblkhd usmblks fsmblks uordblks fordblks keepcost"


class _Malloc(ctypes.Structure):
    """glibc's ``struct mallinfo2``."""

    _fields_ = [(name, ctypes.c_size_t) for name in _MALLINFO.split()]


def allocated_bytes() -> int:
    """Bytes that glibc's malloc, 2.33 or later, has handed out to this process (``mallinfo2``): unlike resident memory
    it falls at once when memory is freed."""
    library = ctypes.CDLL(None)
    library.mallinfo2.restype = _Malloc
    found = library.mallinfo2()
    return int(found.uordblks + found.hblkhd)


class PeakMemory:
    """Measures the peak of the resident memory of this process above that at construction."""

    def __init__(self) -> None:
        Path("/proc/self/clear_refs").write_text("5")  # resets the high-water mark, see proc_pid_clear_refs(5)
        self._before = _status("VmRSS")

    def __repr__(self) -> str:
        return f"<{type(self).__name__}: {self.bytes() / 2**20:.1f} MiB since construction>"

    def bytes(self) -> int:
        """The peak since construction, minus the resident memory at construction, in bytes."""
        return _status("VmHWM") - self._before


def _status(field: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(field + ":"):
            return int(line.split()[1]) * 1024
    raise OSError(f"/proc/self/status has no {field}")
