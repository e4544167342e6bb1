"""Ranks that issue different collectives: said by name, instead of hanging."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from neuron_accel.engine.errors import ConfigurationError
from neuron_accel.engine.plugin import Phase, PluginSpec, StrategyPlugin
from neuron_accel.strategies.guards.meeting import Meetings

if TYPE_CHECKING:
    import torch

    from neuron_accel.engine.run import Run


@dataclass(frozen=True, kw_only=True)
class DesyncGuard(StrategyPlugin):
    """Notices that ranks issue different collectives and raises a
    :class:`~neuron_accel.engine.errors.DesyncError` on all of them, which says which rank, which step and which
    operation.

    Before each collective the ranks of its group compare notes beside the network of the device; on a lazy device
    before each execution, all that is in the graph. A rank that does not come is named when the time is over, or at
    once where its process has ended. What is compared: operation, group, step, and bytes, where all send the same.

    Meant for finding a fault: each collective waits for all ranks of its group and costs about a millisecond more.

    Args:
        timeout_s: how long a rank may be behind the others, in seconds. Longer than it takes to load, compile or write
            a checkpoint on one rank while others wait.
    """

    spec: ClassVar[PluginSpec] = PluginSpec(
        name="desync_guard", phase=Phase.OPTIMIZER, provides=frozenset({"looks-at-values"})
    )

    timeout_s: float = 600.0

    def __post_init__(self) -> None:
        if not self.timeout_s > 0:
            raise ConfigurationError(f"timeout_s is {self.timeout_s}; it must be positive.")

    def setup(self, run: Run) -> None:
        if run.world.size > 1:
            meetings = Meetings(run, self.timeout_s)
            run.state(self).update(meetings=meetings, leave=run.backend.observe(meetings))

    def after_step(self, optimizer: torch.optim.Optimizer, run: Run) -> None:
        if "meetings" in run.state(self):
            run.state(self)["meetings"].step += 1

    def teardown(self, run: Run) -> None:
        state = run.state(self)
        if state:
            state["leave"]()
            state["meetings"].close()
            state.clear()
