"""Models divided over ranks: tensor parallelism."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from neuron_accel.engine.errors import PlanError
from neuron_accel.engine.plugin import AxisKind, AxisSpec, Phase, PlanContext, PluginSpec, StrategyPlugin

if TYPE_CHECKING:
    import torch

    from neuron_accel.engine.parameters import ParameterMap
    from neuron_accel.engine.run import Run


@dataclass(frozen=True, kw_only=True)
class ModelParallelismPlugin(StrategyPlugin):
    """Divides a model of a known family over ``tensor_parallel_size`` neighbouring ranks.

    Attention heads and feed-forward features are divided; each rank computes its part and the ranks add up what comes
    out, once for each attention and each feed-forward. The model is rewritten in place and keeps its FQNs.

    Args:
        tensor_parallel_size: number of ranks that hold one copy of the model together. Heads, key/value heads and
            feed-forward size must divide by it.
        pipeline_parallel_size: must be 1.
        num_microbatches: number of parts of a batch that a pipeline has under way; without one it must be 1.
        parallelize_embeddings: divide token embedding and head along the vocabulary, and compute the loss without
            gathering logits.
    """

    tensor_parallel_size: int = 1
    pipeline_parallel_size: int = 1
    num_microbatches: int = 1
    parallelize_embeddings: bool = True

    spec = PluginSpec(name="model_parallelism", phase=Phase.LAYOUT)

    def axes(self) -> tuple[AxisSpec, ...]:
        return (AxisSpec(name="tp", degree=self.tensor_parallel_size, kind=AxisKind.MODEL),)

    def validate(self, context: PlanContext) -> None:
        if self.pipeline_parallel_size != 1:
            raise PlanError(
                f"pipeline_parallel_size={self.pipeline_parallel_size} is not possible: pipelines do not exist yet.",
                where="plugin model_parallelism",
                fix="leave pipeline_parallel_size at 1 and divide the model with tensor_parallel_size",
            )
        if self.num_microbatches != 1:
            raise PlanError(
                f"num_microbatches={self.num_microbatches} has no effect without a pipeline.",
                where="plugin model_parallelism",
                fix="leave num_microbatches at 1; to accumulate gradients use gradient_accumulation_steps",
            )

    def transform_model(self, model: torch.nn.Module, run: Run, parameters: ParameterMap) -> torch.nn.Module:
        """Divides ``model`` in place.

        Raises:
            UnsupportedModelError: if no plan covers the model.
            LayoutError: if its heads or features do not divide by the degree. The model is unchanged then.
        """
        if run.mesh.degree("tp") == 1:
            return model
        from neuron_accel.models.architecture import architecture_of
        from neuron_accel.strategies.tensor_parallel.division import divide
        from neuron_accel.strategies.tensor_parallel.rewrite import rewrite

        architecture = architecture_of(model)
        divisions = divide(architecture, run.mesh.degree("tp"), parallelize_embeddings=self.parallelize_embeddings)
        rewrite(architecture, divisions, run, parameters)
        return model
