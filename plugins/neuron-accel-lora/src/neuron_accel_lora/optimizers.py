# SPDX-License-Identifier: Apache-2.0
"""Replaces the frozen parameters of an optimizer by adapters."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from neuron_accel.errors import ParameterError
from neuron_accel_lora.options import WHERE

if TYPE_CHECKING:
    from neuron_accel.contract import ParameterMap, ParameterRecord, Run
    from neuron_accel_lora.survey import Survey


def hold_adapters(optimizer: torch.optim.Optimizer, surveys: list[tuple[ParameterMap, Survey]], run: Run) -> None:
    """Removes frozen parameters from ``optimizer``, and adds each adapter to the group of the weight that it adapts,
    unless the optimizer holds it already. Empty groups are kept, since schedulers refer to groups by index.

    Raises:
        ParameterError: if the optimizer has state for a frozen weight.
    """
    held = {parameter for group in optimizer.param_groups for parameter in group["params"]}
    adapters = _adapters(surveys)
    for group in optimizer.param_groups:
        trained: list[torch.nn.Parameter] = []
        for parameter in group["params"]:
            if parameter.requires_grad:
                trained.append(parameter)
                continue
            if optimizer.state.pop(parameter, None):
                raise ParameterError(
                    f"{type(optimizer).__name__} has state for weights that are frozen.",
                    where=WHERE,
                    why="adapters are trained instead, without state at the start",
                    fix="build it after `prepare` from the parameters that require a gradient, or with "
                    "neuron_accel.make_optimizer_constructor_lazy",
                )
            record = run.find_parameter(parameter)
            for factor in adapters.get(id(record), ()):
                if factor.current is not None and factor.current not in held:
                    trained.append(factor.current)
        group["params"] = trained


def _adapters(surveys: list[tuple[ParameterMap, Survey]]) -> dict[int, list[ParameterRecord]]:
    """Records of the factors that adapt a weight, by the id of the weight's record."""
    found: dict[int, list[ParameterRecord]] = {}
    for parameters, survey in surveys:
        for target in survey.targets:
            factors = [parameters[name] for name in target.names]
            found.setdefault(id(parameters[target.weight]), []).extend(factors)
    return found
