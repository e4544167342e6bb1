# SPDX-License-Identifier: Apache-2.0
"""A cache of the results of operations on tensors without memory, by what determines them.

Most operations of a step are alike: those of every block, of every micro-batch and of most layouts of a model. The
shape of a result and the number of floating-point operations follow from the shapes of the arguments, so that they are
found once, and what changes its first argument, but not its shape, is carried out once. Operations that return a view
are always carried out.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils.flop_counter import flop_registry

_PLAIN = frozenset({int, float, bool, str, type(None), torch.dtype, torch.device, torch.layout, torch.memory_format})
_IS_PRODUCT = re.compile(r"(^|[._])(\w*mm|matmul|linear|conv\w*|\w*attention\w*)$")
"""Names of operations that multiply matrices, and for which torch's counter has no formula."""

_Counter = Callable[[Any, Any, Any], "int | None"]
_Form = tuple[Sequence[int], Sequence[int], torch.dtype]
"""Shape, strides and dtype of a tensor."""


@dataclass(frozen=True, eq=False)
class _Kind:
    """Of an operation, by its schema.

    Args:
        creates: whether it neither changes its arguments nor returns a view of them.
        changes: whether it changes its first argument only, and returns that or nothing.
        count: counts its floating-point operations.
    """

    creates: bool
    changes: bool
    count: _Counter


@dataclass(frozen=True)
class _Known:
    """Of the result of an operation.

    Args:
        forms: shapes, strides and dtypes of the tensors; None in place of one that there is not.
        container: type of the result, if it is not a single tensor.
        operations: number of floating-point operations; None if it is not known.
        is_first: whether the result is the first argument, and there are no new tensors.
    """

    forms: tuple[_Form | None, ...]
    container: Callable[[list[Any]], Any] | None
    operations: int | None
    is_first: bool = False


class _NotRememberedError(Exception):
    """An argument determines the result by more than its shape."""


class Results:
    """The cached results of operations. May be shared by any number of dry runs."""

    def __init__(self) -> None:
        self._known: dict[Any, _Known] = {}
        self._kinds: dict[Any, _Kind] = {}

    def call(self, func: Any, args: Any, kwargs: dict[str, Any]) -> tuple[Any, int | None]:
        """Carries out an operation.

        Args:
            func: the overload, as a dispatch mode receives it.
            args, kwargs: its arguments.

        Returns:
            The result, and the number of floating-point operations: of matrix products, convolutions and attention
            kernels, a multiplication and an addition each; None if it is not known.
        """
        kind = self._kinds.get(func)
        if kind is None:
            kind = self._kinds[func] = _Kind(_creates(func), _changes(func), _counter(func._overloadpacket))
        key = None
        if kind.creates or kind.changes:
            try:
                key = (kind, torch.get_default_dtype(), _form(args), _form(kwargs) if kwargs else None)
            except _NotRememberedError:
                pass
            else:
                known = self._known.get(key)
                if known is not None:
                    return args[0] if known.is_first else _made(known), known.operations
        before = None if key is None or kind.creates else _placed(args[0])
        result = func(*args, **kwargs)
        operations = kind.count(args, kwargs, result)
        if key is not None:
            if kind.creates:
                found = _of(result, args, kwargs, operations)
            elif _placed(args[0]) == before and (result is None or result is args[0]):
                found = _Known((), None, operations, is_first=result is not None)
            else:
                found = None
            if found is not None:
                self._known[key] = found
        return result, operations


def tensors_in(value: Any) -> list[torch.Tensor]:
    """Returns the tensors among the arguments or the results of an operation, in order."""
    if isinstance(value, torch.Tensor):
        return [value]
    if isinstance(value, dict):
        value = value.values()
    elif not isinstance(value, (tuple, list)):
        return []
    return [tensor for each in value if each is not None for tensor in tensors_in(each)]


def _creates(func: Any) -> bool:
    """Whether an operation neither changes its arguments nor returns a view of them, by its schema."""
    schema = func._schema
    return all(value.alias_info is None for value in (*schema.arguments, *schema.returns))


def _changes(func: Any) -> bool:
    """Whether an operation changes its first argument only, and returns that or nothing, by its schema."""
    schema = func._schema
    if not schema.arguments or len(schema.returns) > 1 or schema.name == "aten::set_":  # which memory is not a shape
        return False
    first, *others = schema.arguments
    changed = first.alias_info
    if changed is None or not changed.is_write or any(value.alias_info is not None for value in others):
        return False
    return all(value.alias_info is not None and value.alias_info.is_write for value in schema.returns)


def _placed(value: Any) -> list[Any]:
    """What an operation that changes only elements leaves as it was."""
    return [
        (tensor.shape, tensor.stride(), tensor.storage_offset(), storage._cdata, storage.nbytes())
        for tensor in tensors_in(value)
        for storage in [tensor.untyped_storage()]
    ]


def _form(value: Any) -> Any:
    """What of an argument determines the result, in a form that can be compared."""
    kind = type(value)
    if kind is torch.Tensor or kind is torch.nn.Parameter:
        if not value.is_meta or value.layout is not torch.strided or value.dtype.is_complex:
            raise _NotRememberedError
        return value.shape, value.stride(), value.dtype
    if kind in _PLAIN:
        return kind, value
    if kind is tuple or kind is list or kind is torch.Size:
        return tuple([_form(each) for each in value])
    if kind is dict:
        return tuple([(name, _form(each)) for name, each in value.items()])
    raise _NotRememberedError


def _of(result: Any, args: Any, kwargs: Any, operations: int | None) -> _Known | None:
    """Returns what is cached of a result; None if it is more than new tensors."""
    results = [result] if isinstance(result, torch.Tensor) else result
    if type(results) not in (list, tuple):
        return None
    seen = {tensor.untyped_storage()._cdata for tensor in tensors_in((args, kwargs))}
    forms: list[_Form | None] = []
    for tensor in results:
        if tensor is None:
            forms.append(None)
            continue
        if type(tensor) is not torch.Tensor or tensor.device.type != "meta" or tensor.layout is not torch.strided:
            return None
        storage, empty = tensor.untyped_storage(), _empty((tensor.shape, tensor.stride(), tensor.dtype))
        if storage._cdata in seen or storage.nbytes() != empty.untyped_storage().nbytes() or tensor.storage_offset():
            return None
        seen.add(storage._cdata)
        forms.append((tensor.shape, tensor.stride(), tensor.dtype))
    return _Known(tuple(forms), None if results is not result else type(result), operations)


def _made(known: _Known) -> Any:
    """New tensors like those that are known."""
    if not known.forms:
        return None
    if known.container is None:
        (form,) = known.forms
        assert form is not None
        return _empty(form)
    return known.container([None if form is None else _empty(form) for form in known.forms])


def _empty(form: _Form) -> torch.Tensor:
    return torch.empty_strided(form[0], form[1], dtype=form[2], device="meta")


# ---- floating-point operations ---------------------------------------------------------------------------------------
def _counter(operation: Any) -> _Counter:
    """The function that counts the floating-point operations of an operation."""
    count = flop_registry.get(operation)
    if count is not None:
        return lambda args, kwargs, result: int(count(*args, **kwargs, out_val=result))
    if operation is getattr(torch.ops.aten, "_grouped_mm", None):
        return lambda args, kwargs, result: _grouped_operations(*args[:2])
    number = None if _IS_PRODUCT.search(str(operation)) else 0
    return lambda args, kwargs, result: number


def _grouped_operations(one: torch.Tensor, other: torch.Tensor) -> int:
    """Operations of a product of matrices in groups, as of the experts of a mixture: each row, or column, of the one
    without a dim of groups is in one group."""
    if one.dim() == 3 and other.dim() == 2:
        return 2 * other.numel() * one.shape[-2]
    return 2 * one.numel() * other.shape[-1]
