"""What the divided modules of a model send, for people."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from torch import nn

from neuron_accel.strategies.tensor_parallel.embedding import VocabularyParallelEmbedding, VocabularyParallelHead
from neuron_accel.strategies.tensor_parallel.head_split import shares_of
from neuron_accel.strategies.tensor_parallel.linear import ColumnParallelLinear
from neuron_accel.strategies.tensor_parallel.tp_region import Boundary, SequenceFlow, boundary_of

if TYPE_CHECKING:
    from neuron_accel.models.architecture import Architecture


def explain_traffic(model: nn.Module, tokens: int | None = None) -> str:
    """A table of every place where activations of a divided model are exchanged; empty if none is.

    Bytes are those of the tensors that collectives work on, forward and backward together, in the dtype of the model's
    parameters: of a step with ``tokens`` tokens, or for each token.
    """
    boundary = boundary_of(model)
    if boundary is None or boundary.architecture is None:
        return ""
    unit = "bytes per token" if tokens is None else f"bytes per step of {tokens:,} tokens"
    rows = [("module", "what is exchanged", unit)]
    for fqn, what, size in _rows(model, boundary):
        rows.append((fqn, what, "-" if size is None else f"{size * (tokens or 1):,}"))
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
    return "\n".join([f"Tensor parallel over {boundary.group.size} ranks", *(f"  {line}" for line in lines)])


def _rows(model: nn.Module, boundary: Boundary) -> Iterator[tuple[str, str, int | None]]:
    architecture = boundary.architecture
    assert architecture is not None
    divided = isinstance(boundary.flow, SequenceFlow)
    each = "all-gather and reduce-scatter in, reduce-scatter and all-gather out" if divided else "all-reduce in and out"
    for fqn, module in architecture.regions:
        width = _hidden(architecture, module)
        yield fqn, each, (4 if divided else 2) * width
    for fqn, module in model.named_modules():
        if isinstance(module, VocabularyParallelEmbedding):
            yield fqn, "all-reduce out", module.weight.shape[1] * module.weight.element_size()
        elif isinstance(module, VocabularyParallelHead):
            yield fqn, _of_head(module), module.weight.shape[1] * module.weight.element_size()
    alike = any(isinstance(module, ColumnParallelLinear) and module.alike is not None for module in model.modules())
    shares = shares_of(architecture, boundary.group.size)
    for share in shares.values():
        if alike and share.replicas > 1:
            yield (
                f"{share.name} = {share.count}",
                f"gradients summed over {share.replicas} ranks that share heads",
                None,
            )


def _hidden(architecture: Architecture, module: nn.Module) -> int:
    """Bytes of one token's hidden states."""
    width = module.weight.shape[-1] if isinstance(module, nn.Linear) else architecture.config.hidden_size
    return width * next(p.element_size() for p in module.parameters())


def _of_head(module: VocabularyParallelHead) -> str:
    return "all-reduce in; logits stay divided where the standard loss is computed from them, else they are gathered"
