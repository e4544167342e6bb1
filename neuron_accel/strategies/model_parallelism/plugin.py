"""Models divided over ranks: tensor and pipeline parallelism."""

from __future__ import annotations

import os
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

from neuron_accel.contract import (
    AxisKind,
    AxisSpec,
    ConfigurationError,
    Phase,
    PlanContext,
    PlanError,
    PluginSpec,
    StrategyPlugin,
)
from neuron_accel.strategies.pipeline.plugin import PipelinePlugin
from neuron_accel.strategies.sequence_parallel.plugin import SequenceParallelPlugin

if TYPE_CHECKING:
    from neuron_accel.contract import PreparedModel, Run
    from neuron_accel.models.support import SupportReport

_OF_A_PIPELINE = ("num_microbatches", "schedule", "virtual_stages", "stage_cuts", "evaluation_logits")


@dataclass(frozen=True, kw_only=True)
class ModelParallelismPlugin(StrategyPlugin):
    """Divides a model of a known family over ``tensor_parallel_size`` neighbouring ranks, and its layers over
    ``pipeline_parallel_size`` stages of such ranks.

    Attention heads and feed-forward features are divided; each rank computes its part and the ranks add up what comes
    out, once for each attention and each feed-forward. The model is rewritten in place and keeps its FQNs.

    In a pipeline each rank has the layers of its stages only. In training, calling the model runs forward and backward
    of all micro-batches of the batch, and returns the loss on every rank; ``accelerator.backward(loss)`` then finds
    nothing left to do, and the loop stays as it is. In evaluation it returns loss and logits.

    Args:
        tensor_parallel_size: number of ranks that hold one copy of the model together. Heads and features that do not
            divide by it are padded with such as compute nothing; key/value heads of which there are fewer are held by
            several ranks.
        pipeline_parallel_size: number of stages, or of ranks that have the stages.
        num_microbatches: number of equal parts of a rank's batch that the pipeline has under way; divides the batch.
            Many make the bubble small, few make the parts large.
        schedule: ``"1f1b"``, ``"gpipe"``, ``"interleaved"`` or ``"zero-bubble"``; see ``neuron-accel schedule``.
        virtual_stages: number of stages on each rank, for the interleaved schedule.
        stage_cuts: FQNs of the blocks at which all stages but the first begin, for models without a plan and for uneven
            cuts; by default cuts are balanced by what blocks, embedding and head cost.
        evaluation_logits: whether an evaluation with labels returns everything that the last stage computed, on every
            rank, or only the loss.
        parallelize_embeddings: divide token embedding and head along the vocabulary, and compute the loss without
            gathering logits. They stay whole in a model whose ``forward`` was replaced on the object, as some trainers
            do to compute head and loss in one: it may read the head's weight itself.
        tensor_parallel_plan: how to divide a model of your own: FQN patterns of linear layers and attributes, and what
            becomes of them; see :func:`~neuron_accel.models.given_architecture`, and
            :func:`~neuron_accel.models.register_tensor_parallel_plan` to say it once for a class.
        checkpoint_dir: a checkpoint of any mesh, or a folder of transformers, whose weights the model takes when it is
            prepared; each rank reads its part.
        sequence_parallel_enabled: as in optimum-neuron: True adds ``SequenceParallelPlugin()``, where
            ``tensor_parallel_size`` is above 1.
    """

    tensor_parallel_size: int = field(default=1, kw_only=False)
    pipeline_parallel_size: int = 1
    num_microbatches: int = 1
    schedule: Literal["1f1b", "gpipe", "interleaved", "zero-bubble"] = "1f1b"
    virtual_stages: int = 1
    stage_cuts: tuple[str, ...] | None = None
    evaluation_logits: bool = True
    parallelize_embeddings: bool = True
    tensor_parallel_plan: Mapping[str, str] | None = None
    checkpoint_dir: str | os.PathLike[str] | None = None
    sequence_parallel_enabled: bool = False

    spec = PluginSpec(name="model_parallelism", phase=Phase.LAYOUT)

    def __post_init__(self) -> None:
        for option in ("tensor_parallel_size", "pipeline_parallel_size", "num_microbatches", "virtual_stages"):
            if getattr(self, option) < 1:
                raise ConfigurationError(
                    f"{option} is {getattr(self, option)}; it must be at least 1.",
                    where="plugin 'model_parallelism'",
                    fix="leave it out for 1",
                )

    def axes(self) -> tuple[AxisSpec, ...]:
        return (AxisSpec(name="tp", degree=self.tensor_parallel_size, kind=AxisKind.MODEL),)

    def companions(self) -> tuple[StrategyPlugin, ...]:
        sequence = self.sequence_parallel_enabled and self.tensor_parallel_size > 1
        return (*([SequenceParallelPlugin()] if sequence else []), *self._pipeline())

    def _pipeline(self) -> tuple[StrategyPlugin, ...]:
        if self.pipeline_parallel_size == 1:
            return ()
        return (
            PipelinePlugin(
                degree=self.pipeline_parallel_size,
                num_microbatches=self.num_microbatches,
                schedule=self.schedule,
                virtual_stages=self.virtual_stages,
                stage_cuts=None if self.stage_cuts is None else tuple(self.stage_cuts),
                evaluation_logits=self.evaluation_logits,
            ),
        )

    def validate(self, context: PlanContext) -> None:
        if self.pipeline_parallel_size != 1:
            return
        for option in _OF_A_PIPELINE:
            value, default = getattr(self, option), type(self).__dataclass_fields__[option].default
            if value != default:
                raise PlanError(
                    f"{option}={value!r} has no effect without a pipeline.",
                    where="plugin model_parallelism",
                    fix="leave it out, or set pipeline_parallel_size; to accumulate gradients use "
                    "gradient_accumulation_steps",
                )

    def lazy_load(self) -> AbstractContextManager[None]:
        """A context in which a model for these ranks is built or loaded without memory for its weights; see
        :func:`~neuron_accel.lazy_load_for_parallelism`."""
        from neuron_accel.lazy import lazy_load_for_parallelism

        return lazy_load_for_parallelism(
            tensor_parallel_size=self.tensor_parallel_size, pipeline_parallel_size=self.pipeline_parallel_size
        )

    def model_init(self, run: Run) -> AbstractContextManager[None]:
        return nullcontext() if self.tensor_parallel_size * self.pipeline_parallel_size == 1 else self.lazy_load()

    def initial_weights(self) -> str | os.PathLike[str] | None:
        return self.checkpoint_dir

    def transform_model(self, model: PreparedModel, run: Run) -> None:
        """Divides ``model`` in place.

        Raises:
            UnsupportedModelError: if no plan covers the model.
            LayoutError: if its heads or features cannot be divided by the degree. The model is unchanged then.
        """
        degree = run.mesh.degree("tp")
        if degree == 1:
            return
        from neuron_accel.models.architecture import architecture_of
        from neuron_accel.models.catalog import registered_plans
        from neuron_accel.models.user_plan import given_architecture
        from neuron_accel.strategies.tensor_parallel.rewrite import rewrite
        from neuron_accel.strategies.tensor_parallel.shard_plan import divide

        given = self.tensor_parallel_plan
        given = registered_plans().find(model.module) if given is None else given
        architecture = (
            architecture_of(model.module) if given is None else given_architecture(model.module, given, degree)
        )
        # A forward that somebody put on the object (a fused head and loss) may read the head's weight past the head.
        own_forward = "forward" not in vars(model.module)
        embeddings = self.parallelize_embeddings and given is None and own_forward
        rewrite(architecture, divide(architecture, degree, parallelize_embeddings=embeddings), run, model.parameters)

    def explain_model(self, model: PreparedModel, run: Run, *, tokens: int | None = None) -> str:
        """What the divided modules of a prepared model send."""
        from neuron_accel.strategies.tensor_parallel.traffic import explain_traffic

        return explain_traffic(model.module, tokens)

    @staticmethod
    def supports(config: Any, *, tensor_parallel_size: int = 2, parallelize_embeddings: bool = True) -> SupportReport:
        """Whether the causal language model of a configuration of transformers can be divided, and how well; no weight
        is made or read.

        Args:
            config: the configuration of the model.
            tensor_parallel_size: the degree to ask about.
            parallelize_embeddings: as in the plugin.
        """
        from neuron_accel.contract import NeuronAccelError
        from neuron_accel.models.architecture import architecture_of
        from neuron_accel.models.support import SupportReport, model_without_weights
        from neuron_accel.strategies.tensor_parallel.shard_plan import divide, sizes_of

        model = model_without_weights(config)
        asked: dict[str, Any] = {"model_type": config.model_type, "tensor_parallel_size": tensor_parallel_size}
        try:
            architecture = architecture_of(model)
            divisions = divide(architecture, tensor_parallel_size, parallelize_embeddings=parallelize_embeddings)
        except NeuronAccelError as error:
            return SupportReport(**asked, supported=False, reason=str(error))
        sizes: dict[str, Any] = {**sizes_of(model, divisions)}
        return SupportReport(**asked, supported=True, sequence=architecture.plan.sequence, **sizes)
