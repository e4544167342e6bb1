# SPDX-License-Identifier: Apache-2.0
"""Sharded training of ordinary PyTorch loops on AWS Trainium, GPUs and CPUs, through pluggable strategies.

Names are imported when they are first used: importing Accelerate chooses its device, and importing this package should
be cheap.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from neuron_accel_plan import plan as plan
    from neuron_accel_report import RunReportPlugin as RunReportPlugin

    from neuron_accel.accelerator import NeuronAccelerator as NeuronAccelerator
    from neuron_accel.backends.select import DryRun as DryRun
    from neuron_accel.engine.optim.twin import make_optimizer_constructor_lazy as make_optimizer_constructor_lazy
    from neuron_accel.engine.plan.plugin import StrategyPlugin as StrategyPlugin
    from neuron_accel.engine.plan.registry import register_plugin as register_plugin
    from neuron_accel.errors import NeuronAccelError as NeuronAccelError
    from neuron_accel.lazy import lazy_load_for_parallelism as lazy_load_for_parallelism
    from neuron_accel.lazy import materialize as materialize
    from neuron_accel.models import register_tensor_parallel_plan as register_tensor_parallel_plan
    from neuron_accel.neuron.instances import Instance as Instance
    from neuron_accel.neuron.instances import find_instance as find_instance
    from neuron_accel.standalone import ZeroRedundancyOptimizer as ZeroRedundancyOptimizer
    from neuron_accel.strategies.activation_checkpointing import (
        ActivationCheckpointingPlugin as ActivationCheckpointingPlugin,
    )
    from neuron_accel.strategies.chunked_loss import ChunkedLossPlugin as ChunkedLossPlugin
    from neuron_accel.strategies.data_parallel.plugin import DataParallelPlugin as DataParallelPlugin
    from neuron_accel.strategies.flash_attention import FlashAttentionPlugin as FlashAttentionPlugin
    from neuron_accel.strategies.fully_sharded import FullyShardedPlugin as FullyShardedPlugin
    from neuron_accel.strategies.model_parallelism.plugin import ModelParallelismPlugin as ModelParallelismPlugin
    from neuron_accel.strategies.pipeline.plugin import PipelineParallelPlugin as PipelineParallelPlugin
    from neuron_accel.strategies.sequence_parallel.plugin import SequenceParallelPlugin as SequenceParallelPlugin
    from neuron_accel.strategies.tensor_parallel.plugin import TensorParallelPlugin as TensorParallelPlugin
    from neuron_accel.strategies.zero1 import Zero1Plugin as Zero1Plugin
    from neuron_accel.trainer import NeuronSeq2SeqTrainer as NeuronSeq2SeqTrainer
    from neuron_accel.trainer import NeuronSeq2SeqTrainingArguments as NeuronSeq2SeqTrainingArguments
    from neuron_accel.trainer import NeuronTrainer as NeuronTrainer
    from neuron_accel.trainer import NeuronTrainerMixin as NeuronTrainerMixin
    from neuron_accel.trainer import NeuronTrainingArguments as NeuronTrainingArguments
    from neuron_accel.trainer.optimum import NeuronModelForCausalLM as NeuronModelForCausalLM
    from neuron_accel.trainer.sft import NeuronSFTConfig as NeuronSFTConfig
    from neuron_accel.trainer.sft import NeuronSFTTrainer as NeuronSFTTrainer

_WHERE = {
    "NeuronAccelerator": "neuron_accel.accelerator",
    "DryRun": "neuron_accel.backends.select",
    "Instance": "neuron_accel.neuron.instances",
    "NeuronAccelError": "neuron_accel.errors",
    "StrategyPlugin": "neuron_accel.engine.plan.plugin",
    "ZeroRedundancyOptimizer": "neuron_accel.standalone",
    "find_instance": "neuron_accel.neuron.instances",
    "lazy_load_for_parallelism": "neuron_accel.lazy",
    "make_optimizer_constructor_lazy": "neuron_accel.engine.optim.twin",
    "materialize": "neuron_accel.lazy",
    "register_plugin": "neuron_accel.engine.plan.registry",
    "register_tensor_parallel_plan": "neuron_accel.models",
    "ActivationCheckpointingPlugin": "neuron_accel.strategies.activation_checkpointing",
    "DataParallelPlugin": "neuron_accel.strategies.data_parallel.plugin",
    "ChunkedLossPlugin": "neuron_accel.strategies.chunked_loss",
    "FlashAttentionPlugin": "neuron_accel.strategies.flash_attention",
    "FullyShardedPlugin": "neuron_accel.strategies.fully_sharded",
    "ModelParallelismPlugin": "neuron_accel.strategies.model_parallelism.plugin",
    "PipelineParallelPlugin": "neuron_accel.strategies.pipeline.plugin",
    "SequenceParallelPlugin": "neuron_accel.strategies.sequence_parallel.plugin",
    "TensorParallelPlugin": "neuron_accel.strategies.tensor_parallel.plugin",
    "Zero1Plugin": "neuron_accel.strategies.zero1",
    "NeuronModelForCausalLM": "neuron_accel.trainer.optimum",
    "NeuronSeq2SeqTrainer": "neuron_accel.trainer",
    "NeuronSeq2SeqTrainingArguments": "neuron_accel.trainer",
    "NeuronTrainer": "neuron_accel.trainer",
    "NeuronTrainerMixin": "neuron_accel.trainer",
    "NeuronTrainingArguments": "neuron_accel.trainer",
}

_WITH_TRL = {"NeuronSFTConfig": "neuron_accel.trainer.sft", "NeuronSFTTrainer": "neuron_accel.trainer.sft"}
"""Names that need another package, which ``from neuron_accel import *`` does not."""

__version__ = "0.1.0"

__all__ = list(_WHERE)


def __getattr__(name: str) -> Any:
    where = _WHERE.get(name) or _WITH_TRL.get(name)
    if where is not None:
        return getattr(importlib.import_module(where), name)
    from neuron_accel.doors import moved

    return moved(name, __name__)


def __dir__() -> list[str]:
    return sorted({*globals(), *_WHERE, *_WITH_TRL})
