"""Weights that are tied because a folder holds the same values for both.

A folder may hold both of two weights that a model ties; one of pickled weights always does. transformers then compares
them, and ties them if they are equal. It cannot compare tensors without values, so that is done here.
"""

from __future__ import annotations

import logging
from typing import Any

import torch
from torch import nn

from neuron_accel.lazy.mapped import MappedTensor, Reader
from neuron_accel.lazy.recording import Recording

_log = logging.getLogger(__name__)
_ROWS = 4 << 20


def tie_equal(model: nn.Module, recording: Recording) -> None:
    """Ties what ``model`` (of transformers' making) declares tied, where both come from files and are equal there."""
    declared: dict[str, Any] = getattr(model, "all_tied_weights_keys", None) or {}
    for target, source in declared.items():
        try:
            one, other = model.get_parameter(target), model.get_parameter(source)
        except AttributeError:
            continue
        if one is other:
            continue
        first, second = recording.source_of(one), recording.source_of(other)
        if first is None or second is None:
            continue
        if equal(first, second):
            owner, _, name = target.rpartition(".")
            setattr(model.get_submodule(owner), name, other)
        else:
            _log.warning(
                "%s and %s are declared tied, but the files hold different values, so they are not tied.",
                target,
                source,
            )


def equal(one: MappedTensor, other: MappedTensor) -> bool:
    """Whether two tensors in files have the same values; read where they do not lie in the same place."""
    if (one.path, one.offset) == (other.path, other.offset):
        return True
    if one.shape != other.shape or one.tensor.dtype != other.tensor.dtype or not one.shape:
        return False
    rows = max(1, _ROWS // max(1, one.tensor[0].numel()))
    with Reader() as reader:
        for begin in range(0, one.shape[0], rows):
            bounds = ((begin, min(begin + rows, one.shape[0])), *((0, size) for size in one.shape[1:]))
            parts = []
            for tensor in (one, other):
                parts.append(torch.empty([stop - start for start, stop in bounds], dtype=tensor.tensor.dtype))
                reader.read(tensor, bounds, parts[-1])
            if not torch.equal(*parts):
                return False
    return True
