# SPDX-License-Identifier: Apache-2.0
"""Sends tokens to the ranks of their experts, and their results back.

Where ranks can send different numbers of rows, the module of experts stays as it is, with fewer experts: a hook before
its forward replaces the tokens of this rank by those that any rank sends to this rank's experts, and a hook after it
sends the results back. A token is sent once to each rank that holds one or several of its experts, and one row is
returned: their weighted sum.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from neuron_accel.contract import all_to_all_uneven
from neuron_accel.errors import UnsupportedModelError

if TYPE_CHECKING:
    from neuron_accel.contract import Backend, Group, Join

ELSEWHERE = -1
"""In place of an expert that is on another rank."""

BETWEEN_GRAPHS = "tokens are sent between compiled graphs"
"""What torch.compile says of a graph that ends at experts."""


@dataclass(frozen=True, kw_only=True)
class Routes:
    """Which rows go where in one call.

    Args:
        tokens: number of this rank's tokens.
        sent: this rank's tokens in the order in which they are sent, by rank; int64 ``[sum(sent_counts)]``.
        sent_counts, received_counts: rows to and from each rank.
        rows: for each pair of a received row and one of this rank's experts, the row; int64 ``[pairs]``.
    """

    tokens: int
    sent: torch.Tensor
    sent_counts: tuple[int, ...]
    received_counts: tuple[int, ...]
    rows: torch.Tensor


class Dispatcher:
    """Lets a module with this rank's experts compute for the tokens of all ranks along the axis.

    Args:
        name: name of the module.
        module: the module; its parameters and ``num_experts`` are those of this rank already.
        experts: number of experts of all ranks.
        backend, group: the ranks along the axis; the i-th holds the i-th run of ``num_experts`` experts.
        join: the ranks that may run out of data.

    Attributes:
        tokens: how many tokens of this rank chose each expert in training since :meth:`reset`, int64 ``[experts]``.
        dropped: how many of these choices had no effect, int64, 0-dim.
    """

    def __init__(self, name: str, module: nn.Module, experts: int, backend: Backend, group: Group, join: Join) -> None:
        self.name, self.experts, self.local = name, experts, experts // group.size
        self.backend, self.group, self._join = backend, group, join
        self._arguments = inspect.signature(module.forward)
        self.reset()

    def __deepcopy__(self, memo: dict[int, Any]) -> Dispatcher:
        return copy.copy(self)  # a copy of the model counts for itself, and communicates in the same groups

    def reset(self) -> None:
        """Forgets the load so far."""
        self.tokens, self.dropped = torch.zeros(self.experts, dtype=torch.int64), torch.tensor(0)

    def explain(self) -> str:
        """Describes what a layer sends."""
        raise NotImplementedError

    def inputs(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[torch.Tensor, ...]:
        """The tokens ``[N, H]``, their experts and the weights of these ``[N, k]``, of a call of the module, after
        which all ranks communicate.

        Raises:
            UnsupportedModelError: if the module was called with something else.
            UsageError: if a rank has run out of data.
        """
        values = tuple(self._arguments.bind(*args, **kwargs).arguments.values())
        shapes = [tuple(value.shape) if isinstance(value, torch.Tensor) else value for value in values]
        fits = len(values) == 3 and all(isinstance(value, torch.Tensor) and value.dim() == 2 for value in values)
        if not fits or shapes[1] != shapes[2] or shapes[0][0] != shapes[1][0] or values[1].is_floating_point():
            raise UnsupportedModelError(
                f"The experts {self.name!r} ({type(module).__name__}) were called with {shapes}.",
                where="plugin expert_parallel",
                why="tokens are sent to the ranks of the experts that are named for each of them",
                fix="call them with tokens [N, H], the experts of each token [N, k] and their weights [N, k]",
            )
        self._join.collective_only("sending tokens to experts")
        return values

    def count(self, module: nn.Module, tokens: torch.Tensor, dropped: torch.Tensor | None = None) -> None:
        """Adds to the load, in training."""
        if module.training and torch.is_grad_enabled():
            self.tokens = self.tokens.to(tokens.device) + tokens
            if dropped is not None:
                self.dropped = self.dropped.to(dropped.device) + dropped


class RowDispatcher(Dispatcher):
    """Sends as many rows as there are: none is dropped, none is padded. Needs a backend that
    ``has_uneven_all_to_all``."""

    def __init__(self, name: str, module: nn.Module, *args: Any) -> None:
        super().__init__(name, module, *args)
        self._routes: Routes | None = None
        module.register_forward_pre_hook(self._send, with_kwargs=True)
        module.register_forward_hook(self._return)

    def explain(self) -> str:
        return (
            "Each layer sends a token once to each other rank that holds one of its experts, and gets one row back, "
            "forward and backward."
        )

    # ---- before the module's forward ---------------------------------------------------------------------------------
    @torch.compiler.disable(reason=BETWEEN_GRAPHS)
    def _send(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        hidden, experts, weights = self.inputs(module, args, kwargs)
        self.count(module, torch.bincount(experts.flatten(), minlength=self.experts))
        ranks = torch.div(experts, self.local, rounding_mode="floor")  # [N, k]
        goes = torch.zeros(len(hidden), self.group.size, dtype=torch.bool, device=hidden.device)
        rank, sent = goes.scatter_(1, ranks, True).t().nonzero(as_tuple=True)
        sent_counts, received_counts = self._agree(goes.sum(0))
        here = ranks[sent] == rank[:, None]  # [rows, k]
        local = torch.where(here, experts[sent] - self.local * rank[:, None], ELSEWHERE).to(torch.int32)

        def exchange(rows: torch.Tensor) -> torch.Tensor:
            return all_to_all_uneven(rows, self.backend, self.group, sent_counts, received_counts)

        local, hidden, weights = exchange(local), exchange(hidden[sent]), exchange(weights[sent] * here)
        rows, places = (local != ELSEWHERE).nonzero(as_tuple=True)
        self._routes = Routes(
            tokens=len(goes), sent=sent, sent_counts=sent_counts, received_counts=received_counts, rows=rows
        )
        inputs = hidden[rows], local[rows, places, None].long(), weights[rows, places, None]
        return (inputs if len(rows) else _one_row_of_zeros(*inputs)), {}

    def _agree(self, sent: torch.Tensor) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """The numbers of rows that are sent to and received from each rank, on the host."""
        counts = torch.stack([sent, self.backend.all_to_all(sent, self.group)])
        first, second = self.backend.to_host(counts).tolist()
        return tuple(first), tuple(second)

    # ---- after it ----------------------------------------------------------------------------------------------------
    @torch.compiler.disable(reason=BETWEEN_GRAPHS)
    def _return(self, module: nn.Module, args: tuple[Any, ...], output: torch.Tensor) -> torch.Tensor:
        routes, self._routes = self._routes, None
        assert routes is not None
        back = _sums(output[: len(routes.rows)], routes.rows, sum(routes.received_counts))
        back = all_to_all_uneven(back, self.backend, self.group, routes.received_counts, routes.sent_counts)
        return _sums(back, routes.sent, routes.tokens)


def _sums(values: torch.Tensor, index: torch.Tensor, rows: int) -> torch.Tensor:
    """``[rows, H]``: row i is the sum of the ``values`` ``[M, H]`` whose ``index`` ``[M]`` is i."""
    return values.new_zeros(rows, values.shape[1]).index_add(0, index, values)


def _one_row_of_zeros(*inputs: torch.Tensor) -> Sequence[torch.Tensor]:
    """Computation of a rank that received no token: its experts get gradients of zeros, as experts without tokens do in
    one process, and the backward pass of this rank communicates like that of the others."""
    return tuple(torch.cat([each, each.new_zeros(1, each.shape[1])]) for each in inputs)
