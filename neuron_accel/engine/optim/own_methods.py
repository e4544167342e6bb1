# SPDX-License-Identifier: Apache-2.0
"""Methods that a user's optimizer has beside those of ``torch.optim.Optimizer``, such as ``eval`` and ``first_step``.

A wrapper whose ``inner`` optimizer updates other tensors than the model's parameters has them too. They run on these
tensors, and what they have written must reach the model before they return.
"""

from __future__ import annotations

import types
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from neuron_accel.errors import UsageError


class OwnMethods:
    """Base class of wrappers with an optimizer ``inner``, whose public methods and attributes they have too."""

    inner: Any

    def __getattr__(self, name: str) -> Any:
        inner = vars(self).get("inner")
        if inner is None or name.startswith("_"):
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        value = getattr(inner, name)
        return partial(self._call, name) if isinstance(value, (types.MethodType, partial)) else value

    def _call(self, name: str, *arguments: Any, **options: Any) -> Any:
        for value in (*arguments, *options.values()):
            if callable(value) or isinstance(value, nn.Parameter):
                raise UsageError(
                    f"{type(self.inner).__name__}.{name} cannot be called with a {type(value).__name__} here.",
                    where=f"optimizer.{name}()",
                    why="it runs on tensors of which the model's parameters are, or have, shards",
                    fix="call it with numbers and other plain values only, or train without sharding",
                )
        return self.call_own(name, arguments, options)

    @abstractmethod
    def call_own(self, name: str, arguments: Sequence[Any], options: Mapping[str, Any]) -> Any:
        """Calls a method of the inner optimizer, whose weights the model's parameters have afterwards."""


class TensorWatch(TorchFunctionMode):
    """Sees whether tensors are used inside of it.

    Args:
        refusal: an error that is raised by the first use; None to note it.
    """

    def __init__(self, refusal: Exception | None = None) -> None:
        super().__init__()
        self._refusal, self.has_seen = refusal, False

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        values = (*args, *(kwargs or {}).values())
        flat = [entry for value in values for entry in (value if isinstance(value, (list, tuple)) else [value])]
        if any(isinstance(value, torch.Tensor) for value in flat):
            self.has_seen = True
            if self._refusal is not None:
                raise self._refusal
        return func(*args, **(kwargs or {}))
