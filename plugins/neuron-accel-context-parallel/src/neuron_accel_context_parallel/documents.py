# SPDX-License-Identifier: Apache-2.0
"""Masks of packed documents and padding, encoded as one number per token.

The code of a token is twice the index of its document, plus one if queries may attend to it. Codes are passed through a
model instead of an attention mask.
"""

from __future__ import annotations

import torch

from neuron_accel.errors import UsageError

UNSEEN = -2
"""The code of padding: it belongs to no document, and no query attends to it."""


def encode(document: torch.Tensor | None, visible: torch.Tensor | None) -> torch.Tensor | None:
    """Returns the codes, int64 [batch, sequence]; None if only the causal mask applies.

    Args:
        document: index of each token's document, int64 [batch, sequence]; None: there is one document.
        visible: whether queries may attend to a token, bool [batch, sequence]; None: to all tokens.
    """
    if document is None:
        return None if visible is None else visible.long()
    return 2 * document + (1 if visible is None else visible.long())


def from_positions(position_ids: torch.Tensor, *, reads: bool) -> torch.Tensor | None:
    """Finds documents in a packed batch as transformers does: a document begins wherever a position is not the previous
    one plus one.

    Args:
        position_ids: int64 [batch, sequence].
        reads: whether reading values on the host is free; if so, the result is None if there is one document.

    Returns:
        the index of each token's document, int64 [batch, sequence].
    """
    begins = torch.ones_like(position_ids)
    begins[:, 1:] = position_ids[:, 1:] - position_ids[:, :-1]
    document = (begins != 1).cumsum(-1)
    return None if reads and not document.any() else document


def from_lengths(cumulative: torch.Tensor, length: int) -> torch.Tensor:
    """Finds documents from cumulative lengths, as passed to kernels for packed batches.

    Args:
        cumulative: 0 and the end of each document in the only row of the batch, int [documents + 1].
        length: length of the row.

    Returns:
        the index of each token's document, int64 [1, length].
    """
    positions = torch.arange(length, device=cumulative.device)
    return (positions[:, None] >= cumulative[None, 1:]).sum(-1)[None]


def from_mask(attention_mask: torch.Tensor, shape: tuple[int, int], *, reads: bool) -> torch.Tensor | None:
    """Converts a padding mask to bool.

    Args:
        attention_mask: [batch, sequence], zero for padding.
        shape: batch size and sequence length.
        reads: whether reading values on the host is free; if so, the result is None if there is no padding.

    Raises:
        UsageError: for a mask of another shape.
    """
    if not isinstance(attention_mask, torch.Tensor) or tuple(attention_mask.shape) != shape:
        form = list(attention_mask.shape) if isinstance(attention_mask, torch.Tensor) else type(attention_mask).__name__
        raise UsageError(
            f"An attention mask of shape {form} is not possible with context parallelism.",
            where="plugin context_parallel",
            why=f"expected a padding mask of shape [batch, sequence], here {list(shape)}; masks of queries by keys are "
            "not sharded",
            fix="pass a padding mask, or packed documents with position_ids that restart",
        )
    visible = attention_mask.bool()
    return None if reads and bool(visible.all()) else visible
