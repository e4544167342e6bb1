"""Counts graphs and executions of a training step, and reads its HLO, on a rank."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from accelerate.tracking import GeneralTracker

from neuron_accel.engine.plan.plugin import Phase, PluginSpec, StrategyPlugin


@dataclass(frozen=True, kw_only=True)
class StepWatcher(StrategyPlugin):
    """Keeps the hash of each step's graph, and the HLO of the first two, complete but not executed."""

    spec: ClassVar[PluginSpec] = PluginSpec(name="step_watcher", api_version=4, phase=Phase.OPTIMIZER)

    def step(self, optimizer, run):
        yield
        import torch_xla

        parameters = [r.current for m in run.models for r in m.parameters if r.current is not None]
        state = run.state(self)
        if len(state.setdefault("hlo", [])) < 2:  # the first step makes the optimizer's state; the others are alike
            state["hlo"].append(torch_xla._XLAC._get_xla_tensors_hlo(parameters))
        state.setdefault("hashes", []).append(torch_xla._XLAC._get_graph_hash(parameters).hex())


class Notes(GeneralTracker):
    """A tracker that keeps logged values."""

    name, requires_logging_directory = "notes", False

    def __init__(self):
        super().__init__()
        self.logged = []

    @property
    def tracker(self):
        return self

    def log(self, values, step=None, **_):
        self.logged.append(values)


def compiled() -> int:
    """Graphs compiled so far by all ranks of the process."""
    import torch_xla.debug.metrics as metrics

    return metrics.counter_value("UncachedCompile") or 0


def executed() -> int:
    """Graphs executed so far by all ranks of the process."""
    import torch_xla.debug.metrics as metrics

    return compiled() + (metrics.counter_value("CachedCompile") or 0)


def host_fallbacks() -> list[str]:
    """Operations that ran on the CPU because XLA has none, or because a value was read. One value is read before ranks
    that are threads begin."""
    import torch_xla.debug.metrics as metrics

    at_start = {"aten::_local_scalar_dense": 1}
    counts = {name: metrics.counter_value(name) for name in metrics.counter_names() if name.startswith("aten::")}
    return [name for name, count in counts.items() if count > at_start.get(name, 0)]
