# SPDX-License-Identifier: Apache-2.0
"""Tensor and pipeline parallelism in one plugin, with the name and the options that optimum-neuron uses."""

from __future__ import annotations

import os
from dataclasses import dataclass, field, fields
from typing import Any, ClassVar

from neuron_accel.contract import Phase, PlanContext, PluginSpec, PreparedModel, Run, StrategyPlugin
from neuron_accel.errors import PlanError
from neuron_accel.strategies.pipeline.options import PipelineOptions
from neuron_accel.strategies.pipeline.plugin import PipelineParallelPlugin
from neuron_accel.strategies.sequence_parallel.plugin import SequenceParallelPlugin
from neuron_accel.strategies.tensor_parallel.plugin import TensorParallelOptions, TensorParallelPlugin


@dataclass(frozen=True, kw_only=True)
class ModelParallelismPlugin(PipelineOptions, TensorParallelOptions):
    """:class:`~neuron_accel.TensorParallelPlugin` and :class:`~neuron_accel.PipelineParallelPlugin`, each where its
    size is above 1, with their options.

    Args:
        checkpoint_dir: a checkpoint of any mesh, or a folder of transformers, from which the model is loaded when it is
            prepared; each rank reads its shards.
        sequence_parallel_enabled: as in optimum-neuron: True adds ``SequenceParallelPlugin()``, where
            ``tensor_parallel_size`` is above 1.
        options: see :class:`~neuron_accel.strategies.tensor_parallel.plugin.TensorParallelOptions` and
            :class:`~neuron_accel.strategies.pipeline.options.PipelineOptions`.
    """

    tensor_parallel_size: int = field(default=1, kw_only=False)  # by position, as in optimum-neuron
    checkpoint_dir: str | os.PathLike[str] | None = None
    sequence_parallel_enabled: bool = False

    spec: ClassVar[PluginSpec] = PluginSpec(
        name="model_parallelism", api_version=4, phase=Phase.LAYOUT, provides=frozenset({"weights-in-passes"})
    )
    supports = staticmethod(TensorParallelPlugin.supports)

    def companions(self) -> tuple[StrategyPlugin, ...]:
        found: list[StrategyPlugin] = []
        if self.tensor_parallel_size > 1:
            found.append(TensorParallelPlugin(**self._options(TensorParallelOptions)))
            found += [SequenceParallelPlugin()] if self.sequence_parallel_enabled else []
        if self.pipeline_parallel_size > 1:
            found.append(PipelineParallelPlugin(**self._options(PipelineOptions)))
        return tuple(found)

    def _options(self, of: type[StrategyPlugin]) -> dict[str, Any]:
        return {option.name: getattr(self, option.name) for option in fields(of)}

    def validate(self, context: PlanContext) -> None:
        for option in fields(PipelineOptions) if self.pipeline_parallel_size == 1 else ():
            value = getattr(self, option.name)
            if value != option.default:
                raise PlanError(
                    f"{option.name}={value!r} has no effect without a pipeline.",
                    where="plugin model_parallelism",
                    fix="leave it out, or set pipeline_parallel_size; to accumulate gradients use "
                    "gradient_accumulation_steps",
                )

    def transform_model(self, model: PreparedModel, run: Run) -> None:
        """Loads the weights in ``checkpoint_dir``, if given."""
        if self.checkpoint_dir is not None:
            model.initial_weights[self.spec.name] = self.checkpoint_dir
