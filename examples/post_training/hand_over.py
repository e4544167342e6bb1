"""Hands the weights of a sharded model to another program, such as a server that generates, tensor by tensor.

    from hand_over import stream_weights

    for_the_server = stream_weights(accelerator, model)
    if accelerator.is_main_process:
        engine_model.load_weights(for_the_server)  # of vLLM: takes an iterator of names and tensors
    else:
        for _ in for_the_server:  # takes part in gathering, and gets nothing
            pass

No rank holds more than what a layer gathers: the whole model is in memory nowhere.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import torch
from transformers import PreTrainedModel
from transformers.core_model_loading import revert_weight_conversion

from neuron_accel.contract import AxisKind

INSIDE_PEFT = "base_model.model."
"""What peft puts before the names of the model that it adapts."""


def stream_weights(accelerator: Any, model: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Yields name and full value of each parameter of the original model, on the CPU of the main process.

    Names are those of published models, which `save_pretrained` writes: the experts of a layer, which transformers
    stacks, come one by one. Every rank iterates to the end; the others get nothing. A tied weight comes once, under its
    first name. LoRA factors of peft are added to the weights that they adapt.

    Args:
        accelerator: that prepared the model.
        model: the model as `prepare` returned it, or as a Trainer keeps it (`trainer.model_wrapped`).
    """
    original = accelerator.run.prepared(model).original
    adapted = getattr(original, "peft_config", None)
    weights = _gathered(accelerator.run, model)
    if adapted:
        weights, original = _merged(weights, next(iter(adapted.values()))), original.get_base_model()
    yield from _published(weights, original) if isinstance(original, PreTrainedModel) else weights


def _published(
    weights: Iterator[tuple[str, torch.Tensor]], model: PreTrainedModel
) -> Iterator[tuple[str, torch.Tensor]]:
    """Weights as `save_pretrained` writes them.

    Raises:
        ValueError: if one is made of several: they are here one at a time.
    """
    done: set[str] = set()
    for name, value in weights:
        made = revert_weight_conversion(model, {name: value})
        del value
        if twice := done & made.keys():
            raise ValueError(f"{twice.pop()!r} is made of several weights: use save_model, and load the folder")
        done |= made.keys()
        while made:
            published = next(iter(made))
            yield published, made.pop(published)


def _gathered(run: Any, model: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Each parameter in full, from the ranks that keep parts of it, and from the stage of a pipeline that has it."""
    run.backend.step_boundary()  # a lazy device computes what is read below
    stages = run.group(*run.mesh.names(AxisKind.STAGE))
    for record in run.prepared(model).parameters:
        holder = next((indices[0] for indices in record.holders.values()), 0)
        value = None
        if record.current is not None and stages.index == holder:
            value = record.current.detach() if record.weights is None else record.weights.gather()
            value = _joined(value, record.layout, run)
            if record.weights is not None:
                record.weights.changed()  # frees what was gathered
        if stages.size > 1:
            form = run.backend.broadcast_object(None if value is None else (value.shape, value.dtype), stages, holder)
            value = _placed(torch.empty(form[0], dtype=form[1]) if value is None else value, run)
            value = run.backend.broadcast(value, stages, holder)
        if run.backend.rank == 0:
            yield record.fqn, run.backend.to_host(value)
        del value


def _placed(value: torch.Tensor, run: Any) -> torch.Tensor:
    """On the device; where it is lazy on the host, since there each shape would be a graph to compile."""
    return run.backend.to_host(value) if run.backend.is_lazy else value.to(run.device)


def _joined(value: torch.Tensor, layout: Any, run: Any) -> torch.Tensor:
    """The tensor of which each rank of a tensor-parallel group has a part."""
    if not layout.cuts:
        return _placed(value, run).clone()
    group = run.group(*(cut.axis for cut in layout.cuts))
    parts = run.backend.all_gather(_placed(value, run).contiguous().unsqueeze(0), group)
    full = torch.empty(layout.shape, dtype=value.dtype, device=parts.device)
    for rank, part in zip(group.ranks, parts, strict=True):
        layout.write(part, full, run.mesh.coordinates(rank))
    return full


def _merged(weights: Iterator[tuple[str, torch.Tensor]], config: Any) -> Iterator[tuple[str, torch.Tensor]]:
    """Weights with their LoRA factors added, under the names of the model without peft.

    Raises:
        ValueError: if the adapter is of another kind, or differs between modules.
    """
    if config.alpha_pattern or config.use_dora or str(getattr(config.peft_type, "value", config.peft_type)) != "LORA":
        raise ValueError("only LoRA with one alpha for all modules is merged here: use peft's merge_and_unload")
    base: dict[str, torch.Tensor] = {}
    factor: dict[str, torch.Tensor] = {}
    for name, value in weights:
        name = name.removeprefix(INSIDE_PEFT)
        module, _, kind = name.rpartition(".lora_")
        if name.endswith(".base_layer.weight"):
            base[name.removesuffix(".base_layer.weight")] = value
        elif not module:
            yield name.replace(".base_layer.", "."), value
        elif kind.startswith("A."):
            factor[module] = value
        elif kind.startswith("B."):
            a, full = factor.pop(module), base.pop(module)
            scale = config.lora_alpha / (math.sqrt(len(a)) if config.use_rslora else len(a))
            added = scale * (value.float() @ a.float())
            yield f"{module}.weight", full + (added.T if config.fan_in_fan_out else added).to(full.dtype)
        else:
            raise ValueError(f"{name!r} is not a factor of a linear layer: use peft's merge_and_unload")
        del value
