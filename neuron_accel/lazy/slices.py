# SPDX-License-Identifier: Apache-2.0
"""Reads slices of recorded tensors directly from files.

transformers' conversions of a checkpoint mostly rearrange tensors: they stack the weights of experts, concatenate gate
and up projections, split, transpose and change dtypes. A slice of the result then consists of slices of the tensors in
the files, and nothing else has to be read.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import torch

from neuron_accel.lazy.mapped import Box
from neuron_accel.lazy.recording import Call, Recording, View

_CAT, _STACK = "aten::cat", "aten::stack"
_SAME = frozenset({"aten::clone", "aten::_to_copy"})


class Boxes:
    """Reads slices of tensors of a recording.

    Args:
        recording: the recording.
        reader: reads files, or any other sources of the recording.
    """

    def __init__(self, recording: Recording, reader: Any) -> None:
        self.reader = reader
        self._makers: dict[int, list[Call]] = {}
        for call in recording.calls:
            for memory in (*call.written, *(view.memory for view in call.outputs)):
                self._makers.setdefault(memory, []).append(call)

    def reading(self, reader: Any) -> Boxes:
        """Returns the same tensors with another reader."""
        other = copy.copy(self)
        other.reader = reader
        return other

    def possible(self, view: View) -> bool:
        """Returns whether a tensor consists only of slices of files."""
        makers = self._makers.get(view.memory, ())
        if len(makers) != 1 or len(makers[0].outputs) != 1 or related(view, makers[0].outputs[0]) is None:
            return False
        (call,) = makers
        if call.source is not None:
            return True
        if _name(call) in (_CAT, _STACK):
            return all(isinstance(part, View) and self.possible(part) for part in call.args[0])
        return _name(call) in _SAME and isinstance(call.args[0], View) and self.possible(call.args[0])

    def read(self, view: View, box: Box, out: torch.Tensor) -> None:
        """Reads a slice of a tensor that is :meth:`possible` into ``out``, of the shape of ``box`` and any dtype."""
        if out.numel() == 0:
            return
        (call,) = self._makers[view.memory]
        made = call.outputs[0]
        stored = made.dtype if call.source is None else call.source.tensor.dtype
        if made.dtype not in (out.dtype, stored):  # round twice, as the recorded operations do
            between = torch.empty(out.shape, dtype=made.dtype)
            self.read(view, box, between)
            out.copy_(between)
            return
        box, out = _onto(view, made, box, out)
        if call.source is not None:
            self.reader.read(call.source, box, out)
        elif _name(call) == _CAT:
            self._read_cat(call, box, out)
        elif _name(call) == _STACK:
            dim = _dim(call, len(box))
            for place, index in enumerate(range(*box[dim])):
                self.read(call.args[0][index], (*box[:dim], *box[dim + 1 :]), out.select(dim, place))
        else:
            self.read(call.args[0], box, out)

    def _read_cat(self, call: Call, box: Box, out: torch.Tensor) -> None:
        dim = _dim(call, len(box))
        start = 0
        for part in call.args[0]:
            stop = start + part.size[dim]
            low, high = max(start, box[dim][0]), min(stop, box[dim][1])
            if low < high:
                inner = (*box[:dim], (low - start, high - start), *box[dim + 1 :])
                self.read(part, inner, out.narrow(dim, low - box[dim][0], high - low))
            start = stop


def _name(call: Call) -> str:
    return call.function._schema.name  # type: ignore[union-attr]


def _dim(call: Call, dims: int) -> int:
    dim: Any = call.args[1] if len(call.args) > 1 else call.kwargs.get("dim", 0)
    return dim % dims


def related(view: View, base: View) -> list[tuple[int | None, int]] | None:
    """Returns ``view`` as a slice of ``base``, a dense tensor with the same storage: for each dim of ``base`` the
    corresponding dim of ``view``, or None, and the start of the slice. Returns None if a dim of ``view`` does not
    correspond to one dim of ``base``."""
    along = {stride: dim for dim, (size, stride) in enumerate(zip(view.size, view.stride, strict=True)) if size > 1}
    if len(along) != sum(size > 1 for size in view.size) or view.dtype != base.dtype:
        return None
    result: list[tuple[int | None, int]] = [(None, 0)] * len(base.size)
    rest = view.offset - base.offset
    for dim in _outer_first(base):
        start, rest = divmod(rest, base.stride[dim])
        axis = along.pop(base.stride[dim], None)
        if start + (1 if axis is None else view.size[axis]) > base.size[dim]:
            return None
        result[dim] = (axis, start)
    return None if along or rest else result


def _outer_first(base: View) -> Iterator[int]:
    dims = [dim for dim, size in enumerate(base.size) if size > 1]
    return iter(sorted(dims, key=lambda dim: -base.stride[dim]))


def _onto(view: View, base: View, box: Box, out: torch.Tensor) -> tuple[Box, torch.Tensor]:
    """Returns a box of ``view`` as a box of ``base``, and ``out`` with the dims of ``base``."""
    relation = related(view, base)
    assert relation is not None  # checked by `possible`
    mapped = [dim for dim, _ in relation if dim is not None]
    single = [dim for dim in range(len(box)) if dim not in mapped]
    out = out.permute(*mapped, *single) if box else out
    for _ in single:
        out = out.select(-1, 0)
    result = []
    for place, (dim, start) in enumerate(relation):
        if dim is None:
            out = out.unsqueeze(place)
            result.append((start, start + 1))
        else:
            result.append((start + box[dim][0], start + box[dim][1]))
    return tuple(result), out
