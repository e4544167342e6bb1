# SPDX-License-Identifier: Apache-2.0
"""The forward of a single module, replaced and restored."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from types import MethodType
from typing import Any

from torch import nn


class WrappedForward:
    """A forward that :func:`wrap_forward` has set. It is bound to its module, so that a copy of the module has its own.

    Args:
        call: see :func:`wrap_forward`.
        own: a forward that was set on the object before; None if it used that of its class.
        signature: the signature of the module's forward.
    """

    __name__ = "forward"  # pickled as the class's own forward: a model that is loaded elsewhere computes as usual

    def __init__(self, call: Callable[..., Any], own: Callable[..., Any] | None, signature: inspect.Signature) -> None:
        self.call, self.own, self.__signature__ = call, own, signature

    def __call__(self, module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        own = self.own or MethodType(type(module).forward, module)
        if isinstance(own, MethodType) and isinstance(own.__func__, WrappedForward):
            own = MethodType(own.__func__, module)
        return self.call(module, own, *args, **kwargs)


def wrap_forward(module: nn.Module, call: Callable[..., Any]) -> Callable[[], None]:
    """Replaces the forward of a module, and keeps its class, hooks, copies and pickles.

    Args:
        call: called as ``call(module, forward, *args, **kwargs)`` with the module's previous ``forward``, also by
            copies of the module. Its return value is the output of the module.

    Returns:
        A function that restores the previous forward. Several wrappers of one module are restored last first.
    """
    own = vars(module).get("forward")
    wrapped = MethodType(WrappedForward(call, own, inspect.signature(type(module).forward)), module)
    module.forward = wrapped  # type: ignore[method-assign]

    def restore() -> None:
        if vars(module).get("forward") is not wrapped:
            return
        del module.forward
        if own is not None:
            module.forward = own  # type: ignore[method-assign]

    return restore
