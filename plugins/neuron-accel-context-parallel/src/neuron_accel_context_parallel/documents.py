"""Which tokens may see each other beside their order: documents packed into one row, and padding.

As one number for each token, so that it travels through a model in the place of an attention mask: twice the number of
its document, plus one if others see it as a key.
"""

from __future__ import annotations

import torch

from neuron_accel.contract import UsageError

UNSEEN = -2
"""The code of what was added to fill up a sequence: it belongs to no document and no query attends to it."""


def encode(document: torch.Tensor | None, visible: torch.Tensor | None) -> torch.Tensor | None:
    """The codes, int64 [batch, sequence]; None if every token sees all before it.

    Args:
        document: number of each token's document, int64 [batch, sequence]; None: there is one.
        visible: whether others see a token, bool [batch, sequence]; None: all are seen.
    """
    if document is None:
        return None if visible is None else visible.long()
    return 2 * document + (1 if visible is None else visible.long())


def from_positions(position_ids: torch.Tensor, *, reads: bool) -> torch.Tensor | None:
    """Documents as transformers finds them in a packed batch: one begins wherever a position does not follow the one
    before it.

    Args:
        position_ids: int64 [batch, sequence].
        reads: whether looking at values is free; then None says that no row has more than one document.
    """
    begins = torch.ones_like(position_ids)
    begins[:, 1:] = position_ids[:, 1:] - position_ids[:, :-1]
    document = (begins != 1).cumsum(-1)
    return None if reads and not document.any() else document


def from_lengths(cumulative: torch.Tensor, length: int) -> torch.Tensor:
    """Documents from where they end, as kernels for packed batches take them.

    Args:
        cumulative: 0 and the end of each document in the one row of the batch, int [documents + 1].
        length: of the row.
    """
    positions = torch.arange(length, device=cumulative.device)
    return (positions[:, None] >= cumulative[None, 1:]).sum(-1)[None]


def from_mask(attention_mask: torch.Tensor, shape: tuple[int, int], *, reads: bool) -> torch.Tensor | None:
    """Which tokens are seen, from a mask of padding.

    Args:
        attention_mask: [batch, sequence], zero for padding.
        shape: batch and sequence.
        reads: whether looking at values is free; then None says that there is no padding.

    Raises:
        UsageError: for any other form of mask.
    """
    if not isinstance(attention_mask, torch.Tensor) or tuple(attention_mask.shape) != shape:
        form = list(attention_mask.shape) if isinstance(attention_mask, torch.Tensor) else type(attention_mask).__name__
        raise UsageError(
            f"An attention mask of form {form} is not possible with context parallelism.",
            where="plugin context_parallel",
            why="masks of queries by keys are as large as what is to be sharded; a mask of padding is "
            f"[batch, sequence], here {list(shape)}",
            fix="pass a mask of padding, or packed documents by position_ids that restart",
        )
    visible = attention_mask.bool()
    return None if reads and bool(visible.all()) else visible
