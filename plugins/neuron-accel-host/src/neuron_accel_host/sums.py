# SPDX-License-Identifier: Apache-2.0
"""Sums of the tensors of several ranks, with the same bits whatever their memory."""

from __future__ import annotations

from collections.abc import Sequence

import torch

_BLOCK = 1 << 16
"""Number of elements processed at a time, so that the intermediate results stay in the CPU's cache."""


def sum_rows_into(out: torch.Tensor, rows: Sequence[torch.Tensor], scale: float = 1.0) -> None:
    """Writes the sum of two or more flat rows into ``out``, which is flat and of the same dtype.

    Rows are summed in their order, so that the result is deterministic. bfloat16 and float16 are summed in float32 and
    rounded once.

    Args:
        scale: what ``out`` is multiplied by at the end.
    """
    rounds = out.dtype in (torch.bfloat16, torch.float16)
    for begin in range(0, out.numel(), _BLOCK):
        target = out[begin : begin + _BLOCK]
        first, second, *rest = (row[begin : begin + _BLOCK] for row in rows)
        total = first.float() if rounds else torch.add(first, second, out=target)
        for part in (second, *rest) if rounds else rest:
            total += part
        if rounds:
            target.copy_(total)
        if scale != 1.0:
            target *= scale
