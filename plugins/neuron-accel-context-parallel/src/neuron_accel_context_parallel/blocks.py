# SPDX-License-Identifier: Apache-2.0
"""Attention of queries to a block of keys, computed in tiles, and merging of the results of several blocks.

Softmax over all keys is a weighted sum of softmaxes over blocks of keys, with weights from the log-sum-exp of each
block. So attention to a block returns its output and log-sum-exp. No tensor of shape queries x keys is kept: the
backward pass recomputes the scores, tile by tile.

Sources: Milakov and Gimelshein, "Online normalizer calculation for softmax" (2018); Dao et al., "FlashAttention"
(2022), algorithms 1 and 4; Liu and Abbeel, "Blockwise Parallel Transformer for Large Context Models" (2023).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch

TILE = 256
"""Number of queries and of keys in a tile, whose scores fit into the cache of a core."""


@dataclass(frozen=True, kw_only=True)
class Places:
    """Positions and documents of tokens.

    Args:
        index: position in the sequence, int64 [tokens].
        document: index of the document of each query, int64 [batch, tokens]; None: there is one document.
        visible: index of the document of each key, int64 [batch, tokens]; -2 for keys that are masked.
    """

    index: torch.Tensor
    document: torch.Tensor | None = None
    visible: torch.Tensor | None = None


@dataclass(frozen=True, kw_only=True)
class Rule:
    """The mask of a block: which keys a query attends to.

    Args:
        diagonal: whether queries and keys are the same tokens, with a causal mask.
        queries, keys: positions of queries and keys; None if the mask does not depend on them.
        window: size of the sliding window, including the query's own position; None: no window.
        reads: whether reading values on the host is free; tiles that are fully masked are then skipped.
    """

    diagonal: bool = False
    queries: Places | None = None
    keys: Places | None = None
    window: int | None = None
    reads: bool = False

    def tile(self, rows: slice, columns: slice, device: torch.device) -> torch.Tensor | bool:
        """Returns the mask of a tile: bool [batch or 1, 1, 1, rows, columns], True where a query attends to a key; or
        one bool for the full tile."""
        mask = self._of_places(rows, columns)
        if self.reads and mask is not None:
            if not mask.any():
                return False
            mask = None if mask.all() else mask
        if self.diagonal:
            if columns.start >= rows.stop:
                return False
            if columns.stop > rows.start + 1:
                below = torch.ones(
                    rows.stop - rows.start, columns.stop - columns.start, dtype=torch.bool, device=device
                )
                below = below.tril(rows.start - columns.start)
                mask = below[None, None, None] if mask is None else mask & below
        return True if mask is None else mask

    def _of_places(self, rows: slice, columns: slice) -> torch.Tensor | None:
        queries, keys = self.queries, self.keys
        mask = None
        if queries is None or keys is None:
            return mask
        if self.window is not None:
            distance = queries.index[rows, None] - keys.index[None, columns]
            mask = (distance < self.window)[None, None, None]
        if queries.document is not None and keys.visible is not None:
            same = queries.document[:, None, None, rows, None] == keys.visible[:, None, None, None, columns]
            mask = same if mask is None else mask & same
        return mask


@dataclass(frozen=True, kw_only=True)
class Scores:
    """Attention scores: ``cap * tanh(scale * q k^T / cap)``.

    Args:
        scale: factor of the products.
        cap: limit of the scores; None: no limit.
    """

    scale: float
    cap: float | None = None

    def __call__(self, query: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
        """[..., queries, dim] and [..., keys, dim] to [..., queries, keys], float32 or wider."""
        scores = (query @ key.transpose(-1, -2)).to(wide(query.dtype)) * self.scale
        return scores if self.cap is None else self.cap * torch.tanh(scores / self.cap)

    def gradient(self, scores: torch.Tensor, gradient: torch.Tensor) -> torch.Tensor:
        """The gradient of the products of queries and keys from that of their scores."""
        if self.cap is not None:
            gradient = gradient * (1 - (scores / self.cap) ** 2)
        return gradient * self.scale


@dataclass(frozen=True)
class Dropout:
    """Dropout of attention weights, whose mask is regenerated from the seed in the backward pass.

    Args:
        rate: probability of dropout.
        seed: seed of this block.
    """

    rate: float
    seed: int

    def scales(self, shape: torch.Size, rows: slice, columns: slice, device: torch.device) -> torch.Tensor:
        """The factors of the weights of a tile: 0 or ``1 / (1 - rate)``."""
        generator = torch.Generator(device).manual_seed((self.seed + rows.start * 0x9E3779B1 + columns.start) % 2**62)
        return (torch.rand(shape, generator=generator, device=device) >= self.rate).float() / (1 - self.rate)


def wide(dtype: torch.dtype) -> torch.dtype:
    """The dtype of sums over values of ``dtype``: float32 or wider."""
    return torch.promote_types(dtype, torch.float32)


def attend(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    scores: Scores,
    rule: Rule,
    dropout: Dropout | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention to one block of keys.

    Args:
        query: [batch, heads, queries, dim].
        key: [batch, key/value heads, keys, dim]; heads are a multiple of them.
        value: [batch, key/value heads, keys, value dim].
        scores: scale and limit of scores.
        rule: the mask.
        dropout: dropout of attention weights, or None.

    Returns:
        the output [batch, heads, queries, value dim] and the log-sum-exp of the scores [batch, heads, queries], float32
        or wider; zero and -inf for a query that attends to no key.
    """
    groups, tiles = query.shape[1] // key.shape[1], []
    for rows in _tiles(query.shape[2]):
        mine = _fold(query[:, :, rows], groups)
        tiles.append(_attend_rows(mine, key, value, scores, rule, dropout, groups, rows))
    output = torch.cat([_unfold(output, groups) for output, _ in tiles], 2)
    return output, torch.cat([_unfold(log, groups) for _, log in tiles], 2).squeeze(-1)


def _attend_rows(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    scores: Scores,
    rule: Rule,
    dropout: Dropout | None,
    groups: int,
    rows: slice,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The output and log-sum-exp of one tile of folded queries, by online softmax."""
    dtype = wide(query.dtype)
    top = query.new_full((*query.shape[:-1], 1), -torch.inf, dtype=dtype)
    total = torch.zeros_like(top)
    output = query.new_zeros((*query.shape[:-1], value.shape[-1]), dtype=dtype)
    for columns in _tiles(key.shape[2]):
        seen = rule.tile(rows, columns, query.device)
        if seen is False:
            continue
        weights = _masked(scores(query, key[:, :, columns]), seen, groups)
        higher = torch.maximum(top, weights.amax(-1, keepdim=True))
        base = higher if seen is True else _finite(higher)
        shrink = torch.exp(top - base)
        weights = torch.exp(weights - base)
        total = total * shrink + weights.sum(-1, keepdim=True)
        if dropout is not None:
            weights = weights * dropout.scales(weights.shape, rows, columns, weights.device)
        output = output * shrink + (weights.to(value.dtype) @ value[:, :, columns]).to(dtype)
        top = higher
    log = torch.where(total > 0, _finite(top) + torch.log(total), -torch.inf)
    return output / torch.where(total > 0, total, 1), log


def attend_backward(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    gradient: torch.Tensor,
    log: torch.Tensor,
    product: torch.Tensor,
    scores: Scores,
    rule: Rule,
    dropout: Dropout | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The contribution of one block of keys to the gradients of attention to several blocks.

    Args:
        query, key, value, scores, rule, dropout: as in :func:`attend`.
        gradient: gradient of the merged output, [batch, heads, queries, value dim].
        log: log-sum-exp over all keys, [batch, heads, queries].
        product: product of merged output and gradient, summed over the value dim, [batch, heads, queries].

    Returns:
        the gradient of the queries, and those of keys and values concatenated along the last dim; float32 or wider.
    """
    groups, dtype = query.shape[1] // key.shape[1], wide(query.dtype)
    tiles = list(_tiles(query.shape[2]))
    of_queries: list[Any] = [0] * len(tiles)
    of_pairs = []
    base = _finite(log)
    for columns in _tiles(key.shape[2]):
        k, v = key[:, :, columns], value[:, :, columns]
        of_key: Any = 0
        of_value: Any = 0
        for number, rows in enumerate(tiles):
            seen = rule.tile(rows, columns, query.device)
            if seen is False:
                continue
            q, g = _fold(query[:, :, rows], groups), _fold(gradient[:, :, rows], groups)
            plain = scores(q, k)
            weights = torch.exp(_masked(plain, seen, groups) - _fold(base[:, :, rows, None], groups))
            of_weights = (g @ v.transpose(-1, -2)).to(dtype)
            kept = weights
            if dropout is not None:
                factors = dropout.scales(weights.shape, rows, columns, weights.device)
                kept, of_weights = weights * factors, of_weights * factors
            of_value = of_value + (kept.to(g.dtype).transpose(-1, -2) @ g).to(dtype)
            of_scores = weights * (of_weights - _fold(product[:, :, rows, None], groups))
            of_products = scores.gradient(plain, of_scores).to(q.dtype)
            of_queries[number] = of_queries[number] + (of_products @ k).to(dtype)
            of_key = of_key + (of_products.transpose(-1, -2) @ q).to(dtype)
        of_pairs.append(torch.cat([_tensor(of_key, k, dtype), _tensor(of_value, v, dtype)], -1))
    parts = [
        _unfold(_tensor(part, _fold(query[:, :, rows], groups), dtype), groups)
        for part, rows in zip(of_queries, tiles, strict=True)
    ]
    return torch.cat(parts, 2), torch.cat(of_pairs, 2)


def merge(
    output: torch.Tensor, log: torch.Tensor, other: torch.Tensor, other_log: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Merges the outputs and log-sum-exps of :func:`attend` for two blocks of keys."""
    top = _finite(torch.maximum(log, other_log))
    here, there = torch.exp(log - top), torch.exp(other_log - top)
    total = here + there
    share = torch.where(total > 0, total, 1)
    merged = output * (here / share).unsqueeze(-1) + other * (there / share).unsqueeze(-1)
    return merged, torch.where(total > 0, top + torch.log(share), -torch.inf)


def _tiles(length: int) -> Iterator[slice]:
    return (slice(start, min(start + TILE, length)) for start in range(0, length, TILE))


def _fold(rows: torch.Tensor, groups: int) -> torch.Tensor:
    """[batch, heads, rows, ...] to [batch, key/value heads, heads of a group x rows, ...]."""
    return rows if groups == 1 else rows.unflatten(1, (-1, groups)).flatten(2, 3)


def _unfold(rows: torch.Tensor, groups: int) -> torch.Tensor:
    """The inverse of :func:`_fold`."""
    return rows if groups == 1 else rows.unflatten(2, (groups, -1)).flatten(1, 2)


def _masked(scores: torch.Tensor, seen: torch.Tensor | bool, groups: int) -> torch.Tensor:
    if isinstance(seen, bool):
        return scores
    return scores.unflatten(2, (groups, -1)).masked_fill(~seen, -torch.inf).flatten(2, 3)


def _finite(log: torch.Tensor) -> torch.Tensor:
    return torch.where(log == -torch.inf, 0.0, log)


def _tensor(total: Any, like: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """``total``, or zeros if it is an empty sum."""
    return total if isinstance(total, torch.Tensor) else torch.zeros_like(like, dtype=dtype)
