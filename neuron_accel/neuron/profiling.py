# SPDX-License-Identifier: Apache-2.0
"""What Neuron's runtime needs to record profiles for neuron-profile and Neuron Explorer.

On the XLA path the runtime records them if variables say so when it starts. On the native device torch's profiler turns
recording on itself, and the variables would conflict with it.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, MutableMapping

ENABLE = "NEURON_RT_INSPECT_ENABLE"
FOLDER = "NEURON_RT_INSPECT_OUTPUT_DIR"
DEVICE = "NEURON_RT_INSPECT_DEVICE_PROFILE"
DEFAULT_FOLDER = "neuron_profile"
_NAMES = ("XLA_IR_DEBUG", "XLA_HLO_DEBUG")
"""Give operations the names of modules; read when graphs are compiled."""


def set_profiling_variables(environ: MutableMapping[str, str], folder: str | os.PathLike[str] | None) -> None:
    """Sets the variables that the XLA path needs for profiles, those that are not set. Called before the runtime
    starts.

    Args:
        environ: environment variables.
        folder: where profiles are written; None: :data:`DEFAULT_FOLDER`.
    """
    folder = DEFAULT_FOLDER if folder is None else os.fspath(folder)
    for name, value in ((ENABLE, "1"), (DEVICE, "1"), (FOLDER, folder), *((name, "1") for name in _NAMES)):
        environ.setdefault(name, value)


def profiling_problem(environ: Mapping[str, str], *, native: bool) -> str | None:
    """Returns why a profile that begins now lacks the device, and what to do; None if it does not.

    Args:
        environ: environment variables.
        native: whether this is the native device, else the XLA path.
    """
    enabled = environ.get(ENABLE, "").strip() == "1"
    if native and enabled:
        return (
            f"{ENABLE}=1 conflicts with torch's profiler on the native device, which records the device itself. Unset "
            "it."
        )
    if not native and not enabled:
        return (
            f"The Neuron runtime has started without {ENABLE}=1, so this profile has the host only. Pass a "
            f"ProfileKwargs in kwargs_handlers of the accelerator, which sets what it needs, or set {ENABLE}=1, "
            f"{DEVICE}=1 and {FOLDER} before the start."
        )
    return None
