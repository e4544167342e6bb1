# SPDX-License-Identifier: Apache-2.0
"""The plugin of pipeline parallelism."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, ClassVar

from neuron_accel.contract import AxisKind, AxisSpec, Claim, Phase, PlanContext, PluginSpec
from neuron_accel.errors import ConfigurationError, PlanError
from neuron_accel.strategies.pipeline.options import PipelineOptions
from neuron_accel.strategies.pipeline.schedules import make_schedule

if TYPE_CHECKING:
    import torch

    from neuron_accel.contract import PreparedModel, Run
    from neuron_accel.strategies.pipeline.pipeline import Pipeline

AXIS = "pp"
"""The mesh axis of pipeline parallelism."""


@dataclass(frozen=True, kw_only=True)
class PipelineParallelPlugin(PipelineOptions):
    """Distributes the layers of a model over ranks, in stages that run the micro-batches of a batch.

    In training, calling the model runs forward and backward of all micro-batches, and returns the loss on every rank;
    ``accelerator.backward(loss)`` then only checks the loss, so that the training loop need not change. In evaluation
    the model returns loss and logits.

    Args:
        options: see :class:`~neuron_accel.strategies.pipeline.options.PipelineOptions`; ``pipeline_parallel_size`` is
            at least 2.
    """

    pipeline_parallel_size: int = field()  # no default

    spec: ClassVar[PluginSpec] = PluginSpec(
        name="pipeline_parallel",
        api_version=4,
        phase=Phase.STAGES,
        provides=frozenset({"weights-in-passes"}),
        claims=frozenset({Claim.BACKWARD}),
        lazy_load=True,
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.pipeline_parallel_size < 2:
            raise ConfigurationError(
                "pipeline_parallel_size is 1; a pipeline has at least 2 ranks.",
                where="plugin 'pipeline_parallel'",
                fix="leave the plugin out, or use ModelParallelismPlugin, which takes 1",
            )

    def axes(self) -> tuple[AxisSpec, ...]:
        return (AxisSpec(name=AXIS, degree=self.pipeline_parallel_size, kind=AxisKind.STAGE),)

    def validate(self, context: PlanContext) -> None:
        self.computations()
        if not {"point-to-point", "lazy"} & context.capabilities:
            raise PlanError(
                f"pipeline_parallel_size={self.pipeline_parallel_size} is not possible on this backend.",
                where="plugin 'pipeline_parallel'",
                why="stages send activations from rank to rank, and "
                + context.missing.get("point-to-point", "the backend cannot send to a single rank"),
                fix="shard the model with tensor_parallel_size, or use a backend with point-to-point messages, or xla",
            )

    def computations(self) -> tuple[tuple[tuple[str, int, int], ...], ...]:
        """Returns what each rank along the pipeline computes for one batch, in this order: kind (``"F"``: forward,
        ``"B"``: backward, ``"I"`` and ``"W"``: its halves, for the gradients of inputs and of weights), stage, and
        micro-batch.

        Raises:
            ConfigurationError: if the schedule cannot run with these numbers of stages and micro-batches.
        """
        ranks, microbatches = self.pipeline_parallel_size, self.num_microbatches
        schedule = make_schedule(
            self.schedule, stages=ranks, microbatches=microbatches, virtual_stages=self.virtual_stages
        )
        lists = (schedule.compute(rank) for rank in range(ranks))
        return tuple(tuple((a.kind.value, a.stage, a.microbatch) for a in actions) for actions in lists)

    def blocks(self, model: torch.nn.Module) -> tuple[tuple[int, ...], ...]:
        """Returns for each rank along the pipeline the number of blocks of ``model``, which is not prepared, in each of
        its stages.

        Raises:
            UnsupportedModelError: if the model cannot be split so.
        """
        from neuron_accel.strategies.pipeline.cuts import cut

        ranks = self.pipeline_parallel_size
        stack, starts = cut(model, ranks * self.virtual_stages, self.stage_cuts)
        sizes = [stop - start for start, stop in itertools.pairwise((*starts, stack.blocks))]
        return tuple(tuple(sizes[rank::ranks]) for rank in range(ranks))

    def setup(self, run: Run) -> None:
        """Declares that stages run different graphs."""
        run.backend.run_apart(run.group(AXIS))

    def transform_model(self, model: PreparedModel, run: Run) -> None:
        """Keeps this rank's stages, and runs the schedule in forward.

        Raises:
            UnsupportedModelError: if the model cannot be split, or not into this number of stages or at these blocks.
                It is not changed then.
        """
        from neuron_accel.contract import wrap_forward
        from neuron_accel.contract.families import install_resize
        from neuron_accel.strategies.pipeline.cuts import cut
        from neuron_accel.strategies.pipeline.pipeline import Pipeline
        from neuron_accel.strategies.pipeline.stage import make_stages
        from neuron_accel.strategies.pipeline.tied_weights import Ties, check_shared_memory, find_ties

        stages = self.pipeline_parallel_size * self.virtual_stages
        stack, starts = cut(model.module, stages, self.stage_cuts, model.parameters)
        stage_of = stages_of_parameters(model.module, dict(stack.stages_of(starts)))
        check_shared_memory(model.module, stage_of)
        install_resize(model, run)
        rank = run.coordinates[AXIS]
        forward = model.module.forward
        own = make_stages(model.module, stack, starts, list(range(rank, stages, self.pipeline_parallel_size)), forward)
        absent, first, trained = [], {}, set()
        for record in model.parameters:
            first[record.fqn] = stage_of[record.fqn] % self.pipeline_parallel_size
            if record.current is not None and record.current.requires_grad:
                trained.add(record.fqn)
            holders = tuple(sorted({stage_of[name] % self.pipeline_parallel_size for name in record.names}))
            model.parameters.set_holders(record.fqn, AXIS, holders)
            if rank not in holders:
                absent.append(record.fqn)
        model.parameters.follow(model.module, absent=absent)
        pipeline = Pipeline(
            model,
            own,
            forward,
            run=run,
            axis=AXIS,
            ties=Ties(find_ties(model.parameters, run, AXIS, first, trained), run, run.group(AXIS)),
            options=self,
        )
        self.pipelines(run).append(pipeline)
        model.runs_backward, model.defers_gradients = True, self.schedule == "zero-bubble"
        wrap_forward(model.module, pipeline.call)

    def pipelines(self, run: Run) -> list[Pipeline]:
        """Returns the pipelines of a run, one for each prepared model."""
        return run.state(self).setdefault("pipelines", [])

    def backward_pass(self, loss: torch.Tensor, run: Run) -> Iterator[None]:
        """Checks the loss, whose gradients were already computed.

        Raises:
            UsageError: if ``loss`` is not the one that the model returned.
        """
        from neuron_accel.strategies.pipeline.pipeline import check_loss

        check_loss(loss, {p for record in run.models for p in record.module.parameters()})
        yield

    def step(self, optimizer: torch.optim.Optimizer, run: Run) -> Iterator[None]:
        """Makes tied weights equal on their stages."""
        yield
        for pipeline in self.pipelines(run):
            pipeline.ties.agree()


def stages_of_parameters(model: torch.nn.Module, stage_of: dict[str, int]) -> dict[str, int]:
    """Returns the stage of each parameter by its FQN, from the stages of modules."""
    result = {}
    for name, _ in model.named_parameters(remove_duplicate=False):
        part = name
        while part not in stage_of:
            part = part.rpartition(".")[0]
        result[name] = stage_of[part]
    return result
