# SPDX-License-Identifier: Apache-2.0
"""The class of parameters while they have no values: using them is an error that says what to do.

Their memory is NaN in the shape of the parameter. Without this class an average of weights becomes NaN, and a write is
an error of torch about memory.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NoReturn

import torch
from torch import nn
from torch.utils._pytree import tree_leaves

from neuron_accel.errors import UsageError

_METADATA = """
    __deepcopy__ __dir__ __format__ __hash__ __len__ __repr__ __set__ _has_compatible_shallow_copy_type _is_view
    backward constant_ data_ptr dim element_size empty_like fill_ full_like get_device is_complex is_conj
    is_contiguous is_floating_point is_inference is_neg is_pinned is_same_size is_set_to is_shared is_signed
    ndimension nelement new_empty new_full new_ones new_tensor new_zeros numel ones_ ones_like rand_like randn_like
    register_hook register_post_accumulate_grad_hook requires_grad_ retain_grad size storage_offset stride
    untyped_storage zero_ zeros_ zeros_like
"""
_ALLOWED = frozenset(_METADATA.split())
"""Functions of torch that read no values, or fill a tensor with one value, which the shard takes."""

_UNLESS_CHANGED = frozenset({"bfloat16", "contiguous", "cpu", "cuda", "double", "float", "half", "to", "type"})
"""Functions that return the tensor itself where there is nothing to do."""

_LIKE_ANOTHER = frozenset({"expand_as", "reshape_as", "to", "type_as", "view_as"})
"""Functions of which a second tensor gives the shape or dtype."""

_VIEWS = (torch.Tensor.T, torch.Tensor.mT, torch.Tensor.H, torch.Tensor.mH, torch.Tensor.real, torch.Tensor.imag)
_VALUES = frozenset(attribute.__get__ for attribute in _VIEWS)  # type: ignore[attr-defined]
_ALIASES = frozenset({torch.Tensor.data.__get__, torch.Tensor.detach, torch.detach})  # type: ignore[attr-defined]


class _WithoutValues:
    @classmethod
    def __torch_function__(
        cls, func: Any, types: Iterable[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        name = getattr(func, "__name__", "")
        with torch._C.DisableTorchFunctionSubclass():
            if func in _ALIASES:
                return func(*args, **kwargs).as_subclass(ReleasedTensor)
            if name in _ALLOWED or (name == "__get__" and func not in _VALUES):
                return func(*args, **kwargs)
            if name in _LIKE_ANOTHER and not isinstance(args[0], _KINDS):
                return func(*args, **kwargs)
            if name in _UNLESS_CHANGED:
                result = func(*args, **kwargs)
                if result is args[0]:
                    return result
        return _refuse(name, [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, _KINDS)])


def _direct(name: str) -> Any:
    """Returns an attribute that is read and set several times in a step, without ``__torch_function__``."""
    attribute = getattr(torch.Tensor, name)

    def read(self: torch.Tensor) -> Any:
        with torch._C.DisableTorchFunctionSubclass():
            return attribute.__get__(self)

    def write(self: torch.Tensor, value: Any) -> None:
        with torch._C.DisableTorchFunctionSubclass():
            attribute.__set__(self, value)

    def delete(self: torch.Tensor) -> None:
        with torch._C.DisableTorchFunctionSubclass():
            attribute.__delete__(self)

    return property(read, write, delete)


class Released(_WithoutValues, nn.Parameter):
    """A parameter without values."""

    grad = _direct("grad")
    requires_grad = _direct("requires_grad")


class ReleasedTensor(_WithoutValues, torch.Tensor):
    """``.data`` of such a parameter."""


_KINDS = (Released, ReleasedTensor)


def release(parameters: Iterable[torch.Tensor]) -> None:
    """Values of the parameters are an error from now on."""
    for parameter in parameters:
        if type(parameter) is nn.Parameter:
            parameter.__class__ = Released


def restore(parameters: Iterable[torch.Tensor]) -> None:
    """The parameters have values again."""
    for parameter in parameters:
        if type(parameter) is Released:
            parameter.__class__ = nn.Parameter  # type: ignore[assignment]


def _refuse(name: str, used: list[torch.Tensor]) -> NoReturn:
    shape = f" of shape {tuple(used[0].shape)}" if used else ""
    raise UsageError(
        f"A weight{shape} is used outside of the forward and backward pass of its module, by `{name}`.",
        where="fully sharded parameters",
        why="each rank keeps some elements of every parameter, which has values only while its module computes",
        fix="read and write weights inside `with accelerator.full_weights(model):`",
    )
