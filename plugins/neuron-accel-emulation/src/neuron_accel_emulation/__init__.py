# SPDX-License-Identifier: Apache-2.0
"""Trainium without Trainium, for tests: emulated Neuron cores, a stand-in for the native device, and checks of graphs.

- :func:`emulated_instance` emulates a machine with Neuron cores, for ranks of torch_xla and for commands.
- :mod:`~neuron_accel_emulation.native_ranks` is the stand-in: ``run_ranks(..., backend="native")``.
- :func:`check_graphs` checks the graphs of a training against the limits of the Neuron compiler and an instance.

Names are imported when they are first used.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from neuron_accel_emulation.graph_report import Graph as Graph
    from neuron_accel_emulation.graph_report import GraphReport as GraphReport
    from neuron_accel_emulation.graph_rules import Finding as Finding
    from neuron_accel_emulation.graphs import check_graphs as check_graphs
    from neuron_accel_emulation.native_ranks import Counts as Counts
    from neuron_accel_emulation.native_ranks import StandIn as StandIn
    from neuron_accel_emulation.native_ranks import counts as counts
    from neuron_accel_emulation.neuron_ranks import Compilation as Compilation
    from neuron_accel_emulation.neuron_ranks import EmulatedInstance as EmulatedInstance
    from neuron_accel_emulation.neuron_ranks import emulated_instance as emulated_instance

_WHERE = {
    "Compilation": "neuron_ranks",
    "Counts": "native_ranks",
    "EmulatedInstance": "neuron_ranks",
    "Finding": "graph_rules",
    "Graph": "graph_report",
    "GraphReport": "graph_report",
    "StandIn": "native_ranks",
    "check_graphs": "graphs",
    "counts": "native_ranks",
    "emulated_instance": "neuron_ranks",
}

__all__ = [*_WHERE]
__version__ = "0.1.0"


def __getattr__(name: str) -> Any:
    if name in _WHERE:
        return getattr(importlib.import_module(f"{__name__}.{_WHERE[name]}"), name)
    if name == "native_ranks":
        return importlib.import_module(f"{__name__}.{name}")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *_WHERE})
