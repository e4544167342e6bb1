# SPDX-License-Identifier: Apache-2.0
"""The public names of ``neuron_accel.testing``, imported when they are first used."""

from __future__ import annotations

import importlib
from typing import Any

_WHERE = {
    "PeakMemory": "resources",
    "PluginConformance": "conformance",
    "RankExit": "rank_errors",
    "RankTimeout": "rank_errors",
    "RanksError": "rank_errors",
    "Tolerance": "parity",
    "Trace": "parity",
    "Training": "parity",
    "assert_parallel_equivalence": "parity",
    "bytes_sent": "resources",
    "compare": "parity",
    "one_at_a_time": "xla_ranks",
    "run_ranks": "ranks",
    "train_alone": "parity",
    "train_on_rank": "parity",
}

_MOVED = ("EmulatedInstance", "check_graphs", "emulated_instance", "native_ranks")
"""Names of the package neuron-accel-emulation."""

__all__ = list(_WHERE)


def __getattr__(name: str) -> Any:
    if name in _WHERE:
        return getattr(importlib.import_module(f"{__package__}.{_WHERE[name]}"), name)
    if name in _MOVED:
        from neuron_accel.doors import moved

        return moved(name, __package__, "neuron-accel-emulation")
    raise AttributeError(f"module {__package__!r} has no attribute {name!r}")
