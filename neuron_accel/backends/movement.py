# SPDX-License-Identifier: Apache-2.0
"""Local operations on tensors before and after a collective: splitting, concatenating, summing. No communication.

Collectives use rows: a tensor ``[ranks, *chunk]`` whose row i is sent to, or received from, the i-th rank of a group.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import torch

from neuron_accel.errors import LayoutError

ReduceOp = Literal["sum", "max", "min"]

_BLOCK = 1 << 16
"""Number of elements processed at a time, so that the intermediate results stay in the CPU's cache."""


def normalize_dim(dim: int, tensor: torch.Tensor) -> int:
    """Returns ``dim`` as a non-negative number.

    Raises:
        IndexError: if ``tensor`` has no such dim.
    """
    if not -tensor.dim() <= dim < tensor.dim():
        raise IndexError(f"dim {dim} is out of range for a tensor of {tensor.dim()} dims")
    return dim % tensor.dim()


def split_chunks(tensor: torch.Tensor, dim: int, count: int) -> torch.Tensor:
    """Returns the ``count`` equal chunks of ``tensor`` along ``dim`` as rows ``[count, *chunk]``; a view.

    Raises:
        LayoutError: if the dim is not a multiple of ``count``.
    """
    dim = normalize_dim(dim, tensor)
    size = tensor.shape[dim]
    if size % count:
        raise LayoutError(
            f"Dim {dim} of a tensor of shape {list(tensor.shape)} cannot be split into {count} equal chunks.",
            why=f"{size} is not a multiple of {count}",
            fix="pad it, or choose a degree by which it is divisible",
        )
    return tensor.unflatten(dim, (count, size // count)).movedim(dim, 0)


def join_chunks(rows: torch.Tensor, dim: int) -> torch.Tensor:
    """Inverse of :func:`split_chunks` for a non-negative ``dim``; the result is contiguous. Copies unless ``dim`` is 0
    or all dims before it have size 1."""
    return rows.movedim(0, dim).flatten(dim, dim + 1).contiguous()


def reduce_rows(rows: torch.Tensor, op: ReduceOp) -> torch.Tensor:
    """Returns the element-wise reduction over rows, as a new tensor.

    Rows are summed in their order, so that the result is deterministic. bfloat16 and float16 are summed in float32 and
    rounded once. The sum of booleans is "any".
    """
    if op == "max":
        return rows.amax(0)
    if op == "min":
        return rows.amin(0)
    if rows.dtype == torch.bool:
        return rows.any(0)
    if rows.dtype in (torch.bfloat16, torch.float16):
        total, rest = rows[0].float(), rows[1:]
    elif len(rows) == 1:
        return rows[0].clone()
    else:  # one pass over memory instead of a copy and a sum
        total, rest = rows[0] + rows[1], rows[2:]
    for row in rest:
        total += row
    return total.to(rows.dtype)


def sum_rows_into(out: torch.Tensor, rows: Sequence[torch.Tensor], scale: float = 1.0) -> torch.Tensor:
    """Writes the sum of two or more flat rows into ``out``, which is flat, and returns it. The sum is computed as by
    :func:`reduce_rows`, then converted to the dtype of ``out``, then multiplied by ``scale``."""
    dtype = rows[0].dtype
    rounds = dtype in (torch.bfloat16, torch.float16)
    for begin in range(0, out.numel(), _BLOCK):
        target = out[begin : begin + _BLOCK]
        first, second, *rest = (row[begin : begin + _BLOCK] for row in rows)
        if dtype == out.dtype and not rounds:
            torch.add(first, second, out=target)
            for part in rest:
                target += part
        else:
            total = first.float() if rounds else first.clone()
            for part in (second, *rest):
                total += part
            target.copy_(total.to(dtype))
        if scale != 1.0:
            target *= scale
    return out


# ---- integers for devices that sum in float32 ------------------------------------------------------------------------
_EXACT_BITS = 24
"""float32 holds every integer up to 2**24."""


def is_inexact(tensor: torch.Tensor) -> bool:
    """Returns whether ``tensor`` is of a floating-point or complex dtype."""
    return tensor.is_floating_point() or tensor.is_complex()


def to_digits(tensor: torch.Tensor, terms: int) -> torch.Tensor:
    """Converts integers or booleans to float32 digits ``[digits, *tensor.shape]``, lowest digit first.

    Args:
        tensor: of any integer dtype, or bool.
        terms: number of such tensors whose sum in float32 has to be exact.
    """
    bits, count = _digits(tensor.dtype, terms)
    if count == 1:
        return tensor.unsqueeze(0).to(torch.float32)
    rest, digits = _wide(tensor), []
    for _ in range(count):
        digits.append(rest & ((1 << bits) - 1))
        rest = (rest - digits[-1]) >> bits  # divisible: torch_xla implements the shift as a division
    return torch.stack(digits).to(torch.float32)


def from_digits(digits: torch.Tensor, dtype: torch.dtype, terms: int) -> torch.Tensor:
    """Inverse of :func:`to_digits`, also for a sum of up to ``terms`` such tensors, which wraps around as integers of
    ``dtype`` do. No integer operation here needs more than 24 bits, which are exact on devices that compute in
    float32."""
    bits, count = _digits(dtype, terms)
    if count == 1:
        return digits[0] > 0 if dtype == torch.bool else digits[0].to(torch.int32).to(dtype)
    settled, carry = [], torch.zeros_like(digits[0])
    for index in range(count):
        is_last = index == count - 1
        base = float(1 << (8 * dtype.itemsize - bits * index if is_last else bits))
        value = digits[index] + carry
        carry = torch.floor(value / base)
        value = value - carry * base
        settled.append(torch.where(value >= base / 2, value - base, value) if is_last else value)
    whole = torch.int64 if dtype.itemsize == 8 else torch.int32
    result = settled[0].to(whole)
    for index in range(1, count):
        result = result | (settled[index].to(whole) * (1 << (bits * index)))
    return result.to(dtype)


def _digits(dtype: torch.dtype, terms: int) -> tuple[int, int]:
    """Returns the number of bits of a digit, and the number of digits of an integer."""
    bits = _EXACT_BITS - max(terms - 1, 0).bit_length()
    width = 1 if dtype == torch.bool else 8 * dtype.itemsize
    return bits, -(-width // bits)


def _wide(tensor: torch.Tensor) -> torch.Tensor:
    """Returns ``tensor`` in a dtype that every device can shift."""
    return tensor if tensor.dtype.itemsize == 8 else tensor.to(torch.int32)
