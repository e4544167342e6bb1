# SPDX-License-Identifier: Apache-2.0
"""Hooks on the output of a sharded layer, before ranks exchange it.

The output of a sharded layer combines the results of several ranks. A plugin that adds something to a layer, such as an
adapter, has to add its term before that, or it would be counted several times, or need its own communication.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

ProductHook = Callable[[nn.Module, tuple[Any, ...], torch.Tensor], torch.Tensor]
"""Called with a layer, its input on this rank, and this rank's product; returns a replacement for the product."""


class WithProductHooks(nn.Module):
    """Base class of layers that exchange their result with other ranks, and call hooks before."""

    def register_product_hook(self, hook: ProductHook) -> RemovableHandle:
        """Registers a hook that is called with every product. Returns a handle with ``remove()``."""
        hooks = vars(self).setdefault("_product_hooks", OrderedDict())
        handle = RemovableHandle(hooks)
        hooks[handle.id] = hook
        return handle

    @property
    def has_product_hooks(self) -> bool:
        return bool(vars(self).get("_product_hooks"))

    def _product(self, input: torch.Tensor, product: torch.Tensor) -> torch.Tensor:
        """Applies the hooks to ``product``.

        Args:
            input: the input of the layer on this rank.
        """
        for hook in vars(self).get("_product_hooks", {}).values():
            product = hook(self, (input,), product)
        return product


def register_product_hook(module: nn.Module, hook: ProductHook) -> RemovableHandle:
    """Registers a hook ``hook(module, input, product)`` on a layer with one input; its return value replaces
    ``product``.

    ``product`` is the result of this rank alone, before it is summed or concatenated with the results of other ranks,
    and before a bias that is added after the sum. ``input`` is a tuple with the layer's input, already gathered if each
    rank computes different features of it. The layout of the layer's weight determines the placement of both: if its
    output features are sharded, so is the product; if its input features are sharded, so is the input, and the product
    is one term of a sum. In a layer of one rank this is a forward hook.

    Call it after layers have been sharded, that is in phase :attr:`~neuron_accel.contract.Phase.ACTIVATIONS` or
    later.

    Returns:
        A handle whose ``remove()`` removes the hook.
    """
    if isinstance(module, WithProductHooks):
        return module.register_product_hook(hook)
    return module.register_forward_hook(hook)
