"""A third party's strategy that shards optimizer state, on a page: its hooks call ``ShardedOptimizer``, and it passes
the conformance kit."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import pytest

from neuron_accel.contract import (
    BufferBroadcast,
    Claim,
    GradientReducer,
    Phase,
    PluginSpec,
    ShardedOptimizer,
    StrategyPlugin,
    UsageError,
    clip_by_norm,
    clip_by_value,
    gradient_parts,
)
from neuron_accel.testing import PluginConformance


@dataclass(frozen=True, kw_only=True)
class ShardedStatePlugin(StrategyPlugin):
    """Shards optimizer state over data-parallel ranks."""

    spec: ClassVar[PluginSpec] = PluginSpec(
        name="sharded_state",
        api_version=3,
        phase=Phase.OPTIMIZER,
        claims=frozenset({Claim.GRADIENT_REDUCTION, Claim.GRADIENT_CLIPPING, Claim.OPTIMIZER_STATE}),
    )

    def transform_model(self, model, run):
        """Averages the gradients of parameters that no optimizer holds, and sends the first rank's buffers."""
        run.state(self).setdefault("reducers", []).append(GradientReducer(model, run))
        run.state(self).setdefault("buffers", []).append(BufferBroadcast(model, run))

    def before_reshape(self, model, run):
        """Refuses other shapes of parameters whose state is sharded."""
        if self._optimizers(run):
            raise UsageError("Resize the model before its optimizer is prepared.", where=f"plugin {self.spec.name!r}")

    def after_reshape(self, model, run):
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

    def after_backward(self, run):
        for reducer in run.state(self).get("reducers", []):
            reducer.end_backward()
        for optimizer in self._optimizers(run):
            optimizer.finish_backward()

    def before_step(self, optimizer, run):
        for sharded in self._optimizers(run):
            sharded.take_over()

    def after_step(self, optimizer, run):
        for buffers in run.state(self).get("buffers", []):
            buffers.after_step()

    def before_save(self, run):
        for optimizer in self._optimizers(run):
            optimizer.take_user_weights()

    def clip_grad_norm(self, parameters, max_norm, norm_type, run):
        return clip_by_norm(self._parts(parameters, run), max_norm, norm_type, run)

    def clip_grad_value(self, parameters, clip_value, run):
        clip_by_value(self._parts(parameters, run), clip_value)

    def scale_gradients(self, parameters, factor, run):
        for part in self._parts(parameters, run):
            if part.tensor is not None:
                part.tensor.mul_(factor)

    def full_gradient(self, parameter, run):
        self._parts([], run)
        for optimizer in self._optimizers(run):
            if parameter in optimizer.sharded_parameters:
                return optimizer.full_gradient(parameter)
        return parameter.grad

    def teardown(self, run):
        state = run.state(self)
        for closes in (*state.get("reducers", []), *state.get("optimizers", []), *state.get("buffers", [])):
            closes.close()
        state.clear()

    def _optimizers(self, run):
        return run.state(self).get("optimizers", [])

    def _parts(self, parameters, run):
        """This rank's parts of the reduced gradients."""
        for waits in (*run.state(self).get("reducers", []), *self._optimizers(run)):
            waits.flush()
        sharded = {p for optimizer in self._optimizers(run) for p in optimizer.sharded_parameters}
        parts = [part for optimizer in self._optimizers(run) for part in optimizer.gradient_parts(parameters)]
        return [*parts, *gradient_parts([p for p in parameters if p not in sharded], run)]


class TestShardedState(PluginConformance):
    @pytest.fixture
    def plugin(self):
        return ShardedStatePlugin()

    opt_out: ClassVar = {"test_is_found_by_name": "it is part of a test and in no distribution"}
    conflicts: ClassVar = {"zero1": "claim", "tp2-zero1": "claim"}
