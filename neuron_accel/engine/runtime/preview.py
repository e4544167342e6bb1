# SPDX-License-Identifier: Apache-2.0
"""Descriptions of a prepared model as text, also of one that is not prepared yet, through a copy without weights."""

from __future__ import annotations

import copy
import re
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from neuron_accel.backends.base import COLLECTIVES
from neuron_accel.backends.group import Group
from neuron_accel.engine.plan.plan import table
from neuron_accel.engine.plan.plugin import Phase
from neuron_accel.engine.runtime.run import PreparedModel, Run, transform_model
from neuron_accel.engine.sharding.parameters import ParameterMap
from neuron_accel.errors import UsageError

if TYPE_CHECKING:
    from neuron_accel.backends.base import Backend
    from neuron_accel.engine.plan.hardware import Hardware
    from neuron_accel.engine.sharding.parameters import ParameterRecord


class _OnPaper:
    """A backend that has the attributes of another but raises an error for collectives."""

    def __init__(self, backend: Backend) -> None:
        self._backend = backend

    def __getattr__(self, name: str) -> Any:
        if name in COLLECTIVES:
            raise UsageError(
                "This model cannot be explained before it is prepared.",
                why=f"a plugin communicates with other ranks ({name}) when it transforms a model",
                fix="call explain after `prepare`",
            )
        return getattr(self._backend, name)

    def new_group(self, partition: Sequence[Sequence[int]], name: str) -> Group:
        key = tuple(sorted(tuple(sorted(ranks)) for ranks in partition))
        ranks = next(ranks for ranks in key if self._backend.rank in ranks)
        return Group(ranks=ranks, index=ranks.index(self._backend.rank), partition=key, name=name)


def preview(model: nn.Module, run: Run) -> tuple[PreparedModel, Run]:
    """Transforms a copy of ``model``, without weights, as ``prepare`` would on this rank. Not collective.

    Returns:
        The prepared copy, and a run to explain it with.

    Raises:
        UsageError: if a plugin communicates with other ranks when it transforms a model.
        NeuronAccelError: the errors that ``prepare`` would raise.
    """
    paper = Run(plan=run.plan, backend=_OnPaper(run.backend))  # type: ignore[arg-type]
    paper.set_known_groups(run)
    module = without_weights(model)
    record = PreparedModel(original=module, module=module, parameters=ParameterMap(module, mesh=run.mesh))
    paper.models.append(record)
    transform_model(record, paper, before=Phase.GRADIENTS)
    return record, paper


def without_weights(model: nn.Module) -> nn.Module:
    """Returns a copy of a model on the meta device."""
    memo: dict[int, Any] = {}
    for parameter in model.parameters():
        empty = torch.empty_like(parameter, device="meta")
        memo[id(parameter)] = nn.Parameter(empty, requires_grad=parameter.requires_grad)
    for buffer in model.buffers():
        memo[id(buffer)] = torch.empty_like(buffer, device="meta")
    return copy.deepcopy(model, memo)


# ---- a prepared model as text ----------------------------------------------------------------------------------------
_SEGMENT = re.compile(r"(?<=\.)\d+(?=\.)")


def explain_parameters(prepared: PreparedModel, run: Run, *, tokens: int | None = None) -> str:
    """Returns a table of the placement of each parameter of a prepared model, and the plugins' descriptions of its
    modules. Equal parameters of repeated blocks are one row, with ``*`` for the number of the block.

    Args:
        prepared: the model.
        run: the run.
        tokens: number of tokens of this rank in a step; plugins then report bytes per step instead of per token.
    """
    rows: dict[tuple[str, ...], list[int]] = {}
    for record in prepared.parameters:
        bytes_ = 0 if record.current is None else record.current.numel() * record.current.element_size()
        key = (_SEGMENT.sub("*", record.fqn), record.rule or "-", *_layout(record))
        rows.setdefault(key, []).append(bytes_)
    shown = [("parameter", "times", "rule", "placement", "shape", "local shape", "gradient", "local bytes")]
    for (name, rule, how, shape, here, gradient), each in rows.items():
        shown.append((name, str(len(each)), rule, how, shape, here, gradient, f"{sum(each):,}"))
    total = sum(sum(each) for each in rows.values())
    lines = [f"Parameters on rank {run.backend.rank}: {total:,} bytes", *table(shown)]
    for explain_model in run.hooks["explain_model"]:
        text = explain_model(prepared, run, tokens=tokens)
        lines += ["", text] if text else []
    return "\n".join(lines)


def explain_memory(prepared: PreparedModel, run: Run, hardware: Hardware) -> str:
    """Returns a line that compares what a rank keeps at least, when the optimizer updates the model, with its memory:
    weights, the gradients of those that train, and two moments for each, as Adam has, in their dtype. What plugins
    shard over replicas is divided by the number of replicas; so are gradients where the optimizer's state is. Empty if
    the memory is not known.

    Args:
        prepared: the model.
        run: the run.
        hardware: limits of the instance.
    """
    room = hardware.core_bytes
    if room is None:
        return ""
    held = [(record.current, record.trains) for record in prepared.parameters if record.current is not None]
    weights = sum(tensor.numel() * tensor.element_size() for tensor, _ in held)
    trained = sum(tensor.numel() * tensor.element_size() for tensor, trains in held if trains)
    sharded = {part for plugin in run.plan.plugins for part in plugin.spec.shards}
    sharded |= {"gradients"} if "optimizer state" in sharded else set()
    replicas = run.group(*run.mesh.gradient_axes).size
    sizes = {"weights": weights, "gradients": trained, "optimizer state": 2 * trained}
    least = {part: size / (replicas if part in sharded else 1) for part, size in sizes.items()}
    total = sum(least.values())
    parts = ", ".join(f"{part} {size / 2**30:.3g}" for part, size in least.items())
    return (
        f"{'Does NOT fit: a' if total > room else 'A'} core of {hardware.name} has {room / 2**30:.3g} GiB; at least "
        f"{total / 2**30:.3g} GiB are needed with Adam ({parts}), without activations, buckets and temporary memory"
    )


def _layout(record: ParameterRecord) -> tuple[str, str, str, str]:
    """Returns a parameter's placement, its shape, its shape on this rank, and the axes over which its gradient is
    summed."""
    cuts = []
    for cut in record.layout.cuts:
        extra = [f"{cut.replicas} replicas of each shard"] if cut.replicas > 1 else []
        extra += ["padded"] if cut.local_size * cut.parts != cut.size else []
        extra += [f"{len(cut.blocks)} blocks"] if len(cut.blocks) > 1 else []
        cuts.append(f"Shard({cut.dim}) over {cut.axis}" + (f" ({', '.join(extra)})" if extra else ""))
    cuts += [f"{axis} {', '.join(map(str, indices))} only" for axis, indices in record.holders.items()]
    here = "-" if record.current is None else str(tuple(record.current.shape))
    summed = f"summed over {', '.join(record.partial_axes)}" if record.partial_axes else "-"
    return "; ".join(cuts) or "Replicate", str(record.layout.shape), here, summed
