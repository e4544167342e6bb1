# SPDX-License-Identifier: Apache-2.0
"""Environment variables of Neuron training: their meaning, valid values, and remarks."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from neuron_accel.errors import ConfigurationError
from neuron_accel.neuron.facts import FACTS

PRECOMPILE_TOOL = "neuron_parallel_compile"
"""The command that runs a script to collect its graphs, with ``NEURON_EXTRACT_GRAPHS_ONLY`` set."""
STEPS_VARIABLE = "NEURON_ACCEL_PRECOMPILE_STEPS"
"""Variable with the number of optimizer steps after which such a run ends."""


@dataclass(frozen=True, kw_only=True)
class Setting:
    """An environment variable for the ranks, with the reason. Only a ``binding`` one overrides the environment."""

    name: str
    value: str
    why: str
    binding: bool = False


# ---- The variables: their meaning, default and valid values ----------------------------------------------------------
# The rows are in facts.json. An invalid value is an error; a variable without effect, or with a misleading name, causes
# a remark.
Way = Literal["xla", "native", "both"]

_PATTERNS = {
    "name": (r"\w+", "a name"),
    "word": (r"\S+", "a name"),
    "address": (r".+:\d{1,5}", "address:port"),
    "counts": (r"\d+(,\d+)*", "1,1,..."),
}


def visible_cores(value: str) -> list[int]:
    """Parses a value of NEURON_RT_VISIBLE_CORES, such as ``0-3`` or ``0,1``."""
    found: list[int] = []
    for part in value.split(","):
        first, _, last = part.partition("-")
        found += range(int(first), int(last or first) + 1)
    return found


def _are_cores(value: str) -> bool:
    """Whether the value is a list of cores and ranges of cores, ascending and without gaps."""
    if not re.fullmatch(r"\d+(-\d+)?(,\d+(-\d+)?)*", value):
        return False
    cores = visible_cores(value)
    return bool(cores) and cores == list(range(cores[0], cores[0] + len(cores)))


@dataclass(frozen=True, kw_only=True)
class Variable:
    """One variable.

    Args:
        meaning: what it does.
        default: the behaviour without it.
        values: ``0|1`` for words, ``>=1`` or ``0..63`` for integers, ``cores``, or one of name, word, address and
            counts; None: all values are valid.
        path: which path reads it: "xla", "native", or "both".
        remark: a warning for users who set it, or None.
        source: a key of the sources in ``facts.json``.
    """

    meaning: str
    default: str
    path: Way
    source: str
    values: str | None = None
    remark: str | None = None

    def valid_values(self, value: str) -> str | None:
        """Returns None if ``value`` is valid, else a description of valid values."""
        allowed = self.values
        if allowed is None:
            return None
        if allowed == "cores":
            return None if _are_cores(value) else "ascending cores without gaps, such as 3, 0-3 or 0,1"
        if allowed in _PATTERNS:
            pattern, form = _PATTERNS[allowed]
            return None if re.fullmatch(pattern, value) else form
        if "|" in allowed:
            return None if value.lower() in allowed.split("|") else allowed.replace("|", " or ")
        low, _, high = allowed.removeprefix(">=").partition("..")
        form = f"an integer from {low} to {high}" if high else f"an integer of at least {low}"
        return None if value.isdecimal() and int(low) <= int(value) <= int(high or value) else form


VARIABLES: Mapping[str, Variable] = {
    row["name"]: Variable(**{key: value for key, value in row.items() if key != "name"}) for row in FACTS["variables"]
}


@dataclass(frozen=True, kw_only=True)
class Remark:
    """A remark on a variable that is set."""

    name: str
    value: str
    text: str


def review(environ: Mapping[str, str], path: Way = "both") -> list[Remark]:
    """Checks the variables that are set.

    Args:
        environ: environment variables.
        path: the path of the run, "xla" or "native"; a variable that only the other one reads causes a remark.

    Returns:
        the remarks.

    Raises:
        ConfigurationError: if a value is not valid.
    """
    remarks = []
    for name, variable in VARIABLES.items():
        value = environ.get(name, "").strip()
        if not value:
            continue
        form = variable.valid_values(value)
        if form:
            raise ConfigurationError(
                f"{name}={value} is not valid.",
                where=f"environment variable {name}: {variable.meaning}",
                fix=f"set it to {form}, or unset it ({variable.default})",
            )
        if path not in ("both", variable.path) and variable.path != "both":
            other = "native device" if variable.path == "native" else "XLA path"
            remarks.append(Remark(name=name, value=value, text=f"no effect: only the {other} reads it"))
        elif variable.remark and value.lower() not in ("0", "false"):
            remarks.append(Remark(name=name, value=value, text=variable.remark))
    return remarks
