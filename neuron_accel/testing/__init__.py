# SPDX-License-Identifier: Apache-2.0
"""Public helpers for testing strategies, and models with strategies, in the package neuron-accel-testing.

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
import importlib.util
from pathlib import Path
from typing import TYPE_CHECKING, Any

from neuron_accel.doors import how_to_install

if TYPE_CHECKING:
    from neuron_accel_emulation import EmulatedInstance as EmulatedInstance
    from neuron_accel_emulation import check_graphs as check_graphs
    from neuron_accel_emulation import emulated_instance as emulated_instance
    from neuron_accel_testing.conformance import PluginConformance as PluginConformance
    from neuron_accel_testing.parity import Tolerance as Tolerance
    from neuron_accel_testing.parity import Trace as Trace
    from neuron_accel_testing.parity import Training as Training
    from neuron_accel_testing.parity import assert_parallel_equivalence as assert_parallel_equivalence
    from neuron_accel_testing.parity import compare as compare
    from neuron_accel_testing.parity import train_alone as train_alone
    from neuron_accel_testing.parity import train_on_rank as train_on_rank
    from neuron_accel_testing.rank_errors import RankExit as RankExit
    from neuron_accel_testing.rank_errors import RanksError as RanksError
    from neuron_accel_testing.rank_errors import RankTimeout as RankTimeout
    from neuron_accel_testing.ranks import run_ranks as run_ranks
    from neuron_accel_testing.resources import PeakMemory as PeakMemory
    from neuron_accel_testing.resources import bytes_sent as bytes_sent
    from neuron_accel_testing.xla_ranks import one_at_a_time as one_at_a_time


def _folders() -> list[str]:
    """Where the modules are that can be imported from here: in a clone beside this package, else where the package is
    installed.

    Raises:
        ImportError: if it is not.
    """
    beside = Path(__file__).parents[2] / "plugins/neuron-accel-testing/src/neuron_accel_testing"
    if beside.is_dir():
        return [str(beside)]
    found = importlib.util.find_spec("neuron_accel_testing")
    if found is None:
        raise ImportError(f"{__name__} is in a package of its own: {how_to_install('neuron-accel-testing')}")
    return list(found.submodule_search_locations or ())


__path__ += _folders()
_names = importlib.import_module(f"{__name__}._names")
__all__ = list(_names.__all__)


def __getattr__(name: str) -> Any:
    return getattr(_names, name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
