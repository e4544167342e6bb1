"""A third party's strategy that shards optimizer state, on a page: its hooks call ``ShardedOptimizer``, and it passes
the conformance kit."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import pytest

from neuron_accel.contract import BufferBroadcast, Claim, GradientReducer, Phase, PluginSpec, StrategyPlugin
from neuron_accel.contract.sharded import ShardedGradients, ShardedOptimizer
from neuron_accel.errors import UsageError
from neuron_accel.testing import PluginConformance


@dataclass(frozen=True, kw_only=True)
class ShardedStatePlugin(StrategyPlugin):
    """Shards optimizer state over data-parallel ranks."""

    spec: ClassVar[PluginSpec] = PluginSpec(
        name="sharded_state",
        api_version=4,
        phase=Phase.OPTIMIZER,
        claims=frozenset({Claim.GRADIENT_REDUCTION, Claim.OPTIMIZER_STATE}),
    )

    def transform_model(self, model, run):
        """Averages the gradients of parameters that no optimizer holds, and sends the first rank's buffers."""
        run.state(self).setdefault("reducers", []).append(GradientReducer(model, run))
        run.state(self).setdefault("buffers", []).append(BufferBroadcast(model, run))

    def reshape(self, model, run):
        """Refuses other shapes of parameters whose state is sharded."""
        if self._optimizers(run):
            raise UsageError("Resize the model before its optimizer is prepared.", where=f"plugin {self.spec.name!r}")
        yield
        for reducer in run.state(self).get("reducers", []):
            reducer.restart()

    def transform_optimizer(self, optimizer, run):
        """Returns an optimizer that updates this rank's shards."""
        reducers = [reducer.leave for reducer in run.state(self).get("reducers", [])]
        sharded = ShardedOptimizer(optimizer, run, plugin=self.spec.name, others=reducers)
        for leave in reducers:
            leave(p for group in sharded.param_groups for p in group["params"])
        run.state(self).setdefault("optimizers", []).append(sharded)
        return sharded

    def backward_pass(self, loss, run):
        yield
        for reducer in run.state(self).get("reducers", []):
            reducer.end_backward()
        for optimizer in self._optimizers(run):
            optimizer.finish_backward()

    def step(self, optimizer, run):
        for sharded in self._optimizers(run):
            sharded.take_over()
        yield
        for buffers in run.state(self).get("buffers", []):
            buffers.after_step()

    def save(self, run):
        for optimizer in self._optimizers(run):
            optimizer.take_user_weights()

    def gradients(self, run):
        return ShardedGradients(run, run.state(self).get("reducers", []), self._optimizers(run))

    def _optimizers(self, run):
        return run.state(self).get("optimizers", [])


class TestShardedState(PluginConformance):
    @pytest.fixture
    def plugin(self):
        return ShardedStatePlugin()

    opt_out: ClassVar = {"test_is_found_by_name": "it is part of a test and in no distribution"}
    conflicts: ClassVar = {"zero1": "claim", "tp2-zero1": "claim"}
