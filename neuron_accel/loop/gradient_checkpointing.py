"""``model.gradient_checkpointing_enable()`` of transformers, and its Trainer's flag, on devices that compile."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import nn

    from neuron_accel.backends.base import Backend


class LayerRecompute:
    """What layers of transformers call to be recomputed: the backend's :meth:`Backend.recompute
    <neuron_accel.contract.Backend.recompute>`.

    Copies of a model share it; one that is pickled gets PyTorch's.
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
    """Lets layers that checkpoint their activations do so through ``backend``, whenever that was or will be enabled.

    transformers stores the function that checkpoints on each layer (``_gradient_checkpointing_func``), PyTorch's, which
    fails on XLA. There are several ways to enable it, on the model, on a module of it or on its wrapper; all of them
    leave their mark there, and a look at the layers before each forward pass sees it.

    Returns:
        a handle whose ``remove()`` ends this; None if no layer of the model knows how to checkpoint.
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
