# SPDX-License-Identifier: Apache-2.0
"""Ring attention over a sequence that is sharded over ranks: keys and values are passed around, queries are not.

In each step a rank computes attention of its queries to the keys that it has, sends these to the next rank, and merges
the results. In the backward pass keys and values are passed around once more, together with their gradients. Kept for
the backward pass are queries, keys, values and output of the rank's own positions, and one number per query and head.

Source: Liu, Zaharia and Abbeel, "Ring Attention with Blockwise Transformers for Near-Infinite Context" (2023).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from neuron_accel_context_parallel.blocks import Dropout, Places, Rule, Scores, attend, attend_backward, merge
from neuron_accel_context_parallel.turns import Pair, Rows, Turns
from neuron_accel_context_parallel.zigzag import table

if TYPE_CHECKING:
    from neuron_accel.contract import Backend, Group


@dataclass(frozen=True, kw_only=True)
class AttentionOptions:
    """Options of a layer's attention.

    Args:
        scores: scale and limit of scores.
        window: size of the sliding window, including the query's own position; None: no window.
        dropout: probability of dropout of attention weights.
    """

    scores: Scores
    window: int | None = None
    dropout: float = 0.0


class Ring:
    """The ranks over which sequences are sharded, as in :mod:`.zigzag`.

    Args:
        backend: performs the collectives.
        group: the ranks.
    """

    def __init__(self, backend: Backend, group: Group) -> None:
        self.backend, self.group = backend, group
        self.visits = self.windows = 0
        """Number of layers that have called the attention in this call of the model, and of those with a window."""

    @property
    def is_lazy(self) -> bool:
        """Whether the device is lazy, so that all ranks have to trace the same graph."""
        return self.backend.is_lazy

    def __deepcopy__(self, memo: dict[int, Any]) -> Ring:
        return self  # a copied model runs on the same ranks

    def attention(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        look: AttentionOptions,
        documents: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Causal attention of this rank's positions to those of all ranks. Collective, forward and backward.

        Args:
            query: [batch, heads, positions, dim], of this rank.
            key: [batch, key/value heads, positions, dim]; heads are a multiple of them.
            value: [batch, key/value heads, positions, value dim].
            look: options of the attention.
            documents: codes of all positions in the order of the sequence, from
                :func:`~neuron_accel_context_parallel.documents.encode`; None: only the causal mask applies.

        Returns:
            [batch, positions, heads, value dim], in the dtype of the query.
        """
        seed = 0
        if look.dropout:
            seed = int(torch.randint(2**40, ())) * self.group.size + self.group.index
        return _Attention.apply(query, key, value, documents, self, look, seed)  # type: ignore[no-any-return]


class _Course:
    """One pass around the ring: positions, masks and dropout of each step."""

    def __init__(
        self, ring: Ring, look: AttentionOptions, documents: torch.Tensor | None, own: torch.Tensor, seed: int
    ) -> None:
        self._ring, self._look, self._seed = ring, look, seed
        self._turns = Turns(ring.backend, ring.group, own.device)
        self._reads = ring.backend.reads_are_free
        self._table = self._queries = self._documents = self._visible = None
        if documents is not None or look.window is not None:
            degree = ring.group.size
            self._table = places = table(own.shape[2] * degree, degree, own.device)
            if documents is not None:
                # an even code: no query attends to this key
                ordered = documents[:, places.flatten()].unflatten(1, (degree, -1))
                self._documents = ordered // 2
                self._visible = torch.where(ordered % 2 == 1, self._documents, -2)
            self._queries = self._places(self._turns.source(0))

    def own(self) -> tuple[Rule, Dropout | None]:
        """Mask and dropout of this rank's queries and its own keys."""
        rule = Rule(
            diagonal=True, queries=self._queries, keys=self._queries, window=self._look.window, reads=self._reads
        )
        return rule, self._dropout(0, 0)

    def meetings(self, turn: int) -> list[tuple[Pair, Rule, Dropout | None]]:
        """The queries and keys of a later step, with their mask and dropout."""
        result = []
        keys = None if self._table is None else self._places(self._turns.source(turn))
        for number, pair in enumerate(self._turns.pairs(turn)):
            rule = Rule(
                queries=_some(self._queries, pair.queries),
                keys=_some(keys, pair.keys),
                window=self._look.window,
                reads=self._reads,
            )
            result.append((pair, rule, self._dropout(turn, number)))
        return result

    def _places(self, source: int | torch.Tensor) -> Places:
        assert self._table is not None
        index = _pick(self._table, 0, source)
        if self._documents is None or self._visible is None:
            return Places(index=index)
        return Places(index=index, document=_pick(self._documents, 1, source), visible=_pick(self._visible, 1, source))

    def _dropout(self, turn: int, number: int) -> Dropout | None:
        if not self._look.dropout:
            return None
        return Dropout(self._look.dropout, (self._seed * 64 + turn * 2 + number) * 0x9E3779B97F4A7C15 % 2**61)


def _pick(values: torch.Tensor, dim: int, source: int | torch.Tensor) -> torch.Tensor:
    return values.select(dim, source) if isinstance(source, int) else values.index_select(dim, source).squeeze(dim)


def _some(places: Places | None, rows: Rows) -> Places | None:
    if places is None:
        return None
    return Places(
        index=rows.take(places.index, 0),
        document=None if places.document is None else rows.take(places.document, 1),
        visible=None if places.visible is None else rows.take(places.visible, 1),
    )


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        documents: torch.Tensor | None,
        ring: Ring,
        look: AttentionOptions,
        seed: int,
    ) -> torch.Tensor:
        backend, group, dim = ring.backend, ring.group, key.shape[-1]
        course = _Course(ring, look, documents, query, seed)
        pair = torch.cat([key, value], -1)  # one message instead of two
        coming = backend.start_permute(pair, group)
        rule, dropout = course.own()
        output, log = attend(query, key, value, look.scores, rule, dropout)
        for turn in range(1, group.size):
            pair = coming.wait()
            if turn + 1 < group.size:
                coming = backend.start_permute(pair, group)
            for meeting, rule, dropout in course.meetings(turn):
                theirs = meeting.keys.take(pair, 2)
                part, part_log = attend(
                    meeting.queries.take(query, 2), theirs[..., :dim], theirs[..., dim:], look.scores, rule, dropout
                )
                laid, laid_log = meeting.queries.lay(part, 2, 0.0), meeting.queries.lay(part_log, 2, -torch.inf)
                output, log = merge(output, log, laid, laid_log)
        # in the layout that the model uses next, so that only one copy is kept
        result = output.transpose(1, 2).to(query.dtype).contiguous()
        ctx.save_for_backward(query, key, value, documents, result, log)
        ctx.ring, ctx.look, ctx.seed = ring, look, seed
        return result

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[Any, ...]:
        query, key, value, documents, result, log = ctx.saved_tensors
        ring, look = ctx.ring, ctx.look
        backend, group, dim = ring.backend, ring.group, key.shape[-1]
        course = _Course(ring, look, documents, query, ctx.seed)
        product = (gradient * result).to(log.dtype).sum(-1).transpose(1, 2)
        gradient = gradient.transpose(1, 2)
        pair = torch.cat([key, value], -1)
        coming = backend.start_permute(pair, group)
        rule, dropout = course.own()
        of_query, of_pair = attend_backward(query, key, value, gradient, log, product, look.scores, rule, dropout)
        for turn in range(1, group.size):
            pair = coming.wait()
            travelling = backend.start_permute(of_pair, group)  # sent with its keys
            if turn + 1 < group.size:
                coming = backend.start_permute(pair, group)
            more: Any = 0
            for meeting, rule, dropout in course.meetings(turn):
                theirs, mine = meeting.keys.take(pair, 2), meeting.queries
                part, part_of_pair = attend_backward(
                    mine.take(query, 2),
                    theirs[..., :dim],
                    theirs[..., dim:],
                    mine.take(gradient, 2),
                    mine.take(log, 2),
                    mine.take(product, 2),
                    look.scores,
                    rule,
                    dropout,
                )
                of_query = of_query + mine.lay(part, 2, 0.0)
                more = more + meeting.keys.lay(part_of_pair, 2, 0.0)
            of_pair = travelling.wait() + more
        of_pair = backend.permute(of_pair, group)
        of_key, of_value = of_pair[..., :dim].to(key.dtype), of_pair[..., dim:].to(value.dtype)
        return of_query.to(query.dtype), of_key, of_value, None, None, None, None
