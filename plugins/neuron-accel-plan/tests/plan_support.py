"""Strategies by short names, and a step of a small Llama that is counted."""

from __future__ import annotations

from collections.abc import Sequence

import torch


def plugins_of(names: Sequence[str]):
    from neuron_accel import (
        ActivationCheckpointingPlugin,
        FullyShardedPlugin,
        PipelineParallelPlugin,
        SequenceParallelPlugin,
        TensorParallelPlugin,
        Zero1Plugin,
    )

    made = {
        "tp": lambda: TensorParallelPlugin(tensor_parallel_size=2),
        "sp": SequenceParallelPlugin,
        "sp-keep": lambda: SequenceParallelPlugin(regather=False),
        "sp-overlap": lambda: SequenceParallelPlugin(overlap_gather=True),
        "zero1": Zero1Plugin,
        "stage 3": FullyShardedPlugin,
        "stage 2": lambda: FullyShardedPlugin(reshard_after_forward=False),
        "recompute": ActivationCheckpointingPlugin,
        "pp": lambda: PipelineParallelPlugin(pipeline_parallel_size=2, num_microbatches=2),
        "pp-zb": lambda: PipelineParallelPlugin(pipeline_parallel_size=2, num_microbatches=2, schedule="zero-bubble"),
    }
    return [made[name]() for name in names]


def count(names: Sequence[str], dry_run=None):
    """A step of a small Llama in two micro-batches: the peak, the most of each part, traffic, operations, weights."""
    from neuron_accel_plan.memory import PARTS
    from neuron_accel_plan.step import count_step
    from transformers import LlamaConfig, LlamaForCausalLM

    from neuron_accel import NeuronAccelerator

    accelerator = NeuronAccelerator(
        plugins=plugins_of(names), backend=dry_run or "torch", gradient_accumulation_steps=2
    )
    size = {"hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 4, "num_key_value_heads": 2}
    config = LlamaConfig(num_hidden_layers=3, vocab_size=256, attn_implementation="eager", **size)

    def build():
        torch.manual_seed(0)
        with torch.device("meta" if dry_run else "cpu"):
            return LlamaForCausalLM(config)

    def batch():
        ids = torch.ones(2, 64, dtype=torch.int64, device=accelerator.device)
        return {"input_ids": ids, "labels": ids, "attention_mask": torch.ones_like(ids)}

    found = count_step(accelerator, build, batch, blocks="model.layers")
    most = {part: max(peak.parts[part] for peak in found.peaks) for part in PARTS}
    return found.peak.total, most, found.flows, found.operations, found.weights
