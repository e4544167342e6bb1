# SPDX-License-Identifier: Apache-2.0
"""Checks and describes the trained parameters."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from neuron_accel.errors import ParameterError
from neuron_accel_lora.options import WHERE

if TYPE_CHECKING:
    from neuron_accel.contract import ParameterMap, ParameterRecord
    from neuron_accel_lora.survey import Survey


def check_trained(parameters: ParameterMap, survey: Survey, wanted: int | None) -> None:
    """Checks that the parameters that require a gradient are those that peft trains, and their number.

    Args:
        parameters: of the model.
        survey: of the model.
        wanted: the number of trained elements that the user expects; None: any.

    Raises:
        ParameterError: if they differ.
    """
    trained = {record.fqn: math.prod(record.layout.shape) for record in parameters if trains(record)}
    expected = {parameters[name].fqn for name in survey.trained}
    if trained.keys() != expected or sum(trained.values()) != survey.count:
        odd = sorted(trained.keys() ^ expected)
        raise ParameterError(
            f"{sum(trained.values()):,} elements would be trained, peft trains {survey.count:,}.",
            where=f"{WHERE}{f': {odd[0]!r}' if odd else ''}",
            why="another strategy has changed which parameters require a gradient",
        )
    if wanted is not None and wanted != survey.count:
        raise ParameterError(
            f"{survey.count:,} elements would be trained, not {wanted:,}.",
            where=f"{WHERE}, trainable_parameters",
            why=f"adapters of {len(survey.targets)} layers have {_size(survey, parameters):,}, "
            f"{len(survey.base)} parameters of the base model the rest",
            fix="compare r and target_modules with what you expect, or leave trainable_parameters out",
        )


def trains(record: ParameterRecord) -> bool:
    """Whether a parameter on this rank requires a gradient."""
    return record.current is not None and record.current.requires_grad


def _size(survey: Survey, parameters: ParameterMap) -> int:
    return sum(math.prod(parameters[name].layout.shape) for target in survey.targets for name in target.names)


def explain(parameters: ParameterMap, survey: Survey) -> str:
    """Describes the adapted layers and the layouts of their adapters."""
    total = sum(math.prod(record.layout.shape) for record in parameters)
    lines = [
        f"LoRA: {len(survey.targets)} layers adapted, {survey.count:,} of {total:,} elements trained "
        f"({survey.count / total:.2%})"
    ]
    for target in survey.targets:
        a, b = (parameters[name] for name in target.names)
        cut = [f"{n} sharded over {', '.join(r.layout.axes)}" for n, r in (("A", a), ("B", b)) if r.layout.axes]
        summed = [f"{n} summed over {', '.join(r.partial_axes)}" for n, r in (("A", a), ("B", b)) if r.partial_axes]
        rank, how = a.layout.shape[0], "; ".join([*cut, *summed]) or "replicated"
        lines.append(f"  {target.fqn}: r={rank}, scaling {target.scaling:g}, {how}")
    return "\n".join(lines)
