# SPDX-License-Identifier: Apache-2.0
"""The fully sharded strategy: configuration, and what it adds to ZeRO-1."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

import torch

from neuron_accel.contract import Claim, Phase, PluginSpec
from neuron_accel.contract.sharded import ShardedWeights
from neuron_accel.errors import ConfigurationError, PlanError, UnsupportedModelError
from neuron_accel.strategies.fully_sharded.groups import added_axes, check, near_group, replica_axes
from neuron_accel.strategies.fully_sharded.lazy_units import LazyUnits
from neuron_accel.strategies.fully_sharded.order import UnitOrder
from neuron_accel.strategies.fully_sharded.units import BLOCKS, Units

# ZeRO-1 is stage 1 of the same method: the optimizer, the shards of gradients and what a loop sees of them, norms,
# clipping and checkpoints are its.
from neuron_accel.strategies.zero1.plugin import Zero1Plugin

if TYPE_CHECKING:
    from neuron_accel.contract import AxisSpec, PlanContext, PreparedModel, Run
    from neuron_accel.contract.sharded import ShardedOptimizer

CAPABILITY = "gathered-weights"
"""The capability of plugins that neither read nor write values of parameters outside of forward and backward passes, or
do so through :attr:`ParameterRecord.weights`. Those that provide ``"weights-in-passes"`` have it too."""


@dataclass(frozen=True, kw_only=True)
class FullyShardedPlugin(Zero1Plugin):
    """Shards parameters, gradients and optimizer state over data-parallel ranks: ZeRO stage 3, or stage 2.

    The parameters of each unit (a repeated block of the model, and what is in no block) are gathered before its forward
    and backward pass and freed after it, its gradients are reduce-scattered when its backward pass ends, and the next
    unit is gathered meanwhile. A rank keeps 1/N of the weights, gradients and state of the parameters that an optimizer
    trains, and 1/N of the weights that do not train: these are gathered with their unit, and have no gradients and no
    state. They may begin and stop to train at any step.

    Outside of forward and backward passes parameters have their shape and no values: reading or writing these is an
    error. ``accelerator.get_state_dict``, ``save_model``, ``save_pretrained`` and ``save_state`` gather or save what
    ranks keep. Gradients are read as under ZeRO-1.

    Args:
        reshard_after_forward: whether parameters are freed after the forward pass and gathered again for the backward
            pass (stage 3), or kept until the backward pass has ended (stage 2), which takes the memory of all
            parameters during a step and sends a third less. Those in no block are kept for the backward pass either
            way, since it begins with them. By default stage 3, and in a pipeline stage 2: a stage's parameters are
            gathered once for all micro-batches of a step and its gradients are reduced once. With True given, a
            pipeline gathers them again for each pass of a micro-batch. An integer ``n``: parameters are kept in shards
            of ``1/n`` after the forward pass, and gathered from groups of ``n`` consecutive data-parallel ranks for the
            backward pass.
        hybrid_shard_size: number of consecutive data-parallel ranks over which everything is sharded; the gradients of
            their shards are summed over such groups by an all-reduce. None: over all data-parallel ranks.
        modules: what is gathered together: ``"blocks"``, the repeated blocks of the model; or FQN patterns, one or
            several, in which ``*`` stands for one segment or a part of it (``"encoder.layers.*"``).
        prefetch: number of units that are gathered ahead of the one that computes, and are in memory at the same time;
            0 for none.
        persistence_threshold: parameters of fewer elements than this are kept on every rank, as under ZeRO-1 (what
            DeepSpeed calls ``stage3_param_persistence_threshold``). Their gradients and state are sharded.
        bucket_cap_mb: largest size of a bucket, in MiB, of the gradients of parameters that are kept on every rank.
            Others travel in one bucket for each unit.
        overlap: whether units are gathered ahead, and gradients reduced while the backward pass still runs.
        options: the others are those of :class:`~neuron_accel.Zero1Plugin`.
    """

    spec: ClassVar[PluginSpec] = PluginSpec(
        name="fully_sharded",
        api_version=4,
        phase=Phase.OPTIMIZER,
        claims=frozenset({Claim.GRADIENT_REDUCTION, Claim.OPTIMIZER_STATE}),
        shards=frozenset({"weights", "gradients", "optimizer state"}),
        lazy_load=True,
        reads_weights=True,
    )

    title: ClassVar[str] = "fully sharded parameters"

    reshard_after_forward: bool | int | None = None
    hybrid_shard_size: int | None = None
    modules: str | tuple[str, ...] = BLOCKS
    prefetch: int = 1
    persistence_threshold: int = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        check(self.reshard_after_forward, self.hybrid_shard_size, "plugin 'fully_sharded'")
        if not self.modules or not all((self.modules,) if isinstance(self.modules, str) else self.modules):
            raise ConfigurationError(
                f"modules is {self.modules!r}, which matches nothing.",
                where="plugin 'fully_sharded'",
                fix=f"give {BLOCKS!r} or FQN patterns",
            )
        for name in ("prefetch", "persistence_threshold"):
            if getattr(self, name) < 0:
                raise ConfigurationError(
                    f"{name} is {getattr(self, name)}; it must not be negative.", where="plugin 'fully_sharded'"
                )

    def axes(self) -> tuple[AxisSpec, ...]:
        """The groups within the data-parallel ranks."""
        return added_axes(self.reshard_after_forward, self.hybrid_shard_size)

    def validate(self, context: PlanContext) -> None:
        """Refuses plugins that may use weights while these have no values."""
        others = sorted(
            name
            for name, plugin in context.plugins.items()
            if name != self.spec.name and not {CAPABILITY, "weights-in-passes"} & plugin.spec.provides
        )
        if others:
            raise PlanError(
                f"Fully sharded parameters do not compose with {', '.join(map(repr, others))}.",
                where="plugin 'fully_sharded'",
                why="these do not say when they use weights, and between uses parameters have no values",
                fix="use ZeRO-1 (Zero1Plugin) instead, or leave the other out; a plugin that works with weights that "
                f"are gathered for their use says so: provides={{{CAPABILITY!r}}}",
            )

    def setup(self, run: Run) -> None:
        """Refuses a device on which memory cannot be freed and allocated anew."""
        if run.backend.is_lazy:
            return  # a graph frees what is not read any more
        try:
            torch.empty(1, device=run.device).untyped_storage().resize_(0)
        except (NotImplementedError, RuntimeError) as error:
            raise PlanError(
                "Fully sharded parameters are not available on this device.",
                where=f"plugin 'fully_sharded', device {str(run.device)!r}",
                why="the storage of a tensor cannot be resized on it, so gathered parameters could not be freed",
                fix="use ZeRO-1 (Zero1Plugin), with tensor parallelism if the weights do not fit",
            ) from error

    def transform_model(self, model: PreparedModel, run: Run) -> None:
        """Watches the forward and backward passes of the model's units."""
        if model.inner is not model.module:
            raise UnsupportedModelError(
                f"{type(model.inner).__name__} is compiled by torch.compile.",
                where="plugin 'fully_sharded'",
                why="parameters are gathered by hooks on its modules, which a compiled graph leaves out",
                fix="train without compiling (no dynamo_plugin), or with ZeRO-1 (Zero1Plugin)",
            )
        super().transform_model(model, run)
        model.gathers_weights = True
        kind = LazyUnits if run.backend.is_lazy else Units
        state, units = run.state(self), self._units(run)
        if "order" not in state:
            state["order"] = UnitOrder(run, self.spec.name)
            run.undo(state["order"].close)
        units.append(
            kind(
                model,
                run,
                modules=self.modules,
                reshard=not model.runs_backward
                if self.reshard_after_forward is None
                else bool(self.reshard_after_forward),
                prefetch=self.prefetch if self.overlap else 0,
                persistence_threshold=self.persistence_threshold,
                order=state["order"],
                number=len(units) + 1,
                plugin=self.spec.name,
            )
        )
        run.undo(units[-1].close)
        self._weights(run).units.append(units[-1])

    def _sharded(self, optimizer: torch.optim.Optimizer, run: Run) -> ShardedOptimizer:
        others = [averager.leave for averager in self._averagers(run)]
        return self._weights(run).optimizer(optimizer, **self.optimizer_options(), others=others)

    def _weights(self, run: Run) -> ShardedWeights:
        state = run.state(self)
        if "weights" not in state:
            replicas = replica_axes(run, self.hybrid_shard_size)
            near = near_group(run, replicas)
            state["weights"] = ShardedWeights(run, self.spec.name, replica_axes=replicas, near=near)
        return state["weights"]

    def _units(self, run: Run) -> list[Units]:
        return run.state(self).setdefault("units", [])

    def _end_backward(self, run: Run) -> None:
        """Frees parameters, and waits for gradients to be reduce-scattered."""
        for units in self._units(run):
            units.end_backward()
        super()._end_backward(run)

    def save(self, run: Run) -> None:
        """Takes weights that the loop has assigned."""
        self._weights(run).before_save()
        super().save(run)

    def explain_model(self, model: PreparedModel, run: Run, *, tokens: int | None = None) -> str:
        """How many parameters are gathered together."""
        return "\n".join(units.explain() for units in self._units(run) if units.is_of(model))
