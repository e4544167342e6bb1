# SPDX-License-Identifier: Apache-2.0
"""Describes the communication of the sharded modules of a model as a table."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from torch import nn

from neuron_accel.strategies.tensor_parallel.embedding import VocabularyParallelEmbedding, VocabularyParallelHead
from neuron_accel.strategies.tensor_parallel.head_split import head_splits
from neuron_accel.strategies.tensor_parallel.linear import ColumnParallelLinear
from neuron_accel.strategies.tensor_parallel.overlap import gathers_late, overlapping_layers
from neuron_accel.strategies.tensor_parallel.tp_region import SequenceFlow, TpRegion, tp_region_of

if TYPE_CHECKING:
    from neuron_accel.contract.families import Architecture


def explain_traffic(model: nn.Module, tokens: int | None = None) -> str:
    """Returns a table of the collectives on activations of a sharded model; empty if there are none.

    Bytes are those of the tensors that are reduced or gathered in forward and backward, in the dtype of the model's
    parameters: for a step with ``tokens`` tokens, or per token.
    """
    tp_region = tp_region_of(model)
    if tp_region is None or tp_region.architecture is None:
        return ""
    unit = "bytes per token" if tokens is None else f"bytes per step of {tokens:,} tokens"
    rows = [("module", "collectives", unit)]
    for fqn, what, size in _rows(model, tp_region):
        rows.append((fqn, what, "-" if size is None else f"{size * (tokens or 1):,}"))
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
    return "\n".join([f"Tensor parallel over {tp_region.group.size} ranks", *(f"  {line}" for line in lines)])


def _rows(model: nn.Module, tp_region: TpRegion) -> Iterator[tuple[str, str, int | None]]:
    architecture = tp_region.architecture
    assert architecture is not None
    flow = tp_region.flow
    sharded = isinstance(flow, SequenceFlow)
    each = "all-gather and reduce-scatter in, reduce-scatter and all-gather out" if sharded else "all-reduce in and out"
    for fqn, module in architecture.regions:
        width = _hidden(architecture, module)
        regathers = isinstance(flow, SequenceFlow) and flow.regather
        again = regathers and (gathers_late(module) or bool(_names(module, architecture)))
        overlap = _overlap(module, architecture) if isinstance(flow, SequenceFlow) and flow.overlap_gather else ""
        said = f"{each}; gathered again in backward{overlap}" if again else each + overlap
        yield fqn, said, (4 + again if sharded else 2) * width
    for fqn, module in model.named_modules():
        if isinstance(module, VocabularyParallelEmbedding):
            yield fqn, "all-reduce out", module.weight.shape[1] * module.weight.element_size()
        elif isinstance(module, VocabularyParallelHead):
            yield fqn, _of_head(module), module.weight.shape[1] * module.weight.element_size()
    has_replicas = any(
        isinstance(module, ColumnParallelLinear) and module.replica_group is not None for module in model.modules()
    )
    splits = head_splits(architecture, tp_region.group.size)
    for split in splits.values():
        if has_replicas and split.replicas > 1:
            yield (
                f"{split.name} = {split.count}",
                f"gradients summed over {split.replicas} ranks that hold the same heads",
                None,
            )


def _overlap(region: nn.Module, architecture: Architecture) -> str:
    """Returns which layers compute while the input of a region is being gathered."""
    names = _names(region, architecture)
    return f"; the first two during {names}" if names else "; no overlap"


def _names(region: nn.Module, architecture: Architecture) -> str:
    layers = overlapping_layers(region, architecture.config.hidden_size)
    return ", ".join(name or "this layer" for name, layer in layers if layer.reads_gathered)


def _hidden(architecture: Architecture, module: nn.Module) -> int:
    """Returns the bytes of one token's hidden states."""
    width = module.weight.shape[-1] if isinstance(module, nn.Linear) else architecture.config.hidden_size
    return width * next(p.element_size() for p in module.parameters())


def _of_head(module: VocabularyParallelHead) -> str:
    return "all-reduce in; logits stay sharded where the standard loss is computed from them, else they are gathered"
