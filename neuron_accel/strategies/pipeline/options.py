# SPDX-License-Identifier: Apache-2.0
"""The options of a pipeline."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from neuron_accel.contract import StrategyPlugin
from neuron_accel.errors import ConfigurationError


@dataclass(frozen=True, kw_only=True)
class PipelineOptions(StrategyPlugin):
    """How a model is split into stages, and in which order the stages compute.

    Args:
        pipeline_parallel_size: number of ranks along the pipeline.
        num_microbatches: number of micro-batches into which a rank's batch is split; it must divide the batch. More
            micro-batches make the bubble smaller, fewer make each micro-batch larger.
        schedule: ``"1f1b"``, ``"gpipe"``, ``"interleaved"`` or ``"zero-bubble"``; see ``neuron-accel schedule``.
        virtual_stages: number of stages on each rank, for the interleaved schedule.
        stage_cuts: FQNs of the blocks at which all stages but the first begin, for models without a plan and for uneven
            stages; by default stages are balanced by the cost of blocks, embedding and head.
        evaluation_logits: whether evaluation with labels returns all outputs of the last stage on every rank, or only
            the loss.
    """

    pipeline_parallel_size: int = 1
    num_microbatches: int = 1
    schedule: Literal["1f1b", "gpipe", "interleaved", "zero-bubble"] = "1f1b"
    virtual_stages: int = 1
    stage_cuts: tuple[str, ...] | None = None
    evaluation_logits: bool = True

    def __post_init__(self) -> None:
        super().__post_init__()
        for option in ("pipeline_parallel_size", "num_microbatches", "virtual_stages"):
            if getattr(self, option) < 1:
                raise ConfigurationError(
                    f"{option} is {getattr(self, option)}; it must be at least 1.",
                    where=f"plugin {self.spec.name!r}",
                    fix="leave it out for 1",
                )
