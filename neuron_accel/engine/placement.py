"""Moving a model to its device without losing what its parameters are."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import nn

if TYPE_CHECKING:
    from neuron_accel.engine.parameters import ParameterMap


def place(model: nn.Module, device: torch.device, parameters: ParameterMap) -> None:
    """Moves ``model`` in place; weights that were tied stay tied.

    Between some devices torch makes new parameters, one for each name, and a tied weight would become two.

    Args:
        parameters: of ``model``; it follows the move.
    """
    if all(_same(tensor.device, device) for tensor in (*model.parameters(), *model.buffers())):
        return
    model.to(device)
    for record in parameters:
        if record.current is None:
            continue
        names = [name for name in record.names if _holds(model, name)]
        for name in names[1:]:
            owner, _, attribute = name.rpartition(".")
            setattr(model.get_submodule(owner), attribute, model.get_parameter(names[0]))
    parameters.follow(model)


def _same(one: torch.device, other: torch.device) -> bool:
    # There is one host, with and without a number, but torch copies from the one to the other.
    return one == other or one.type == other.type == "cpu"


def _holds(model: nn.Module, name: str) -> bool:
    owner, _, attribute = name.rpartition(".")
    try:
        return attribute in model.get_submodule(owner)._parameters
    except AttributeError:  # on another rank
        return False
