"""Dividing inputs between the ranks that see different data, for inference."""

from __future__ import annotations

from typing import Any

import torch

from neuron_accel.engine.errors import UsageError


def share_of(values: Any, rank: int, ranks: int, *, pad: bool = False) -> Any:
    """The ``rank``-th of ``ranks`` consecutive shares, the first ones longer by one where they do not come out even.

    Args:
        values: a list, tuple, tensor (cut along its first dim), dataset with a ``select`` method, or a dict of these
            with equal lengths. Anything else is given back whole.
        rank: which share.
        ranks: number of shares.
        pad: whether shorter shares are filled up with the last value of all.

    Raises:
        UsageError: if the lengths in a dict differ.
    """
    if ranks == 1:
        return values
    if isinstance(values, dict):
        lengths = {key: len(value) for key, value in values.items()}
        if len(set(lengths.values())) > 1:
            raise UsageError(f"The values of a dict to be split have different lengths: {lengths}.")
        return {key: share_of(value, rank, ranks, pad=pad) for key, value in values.items()}
    if not (isinstance(values, (list, tuple, torch.Tensor)) or hasattr(values, "select")):
        return values
    each, extra = divmod(len(values), ranks)
    start = rank * each + min(rank, extra)
    stop = start + each + (rank < extra)
    missing = each + (extra > 0) - (stop - start) if pad and len(values) else 0
    if isinstance(values, torch.Tensor):
        return torch.cat([values[start:stop], *[values[-1:]] * missing]) if missing else values[start:stop]
    if isinstance(values, (list, tuple)):
        return values[start:stop] + values[-1:] * missing
    return values.select([*range(start, stop), *[len(values) - 1] * missing])
