"""Memory of the host."""

from __future__ import annotations

import ctypes
import sys


def return_freed_memory() -> None:
    """Gives back to the system what the C library keeps of memory that was freed.

    glibc's allocator keeps freed memory below its limit for a mapping of its own (32 MiB once it has grown), and memory
    below something that is still in use. After the weights of a model have moved, that can be as much as the model.
    Does nothing with other C libraries.
    """
    if not sys.platform.startswith("linux"):
        return
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)
