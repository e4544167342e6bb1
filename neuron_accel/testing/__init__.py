"""Public help for tests of strategies: running a function on several ranks."""

from __future__ import annotations

from neuron_accel.testing.ranks import RankExit, RanksError, RankTimeout, run_ranks

__all__ = ["RankExit", "RankTimeout", "RanksError", "run_ranks"]
