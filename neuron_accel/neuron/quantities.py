# SPDX-License-Identifier: Apache-2.0
"""Parsing and formatting of sizes and durations."""

from __future__ import annotations

import math
import re

from neuron_accel.errors import ConfigurationError

_SIZES = {"": 1, "B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}
_SIZES |= {"KIB": 2**10, "MIB": 2**20, "GIB": 2**30, "TIB": 2**40, "K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}
_SECONDS = {"": 1.0, "S": 1.0, "MIN": 60.0, "H": 3600.0, "D": 86400.0, "W": 604800.0}
_QUANTITY = re.compile(r"\s*([0-9]+(?:\.[0-9]+)?)\s*([A-Za-z]*)\s*\Z")


def parse_size(value: int | str, where: str) -> int:
    """Returns a size in bytes.

    Args:
        value: a number of bytes, or text such as ``"200GB"`` (10^9 bytes) or ``"50GiB"``, ``"50G"`` (2^30 bytes).
        where: the name of the option, for the error message.

    Raises:
        ConfigurationError: if it is not a size.
    """
    return int(_parse(value, _SIZES, where, "a size", "200GB, 50GiB, or a number of bytes"))


def parse_duration(value: float | str, where: str) -> float:
    """Returns a duration in seconds.

    Args:
        value: a number of seconds, or text such as ``"30d"``, ``"12h"``, ``"90min"``.
        where: the name of the option, for the error message.

    Raises:
        ConfigurationError: if it is not a duration.
    """
    return _parse(value, _SECONDS, where, "a duration", "30d, 12h, 90min, or a number of seconds")


def _parse(value: float | str, units: dict[str, float] | dict[str, int], where: str, what: str, like: str) -> float:
    if isinstance(value, (int, float)) and not isinstance(value, bool) and value >= 0 and math.isfinite(value):
        return value
    found = _QUANTITY.match(value) if isinstance(value, str) else None
    if found is None or found[2].upper() not in units:
        raise ConfigurationError(f"{value!r} is not {what}.", where=where, fix=f"write it like {like}")
    return float(found[1]) * units[found[2].upper()]


def format_size(count: float) -> str:
    """Formats a number of bytes, such as ``"1.5 GiB"``."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if count < 1024:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1024
    return f"{count:.1f} TiB"


def format_duration(seconds: float) -> str:
    """Formats a duration in the largest unit that fits, such as ``"3 d"``."""
    for name, unit in (("d", 86400), ("h", 3600), ("min", 60)):
        if seconds >= unit:
            return f"{seconds / unit:.0f} {name}"
    return f"{max(seconds, 0):.0f} s"
