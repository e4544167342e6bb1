# SPDX-License-Identifier: Apache-2.0
"""The plugin of chunked cross entropy, and logits that are not computed until they are read."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import nn
from torch.nn import functional as F

from neuron_accel.contract import LogitsTensor, Phase, PluginSpec, StrategyPlugin, wrap_forward
from neuron_accel.errors import ConfigurationError, UnsupportedModelError, UsageError, did_you_mean

if TYPE_CHECKING:
    from neuron_accel.contract import Backend, PreparedModel, Run

_WHERE = "plugin 'chunked_loss'"


@dataclass(frozen=True, kw_only=True)
class ChunkedLossPlugin(StrategyPlugin):
    """Computes the logits and the cross entropy of a training step for one chunk of tokens after another, and again in
    the backward pass, so that the logits of all tokens never exist. Losses and gradients are the same.

    The logits of a large vocabulary, their softmax and their gradient are often the largest tensors of a step; with
    this plugin they are ``chunks`` times smaller. The projection to the vocabulary is computed once more. With tensor
    parallelism each chunk is sharded along the vocabulary, too.

    It applies to every :func:`torch.nn.functional.cross_entropy` of logits and ids, in the model or in the training
    loop, also after logits were cast, scaled, capped by tanh, or shifted. Reading logits in another way computes all of
    them, which is collective under tensor parallelism. In evaluation, without gradients, and under ``torch.compile``,
    logits are computed as usual.

    Args:
        chunks: number of chunks into which the tokens of a batch are divided.
        head: FQN of the module that computes the logits; by default the output embeddings of a transformers model.
    """

    chunks: int = 8
    head: str | None = None

    spec: ClassVar[PluginSpec] = PluginSpec(
        name="chunked_loss", api_version=4, phase=Phase.MEMORY, provides=frozenset({"weights-in-passes"})
    )

    def __post_init__(self) -> None:
        if self.chunks < 1:
            raise ConfigurationError(
                f"chunks is {self.chunks}; it must be at least 1.", where=_WHERE, fix="give 8 if unsure"
            )

    def transform_model(self, model: PreparedModel, run: Run) -> None:
        """Makes the head of the model compute its logits only for a loss.

        Raises:
            ConfigurationError: if there is no module ``head``.
            UnsupportedModelError: if no head is given, and the model does not tell which it is.
        """
        if not model.optimizable:
            return
        head = self._find_head(model)
        if not getattr(head, "stands_for_another_stage", False):
            defer = partial(_defer, run.backend, self.chunks)
            run.undo(wrap_forward(head, defer))

    def explain_model(self, model: PreparedModel, run: Run, *, tokens: int | None = None) -> str:
        """Names the head whose logits are computed in chunks."""
        head = self._find_head(model)
        if not model.optimizable or getattr(head, "stands_for_another_stage", False):
            return ""
        name = next(name for name, module in model.inner.named_modules() if module is head)
        return f"logits of {name!r} and their cross entropy in {self.chunks} chunks of tokens"

    def _find_head(self, model: PreparedModel) -> nn.Module:
        modules = dict(model.inner.named_modules())
        if self.head is not None:
            if self.head not in modules:
                raise ConfigurationError(
                    f"{type(model.original).__name__} has no module {self.head!r}.",
                    where=f"{_WHERE}, head",
                    fix=did_you_mean(self.head, modules),
                )
            return modules[self.head]
        find = getattr(model.inner, "get_output_embeddings", None)
        head = find() if find is not None else None
        if head is None:
            raise UnsupportedModelError(
                f"The module of {type(model.original).__name__} that computes the logits is not known.",
                where=_WHERE,
                why="it has no get_output_embeddings(), as transformers' models have, or that returns None",
                fix="name it: ChunkedLossPlugin(head='lm_head')",
            )
        return head


def _defer(
    backend: Backend, chunks: int, module: nn.Module, forward: Callable[..., torch.Tensor], hidden: torch.Tensor
) -> torch.Tensor:
    """Is the forward of a head."""
    if not module.training or not torch.is_grad_enabled() or torch.compiler.is_compiling():
        return forward(hidden)
    for_loss = getattr(module, "logits_for_loss", forward)
    return DeferredLogits.of(hidden, Head(forward, for_loss, backend, chunks))


# ---- logits that are not computed until they are read ----------------------------------------------------------------
@dataclass(frozen=True, eq=False)
class Head:
    """How logits are computed from hidden states.

    Args:
        full: returns the full logits [..., vocabulary] of hidden states [..., hidden].
        for_loss: returns logits of which only a cross entropy is needed.
        backend: recomputes the logits of a chunk.
        chunks: number of chunks.
        after: element-wise functions to be applied to the logits, in this order.
        detached: whether the logits have no history.
    """

    full: Callable[[torch.Tensor], torch.Tensor]
    for_loss: Callable[[torch.Tensor], torch.Tensor]
    backend: Backend
    chunks: int
    after: tuple[Callable[[torch.Tensor], torch.Tensor], ...] = ()
    detached: bool = False

    def apply(self, hidden: torch.Tensor, *, full: bool) -> torch.Tensor:
        """Returns the logits [..., vocabulary] of hidden states [..., hidden]."""
        with torch.set_grad_enabled(torch.is_grad_enabled() and not self.detached):
            logits = self.full(hidden) if full else self.for_loss(hidden)
            for function in self.after:
                logits = function(logits)
            return logits


class DeferredLogits(LogitsTensor):
    """Logits of which the rank holds the hidden states, ``held`` [..., hidden]."""

    _head: Head
    _full: torch.Tensor | None

    @staticmethod
    def of(hidden: torch.Tensor, head: Head) -> DeferredLogits:
        """Creates the logits of hidden states [..., hidden]."""
        like = head.apply(hidden.reshape(-1, hidden.shape[-1])[:0], full=False)
        return DeferredLogits._create(hidden, head, like.shape[-1], like.dtype, like.requires_grad)

    @staticmethod
    def _create(
        hidden: torch.Tensor, head: Head, vocabulary: int, dtype: torch.dtype, requires_grad: bool
    ) -> DeferredLogits:
        origin = torch.empty(0, requires_grad=requires_grad)  # the weights of the head may be all that trains
        logits = _Deferred.apply(origin, hidden.device, (*hidden.shape[:-1], vocabulary), dtype)
        logits.held, logits._head, logits._full = hidden, head, None
        return logits

    def with_held(self, held: torch.Tensor) -> DeferredLogits:
        return self._create(held, self._head, self.shape[-1], self.dtype, self.requires_grad)

    def mapped(self, function: Callable[[torch.Tensor], torch.Tensor]) -> DeferredLogits:
        head = replace(self._head, after=(*self._head.after, function))
        dtype = function(torch.empty(0, dtype=self.dtype, device=self.device)).dtype
        return self._create(self.held, head, self.shape[-1], dtype, self.requires_grad)

    def detached(self) -> DeferredLogits:
        return self._create(self.held, replace(self._head, detached=True), self.shape[-1], self.dtype, False)

    def full_tensor(self) -> torch.Tensor:
        """Computes the full logits, differentiable; the result is cached. Collective under tensor parallelism."""
        wants_grad = self.requires_grad and torch.is_grad_enabled()
        if self._full is None or self._full.requires_grad != wants_grad:
            self._full = self._head.apply(self.held, full=True)
        return self._full

    def cross_entropy(
        self, target: torch.Tensor, *, ignore_index: int, reduction: str, label_smoothing: float
    ) -> torch.Tensor:
        target = target.to(self.device)
        hidden, ids = self.held.reshape(-1, self.held.shape[-1]), target.reshape(-1)

        def of_chunk(hidden: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
            # in float32, as cross entropy is computed in any case; the sum of a chunk is not rounded to less
            logits = self._head.apply(hidden, full=False)
            logits = logits if logits.dtype == torch.float64 else logits.float()
            each = "none" if reduction == "none" else "sum"
            return F.cross_entropy(
                logits, ids, ignore_index=ignore_index, reduction=each, label_smoothing=label_smoothing
            )

        count = max(1, min(self._head.chunks, len(ids)))
        losses = [
            self._head.backend.recompute(of_chunk, *chunk)
            for chunk in zip(hidden.tensor_split(count), ids.tensor_split(count), strict=True)
        ]
        if reduction == "none":
            return torch.cat(losses).reshape(target.shape).to(self.dtype)
        total = torch.stack(losses).sum()
        return (total / (ids != ignore_index).sum() if reduction == "mean" else total).to(self.dtype)

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]  # of Tensor, which is untyped
        return f"DeferredLogits(shape={tuple(self.shape)}, dtype={self.dtype}, in {self._head.chunks} chunks)"


class _Deferred(torch.autograd.Function):
    """Autograd node of logits that are not computed."""

    @staticmethod
    def forward(
        ctx: Any, origin: torch.Tensor, device: torch.device, shape: tuple[int, ...], dtype: torch.dtype
    ) -> torch.Tensor:
        return torch.Tensor._make_wrapper_subclass(DeferredLogits, shape, dtype=dtype, device=device)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        raise UsageError(
            "Gradients reached logits that were not computed.",
            where=_WHERE,
            why="they were passed to a custom autograd function or to a collective, which cannot compute them",
            fix="pass logits.full_tensor(), or leave the plugin out",
        )
