"""Gradients that begin as zeros, where micro-batches accumulate on a device that compiles.

The first micro-batch of a step finds no gradients and the second finds some: two graphs, and another for the step at
the end of an epoch that consists of one micro-batch. With zeros in their place every micro-batch adds to what is there,
and all are one graph. The zeros of a step are made in the graph of the step before, so they cost no execution; only the
first ones are sent to the device.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from torch import nn

    from neuron_accel.backends.base import Backend


class BlankGradients:
    """Zeros for the parameters of one optimizer. Does nothing on eager devices, and without accumulation.

    Args:
        backend: of the run.
        accumulates: says whether steps consist of several micro-batches.
    """

    def __init__(self, backend: Backend, accumulates: Callable[[], bool]) -> None:
        self._lazy, self._accumulates = "lazy" in backend.capabilities, accumulates
        self._zeros: dict[nn.Parameter, torch.Tensor] = {}
        self._arrived: set[torch.Tensor] = set()
        self._watched: dict[nn.Parameter, torch.utils.hooks.RemovableHandle] = {}

    def first(self, parameters: Iterable[nn.Parameter]) -> None:
        """Before a backward pass: those that have no gradient and never had zeros get some."""
        if not self._on:
            return
        for parameter in parameters:
            if parameter.requires_grad and parameter not in self._watched:
                self._watched[parameter] = parameter.register_post_accumulate_grad_hook(self._arrived.add)
                if parameter.grad is None:
                    parameter.grad = torch.zeros(parameter.shape, dtype=parameter.dtype).to(parameter.device)

    def complete(self) -> None:
        """After a backward pass: a parameter that was not used has no gradient, rather than zeros."""
        for parameter in self._watched:
            if parameter not in self._arrived:
                parameter.grad = None

    def prepare(self) -> None:
        """At the end of a step, before its graph is executed: zeros for the next one."""
        if self._on:
            self._zeros = {p: torch.zeros_like(p, requires_grad=False) for p in self._watched}

    def begin(self) -> None:
        """Gradients were dropped."""
        for parameter, zeros in self._zeros.items():
            parameter.grad = zeros
        self._zeros = {}
        self._arrived.clear()

    def close(self) -> None:
        for handle in self._watched.values():
            handle.remove()
        self._watched.clear()

    @property
    def _on(self) -> bool:
        return self._lazy and self._accumulates()
