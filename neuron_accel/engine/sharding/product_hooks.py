"""Adding to what a layer computes, where a rank computes it.

The output of a divided layer is put together from what several ranks computed. Whoever adds something to a layer, an
adapter say, has to add its part before that, or it would be counted several times, or exchanged by itself.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

ProductHook = Callable[[nn.Module, tuple[Any, ...], torch.Tensor], torch.Tensor]
"""Called with a layer, its input as this rank has it, and this rank's product; returns what takes the product's
place."""


class WithProductHooks(nn.Module):
    """A layer that exchanges what it computed with other ranks, and asks hooks before it does."""

    def register_product_hook(self, hook: ProductHook) -> RemovableHandle:
        """Calls ``hook`` with every product from now on."""
        hooks = vars(self).setdefault("_product_hooks", OrderedDict())
        handle = RemovableHandle(hooks)
        hooks[handle.id] = hook
        return handle

    @property
    def has_product_hooks(self) -> bool:
        return bool(vars(self).get("_product_hooks"))

    def _product(self, input: torch.Tensor, product: torch.Tensor) -> torch.Tensor:
        """What hooks make of ``product``.

        Args:
            input: what it was computed from, as this rank has it.
        """
        for hook in vars(self).get("_product_hooks", {}).values():
            product = hook(self, (input,), product)
        return product


def register_product_hook(module: nn.Module, hook: ProductHook) -> RemovableHandle:
    """Calls ``hook(module, input, product)`` whenever ``module``, a layer with one input, has computed; what it returns
    takes the place of ``product``.

    ``product`` is what this rank itself computed: before it is summed or concatenated with what other ranks have, and
    before a bias that is added behind the sum. ``input`` is a tuple of what it was computed from, brought to all ranks
    already where each computes something of its own with it. How both lie over the ranks follows from the layout of the
    layer's weight: where its output features are cut, so is the product; where its input features are cut, so is the
    input, and the product is one term of a sum. In a layer of one rank alone this is a forward hook.

    To be called when layers have been divided, that is in phase :attr:`~neuron_accel.contract.Phase.ACTIVATIONS` or
    later.

    Returns:
        a handle whose ``remove()`` takes the hook away.
    """
    if isinstance(module, WithProductHooks):
        return module.register_product_hook(hook)
    return module.register_forward_hook(hook)
