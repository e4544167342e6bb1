# SPDX-License-Identifier: Apache-2.0
"""Optimizers that a loop steps and has not prepared."""

from __future__ import annotations

import sys
import warnings
import weakref
from types import FrameType
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook

from neuron_accel.engine.plan.plugin import Claim
from neuron_accel.engine.runtime.run import Run
from neuron_accel.errors import UsageError

_LIBRARIES = frozenset({"accelerate", "peft", "torch", "transformers"})
"""Packages whose code acts for its caller."""

_WRAPPERS = "neuron_accel.loop.wrappers"
"""The module of prepared optimizers, which step others: those of a wrapper's or a plugin's own."""


def watch_optimizers(run: Run) -> None:
    """Warns, until the models of a run are released, at the first step of an optimizer that the loop steps itself: a
    step of another one looks it up, and nothing else."""
    reference: weakref.ref[Run] = weakref.ref(run)
    known: weakref.WeakSet[torch.optim.Optimizer] = weakref.WeakSet()

    def look(optimizer: torch.optim.Optimizer, *_: Any) -> None:
        run = reference()
        if run is None or optimizer in known:
            return
        known.add(optimizer)
        prepared = any(each.optimizer is optimizer for each in run.optimizers)
        if not prepared and _is_of_loop(sys._getframe(1)):
            _say(optimizer, run)

    handle = register_optimizer_step_pre_hook(look)
    run.until_released.callback(handle.remove)
    weakref.finalize(run, handle.remove)


def _is_of_loop(frame: FrameType | None) -> bool:
    """Whether the loop has called ``step``: not this package or one of its plugins, nor a prepared optimizer."""
    names = []
    while frame is not None:
        name = str(frame.f_globals.get("__name__"))
        if name.partition(".")[0] not in _LIBRARIES:
            names.append(name)
        frame = frame.f_back
    return not names[0].startswith("neuron_accel") and _WRAPPERS not in names


def _say(optimizer: torch.optim.Optimizer, run: Run) -> None:
    """Warns, or raises where a plugin was to shard the state of an optimizer, and none is prepared."""
    found = [run.find_parameter(p) for group in optimizer.param_groups for p in group["params"] if p.requires_grad]
    name = next((record.fqn for record in found if record is not None), None)
    owner = run.owner(Claim.OPTIMIZER_STATE)
    if name is not None and owner is not None and not run.optimizers and run.backend.world_size > 1:
        raise UsageError(
            f"This {type(optimizer).__name__} steps {name!r}, and no optimizer is prepared.",
            where=f"optimizer.step, plugin {owner.spec.name!r}",
            why="the plugin shards the state of a prepared optimizer, to which gradients are reduced",
            fix="model, optimizer = accelerator.prepare(model, optimizer), before the first backward pass",
        )
    if name is not None:
        warnings.warn(
            f"This {type(optimizer).__name__} steps {name!r}, a parameter of a prepared model, and was not prepared: "
            "no plugin shards, counts or saves what it does. Prepare it: optimizer = accelerator.prepare(optimizer).",
            stacklevel=5,
        )
    elif found and run.data_parallel_size > 1:
        warnings.warn(
            f"This {type(optimizer).__name__} steps parameters of no prepared model: their gradients are not reduced, "
            f"and the {run.data_parallel_size} data-parallel ranks have different values of them. Make them parameters "
            "of the model before you prepare it.",
            stacklevel=5,
        )
