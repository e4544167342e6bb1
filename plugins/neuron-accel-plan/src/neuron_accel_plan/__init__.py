# SPDX-License-Identifier: Apache-2.0
"""What a layout of a model on many ranks needs, without hardware: memory, traffic and operations are counted by a dry
run, time is predicted, and layouts are searched."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from neuron_accel_plan.calibration import Machine as Machine
    from neuron_accel_plan.calibration import load_calibration as load_calibration
    from neuron_accel_plan.entry import plan as plan
    from neuron_accel_plan.layout import LayoutCount as LayoutCount
    from neuron_accel_plan.script import ScriptCount as ScriptCount
    from neuron_accel_plan.script import count_training as count_training
    from neuron_accel_plan.search import Search as Search
    from neuron_accel_plan.spaces import LayoutSpace as LayoutSpace
    from neuron_accel_plan.spaces import Stages as Stages
    from neuron_accel_plan.step import StepCount as StepCount
    from neuron_accel_plan.time import StepTime as StepTime
    from neuron_accel_plan.time import predict_time as predict_time

_WHERE = {
    "LayoutCount": "layout",
    "LayoutSpace": "spaces",
    "Machine": "calibration",
    "ScriptCount": "script",
    "Search": "search",
    "Stages": "spaces",
    "StepCount": "step",
    "StepTime": "time",
    "count_training": "script",
    "load_calibration": "calibration",
    "plan": "entry",
    "predict_time": "time",
}

__all__ = list(_WHERE)
__version__ = "0.1.0"


def __getattr__(name: str) -> Any:  # what most of them import is torch
    if name not in _WHERE:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_WHERE[name]}"), name)
