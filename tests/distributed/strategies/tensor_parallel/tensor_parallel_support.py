"""Tiny models, and comparing sharded ones with whole ones. Everything here runs inside a rank."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import nn
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

from neuron_accel.backends.torch_distributed import TorchBackend
from neuron_accel.engine.plan.planner import make_plan
from neuron_accel.engine.plan.plugin import Claim, Phase
from neuron_accel.engine.runtime.run import PreparedModel, Run, transform_model
from neuron_accel.engine.sharding.parameters import ParameterMap
from neuron_accel.strategies.data_parallel.plugin import DataParallelPlugin
from neuron_accel.strategies.model_parallelism.plugin import ModelParallelismPlugin
from neuron_accel.strategies.sequence_parallel.plugin import SequenceParallelPlugin
from tests.distributed import models


def randomise(model: nn.Module, seed: int = 0) -> nn.Module:
    """No parameter keeps a value under which a mistake would not show: biases of zero, norms of one."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=generator) * 0.1)
    return model


SIZES = {"vocab_size": 101, "initializer_range": 0.02, "attn_implementation": "eager"}


def llama_config(**options: Any) -> LlamaConfig:
    return models.llama_config(
        **SIZES | {"hidden_size": 16, "intermediate_size": 24, "num_key_value_heads": 2} | options
    )


def gpt2_config(**options: Any) -> GPT2Config:
    return models.gpt2_config(**SIZES | {"n_embd": 16, "bos_token_id": 1, "eos_token_id": 2} | options)


def llama(**options: Any) -> LlamaForCausalLM:
    torch.manual_seed(0)
    return randomise(LlamaForCausalLM(llama_config(**options)))


def gpt2(**options: Any) -> GPT2LMHeadModel:
    torch.manual_seed(0)
    return randomise(GPT2LMHeadModel(gpt2_config(**options)))


FAMILIES = {"llama": llama, "gpt2": gpt2}


def make_run(*, degree: int, sequence_parallel: bool = False, **options: Any) -> Run:
    """A run of the ranks there are, with tensor parallelism of ``degree``, and options of the plugins."""
    backend = TorchBackend.connect("cpu")
    given = {name: options.pop(name) for name in ("overlap_gather", "regather") if name in options}
    others = options.pop("plugins", [])
    plugins = [ModelParallelismPlugin(tensor_parallel_size=degree, **options), *others]
    if sequence_parallel:
        plugins.append(SequenceParallelPlugin(**given, hooks_on_shards=True))
    plan = make_plan(
        plugins,
        world_size=backend.world_size,
        backend_capabilities=backend.capabilities,
        default_owners={Claim.GRADIENT_REDUCTION: DataParallelPlugin()},
    )
    return Run(plan=plan, backend=backend)


def shard(model: nn.Module, run: Run) -> ParameterMap:
    """Lets the plugins of ``run`` rewrite ``model`` in place."""
    prepared = PreparedModel(original=model, module=model, parameters=ParameterMap(model, mesh=run.mesh))
    transform_model(prepared, run, before=Phase.GRADIENTS)  # sums of gradients are made by hand in these tests
    assert prepared.module is model
    return prepared.parameters


def full_gradients(parameters: ParameterMap, run: Run) -> dict[str, torch.Tensor]:
    """Gradients in their original shapes, put together through the layouts."""
    return full_values(parameters, run, lambda record: record.current.grad, sum_partial=True)


def full_values(parameters: ParameterMap, run: Run, read: Any, *, sum_partial: bool = False) -> dict[str, torch.Tensor]:
    result = {}
    for record in parameters:
        value = read(record)
        if value is None:
            continue
        value = value.detach().clone()
        if sum_partial and record.partial_axes:
            value = run.backend.all_reduce(value, run.group(*record.partial_axes))
        full = torch.full(record.layout.shape, torch.nan, dtype=value.dtype)
        for rank, shard in enumerate(run.backend.all_gather_object(value, run.world)):
            record.layout.write(shard, full, run.mesh.coordinates(rank))
        result[record.fqn] = full
    return result


def batch(length: int = 8, vocabulary: int = 101, seed: int = 1) -> dict[str, torch.Tensor]:
    """Two sequences, the second padded at its end, with some labels that count nothing."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(0, vocabulary, (2, length), generator=generator)
    mask = torch.ones_like(ids)
    mask[1, length - length // 4 :] = 0
    labels = ids.masked_fill(mask == 0, -100)
    labels[0, 1] = -100
    return {"input_ids": ids, "attention_mask": mask, "labels": labels}


def step(model: nn.Module, inputs: dict[str, Any]) -> float:
    loss = model(**inputs).loss
    loss.backward()
    return loss.item()


def difference(actual: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> tuple[float, str]:
    """The largest difference relative to a tensor's largest entry, and where it is. Gradients that are zero but for
    rounding are compared absolutely."""
    if set(actual) != set(expected):
        return float("inf"), f"names differ: {sorted(set(actual) ^ set(expected))}"
    worst = (0.0, "")
    for name, value in expected.items():
        scale = value.abs().max().clamp_min(1e-3)
        error = ((actual[name] - value).abs().max() / scale).nan_to_num(float("inf")).item()
        worst = max(worst, (error, name))
    return worst


def reference_gradients(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def compare_step(
    model: nn.Module, inputs: dict[str, Any], *, degree: int, checkpointing: bool | None = None, **options: Any
) -> dict[str, Any]:
    """One training step of ``model`` whole and divided: losses and the largest difference of gradients.

    Args:
        checkpointing: None for no gradient checkpointing, else whether it is the reentrant kind.
    """
    whole = copy.deepcopy(model)
    expected = step(whole, inputs)
    run = make_run(degree=degree, **options)
    parameters = shard(model, run)
    if checkpointing is not None:
        model.gradient_checkpointing_enable({"use_reentrant": checkpointing})
    actual = step(model, inputs)
    error, where = difference(full_gradients(parameters, run), reference_gradients(whole))
    return {"loss": actual, "expected": expected, "error": error, "where": where}
