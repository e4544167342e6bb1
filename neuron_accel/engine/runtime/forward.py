# SPDX-License-Identifier: Apache-2.0
"""The forward of a single module, replaced and restored."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from types import MethodType
from typing import Any

from torch import nn


def wrap_forward(module: nn.Module, call: Callable[..., Any]) -> Callable[[], None]:
    """Replaces the forward of a module, and keeps its class, hooks, copies and pickles.

    Args:
        call: called as ``call(module, forward, *args, **kwargs)`` with the module's previous ``forward``, also by
            copies of the module. Its return value is the output of the module.

    Returns:
        A function that restores the previous forward. Several wrappers of one module are restored last first.
    """
    own = vars(module).get("forward")
    is_bound = isinstance(own, MethodType) and own.__self__ is module

    # Bound to the module, so that a copy of it has its own. Pickled by its name, as the class's own forward: a model
    # that is loaded elsewhere computes as usual.
    def forward(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        former = own
        if own is None or is_bound:
            former = MethodType(type(module).forward if own is None else own.__func__, module)
        return call(module, former, *args, **kwargs)

    # What wraps a forward can be asked for, as its signature can.
    vars(forward).update(call=call, own=own, __signature__=inspect.signature(type(module).forward))
    wrapped = MethodType(forward, module)
    module.forward = wrapped  # type: ignore[method-assign]

    def restore() -> None:
        if vars(module).get("forward") is not wrapped:
            return
        del module.forward
        if own is not None:
            module.forward = own  # type: ignore[method-assign]

    return restore
