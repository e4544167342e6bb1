# SPDX-License-Identifier: Apache-2.0
"""Synchronizes buffers that training changes (running statistics) between ranks that process different samples.

The forward passes of each rank change its own buffers. As in DistributedDataParallel, those of the first rank are
broadcast, so that all ranks evaluate, copy or save the same values after a step.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from neuron_accel.engine.runtime.tensors import broadcast_tensors

if TYPE_CHECKING:
    from neuron_accel.engine.runtime.run import PreparedModel, Run


class BufferBroadcast:
    """Broadcasts the persistent buffers of one model from the first rank, or from the first that still has data.

    A strategy whose ranks process different samples creates one in ``transform_model``, in phase ``GRADIENTS`` or
    later, and calls :meth:`after_step` from its hook of that name. Nothing is sent for a model without buffers, or if
    no training forward has run since the last broadcast. All methods are collective.

    Args:
        model: the model, after all rewrites.
        run: the run.
    """

    def __init__(self, model: PreparedModel, run: Run) -> None:
        self._model, self._run = model, run
        self._is_stale = False
        self._action = run.join.register("the broadcast of buffers", self._send)

        def notice(
            module: nn.Module, _inputs: Any
        ) -> None:  # a function, not a method: a copied model copies its hooks
            if module is model.module and module.training and torch.is_grad_enabled():
                self._is_stale = True

        self._handle = model.module.register_forward_pre_hook(notice) if buffers_by_axes(model, run) else None

    def __repr__(self) -> str:
        return f"<{type(self).__name__} of {self._model!r}>"

    def after_step(self) -> None:
        """Must be called after an optimizer step. Broadcasts the buffers, if a training forward may have changed
        them."""
        if self._is_stale and not self._run.join.is_through:
            self._action()
            self._send()

    def close(self) -> None:
        """Removes the forward hook."""
        if self._handle is not None:
            self._handle.remove()

    def _send(self) -> None:
        self._is_stale = False
        for axes, buffers in buffers_by_axes(self._model, self._run).items():
            broadcast_tensors(buffers, self._run, self._run.group(*axes), self._run.join.position_of_leader(axes))


def buffers_by_axes(model: PreparedModel, run: Run) -> dict[tuple[str, ...], list[torch.Tensor]]:
    """Returns the persistent buffers of a model, each once, by the gradient axes along which ranks hold the same
    modules.

    A buffer belongs to the closest module around it that has parameters. If all of these are sharded along an axis of
    samples (experts over data-parallel ranks), ranks along that axis hold other modules, with buffers of their own.
    """
    result: dict[tuple[str, ...], list[torch.Tensor]] = {}
    saved = model.module.state_dict(keep_vars=True)
    for name, buffer in model.module.named_buffers():
        if name in saved and buffer.device.type != "meta":
            result.setdefault(_axes_of(name, model, run), []).append(buffer)
    return {axes: buffers for axes, buffers in result.items() if axes}


def _axes_of(name: str, model: PreparedModel, run: Run) -> tuple[str, ...]:
    owner = name.rpartition(".")[0]
    while True:
        records = [model.parameters.find(p) for p in model.module.get_submodule(owner).parameters()]
        if records or not owner:
            break
        owner = owner.rpartition(".")[0]
    shared: set[str] = set(run.mesh.gradient_axes) if not records else set()
    for record in records:
        shared |= set(run.mesh.gradient_axes if record is None else record.reduction_axes(run.mesh))
    return tuple(axis for axis in run.mesh.gradient_axes if axis in shared)
