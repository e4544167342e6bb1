"""Attention over a sequence that is sharded over ranks: keys and values go round, queries stay.

Each rank computes the attention of its queries to the keys that it has, hands them on to the next rank, and adds what
its queries make of those that come. In the backward pass keys and values go round once more, and their gradients travel
with them until they are home. What is kept for it is queries, keys, values and output of this rank's own positions, and
one number for each query and head.

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
class Look:
    """How a layer's queries look at keys.

    Args:
        scores: how scores are made.
        window: a query sees this many tokens up to itself; None: all before it.
        dropout: the fraction of attention weights that is dropped.
    """

    scores: Scores
    window: int | None = None
    dropout: float = 0.0


class Ring:
    """The ranks that have the parts of a sequence, each as :mod:`.zigzag` says.

    Args:
        backend: performs the collectives.
        group: the ranks.
    """

    def __init__(self, backend: Backend, group: Group) -> None:
        self.backend, self.group = backend, group
        self.visits = self.windows = 0
        """Number of layers that have called since the model was, and of those that did with a window."""

    @property
    def is_lazy(self) -> bool:
        """Whether all ranks have to trace the same graph."""
        return self.backend.is_lazy

    def __deepcopy__(self, memo: dict[int, Any]) -> Ring:
        return self  # a copied model runs on the same ranks

    def attention(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        look: Look,
        documents: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Causal attention of this rank's positions to those of all ranks. Collective, forward and backward.

        Args:
            query: [batch, heads, positions, dim], of this rank.
            key: [batch, key/value heads, positions, dim]; heads are a multiple of them.
            value: [batch, key/value heads, positions, value dim].
            look: scale, window and the like.
            documents: of all positions of all ranks in the order of the sequence, as
                :func:`~neuron_accel_context_parallel.documents.encode` makes them; None: all see all before them.

        Returns:
            [batch, positions, heads, value dim], in the dtype of the query.
        """
        seed = 0
        if look.dropout:
            seed = int(torch.randint(2**40, ())) * self.group.size + self.group.index
        return _Attention.apply(query, key, value, documents, self, look, seed)  # type: ignore[no-any-return]


class _Course:
    """One way round the ring: what is where in each turn."""

    def __init__(self, ring: Ring, look: Look, documents: torch.Tensor | None, own: torch.Tensor, seed: int) -> None:
        self._ring, self._look, self._seed = ring, look, seed
        self._turns = Turns(ring.backend, ring.group, own.device)
        self._reads = ring.backend.reads_are_free
        self._table = self._queries = self._documents = self._visible = None
        if documents is not None or look.window is not None:
            degree = ring.group.size
            self._table = places = table(own.shape[2] * degree, degree, own.device)
            if documents is not None:
                # whose key no query attends to has an even code
                ordered = documents[:, places.flatten()].unflatten(1, (degree, -1))
                self._documents = ordered // 2
                self._visible = torch.where(ordered % 2 == 1, self._documents, -2)
            self._queries = self._places(self._turns.source(0))

    def own(self) -> tuple[Rule, Dropout | None]:
        """What holds for this rank's queries and its own keys."""
        rule = Rule(
            diagonal=True, queries=self._queries, keys=self._queries, window=self._look.window, reads=self._reads
        )
        return rule, self._dropout(0, 0)

    def meetings(self, turn: int) -> list[tuple[Pair, Rule, Dropout | None]]:
        """What meets in a later turn, and what holds for it."""
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
        look: Look,
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
        # in the order in which a model goes on with it, so that it is kept once
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
            travelling = backend.start_permute(of_pair, group)  # with the keys that it belongs to
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
