# SPDX-License-Identifier: Apache-2.0
"""transformers' ``gradient_checkpointing_enable()``, and the flag of its Trainer, on lazy devices."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import nn

    from neuron_accel.backends.base import Backend


class LayerRecompute:
    """The function that layers of transformers call to checkpoint their activations. It calls :meth:`Backend.recompute
    <neuron_accel.contract.Backend.recompute>`.

    Copies of a model share it; in a pickled model it becomes ``torch.utils.checkpoint.checkpoint``.
    """

    def __init__(self, backend: Backend) -> None:
        self._backend = backend

    def __call__(self, function: Any, *inputs: Any, **keywords: Any) -> Any:
        return self._backend.recompute(function, *inputs, **keywords)

    def __deepcopy__(self, memo: dict[int, Any]) -> LayerRecompute:
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        from torch.utils.checkpoint import checkpoint

        return functools.partial, (checkpoint,), (checkpoint, (), {"use_reentrant": False}, None)


def recompute_layers(model: nn.Module, backend: Backend) -> Any:
    """Makes layers of transformers checkpoint their activations through ``backend``, whenever that is enabled.

    transformers stores the function that a layer calls as ``_gradient_checkpointing_func``; it is PyTorch's, which
    fails on XLA. Checkpointing can be enabled on the model, on one of its modules or on its wrapper, at any time; so a
    forward pre-hook of the model replaces the function on every layer that has one.

    Returns:
        a handle whose ``remove()`` removes the hook; None if no layer of the model supports checkpointing.
    """
    layers = [module for module in model.modules() if hasattr(module, "gradient_checkpointing")]
    if not layers:
        return None
    recompute = LayerRecompute(backend)

    def adopt(*_: Any) -> None:
        for layer in layers:
            if vars(layer).get("_gradient_checkpointing_func") not in (None, recompute):
                layer._gradient_checkpointing_func = recompute  # type: ignore[assignment]

    return model.register_forward_pre_hook(adopt)
