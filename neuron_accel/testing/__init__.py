# SPDX-License-Identifier: Apache-2.0
"""Public helpers for testing strategies, and models with strategies.

- :func:`run_ranks` calls a function on several ranks of this machine: with gloo, with torch_xla on the CPU, or on what
  other packages add (:mod:`~neuron_accel.testing.devices`).
- :func:`assert_parallel_equivalence` compares training a model with plugins to training it in one process.
- :class:`PluginConformance` is a pytest class that checks whether a plugin follows the contract.

``emulated_instance``, ``EmulatedInstance`` and ``check_graphs`` are in the package neuron-accel-emulation; where it is
installed, they can be imported from here. Names are imported when they are first used: only :class:`PluginConformance`
needs pytest.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from neuron_accel_emulation import EmulatedInstance as EmulatedInstance
    from neuron_accel_emulation import check_graphs as check_graphs
    from neuron_accel_emulation import emulated_instance as emulated_instance

    from neuron_accel.testing.conformance import PluginConformance as PluginConformance
    from neuron_accel.testing.parity import Tolerance as Tolerance
    from neuron_accel.testing.parity import Trace as Trace
    from neuron_accel.testing.parity import Training as Training
    from neuron_accel.testing.parity import assert_parallel_equivalence as assert_parallel_equivalence
    from neuron_accel.testing.parity import compare as compare
    from neuron_accel.testing.parity import train_alone as train_alone
    from neuron_accel.testing.parity import train_on_rank as train_on_rank
    from neuron_accel.testing.rank_errors import RankExit as RankExit
    from neuron_accel.testing.rank_errors import RanksError as RanksError
    from neuron_accel.testing.rank_errors import RankTimeout as RankTimeout
    from neuron_accel.testing.ranks import run_ranks as run_ranks
    from neuron_accel.testing.resources import PeakMemory as PeakMemory
    from neuron_accel.testing.resources import bytes_sent as bytes_sent
    from neuron_accel.testing.xla_ranks import one_at_a_time as one_at_a_time

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
        return getattr(importlib.import_module(f"{__name__}.{_WHERE[name]}"), name)
    if name in _MOVED:
        from neuron_accel.doors import moved

        return moved(name, __name__, "neuron-accel-emulation")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *_WHERE})
