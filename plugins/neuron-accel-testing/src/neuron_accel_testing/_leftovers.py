# SPDX-License-Identifier: Apache-2.0
"""Checks that a plugin leaves nothing behind after a run, by comparing snapshots of a rank before and after it."""

from __future__ import annotations

import copy
import dataclasses
import os
import sys
import threading
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from neuron_accel.engine.plan.plugin import StrategyPlugin
from neuron_accel.loop.watchdog import THREAD_NAME

from ._cases import Case, Trainee

_HOOKS = (
    "_forward_hooks",
    "_forward_pre_hooks",
    "_backward_hooks",
    "_backward_pre_hooks",
    "_state_dict_hooks",
    "_state_dict_pre_hooks",
    "_load_state_dict_pre_hooks",
    "_load_state_dict_post_hooks",
)
_CONTAINERS = (dict, list, set)
_CHILDREN = ("_parameters", "_buffers", "_modules", "_non_persistent_buffers_set")


@dataclass(frozen=True, kw_only=True)
class ModelShape:
    """A snapshot of a model: attributes and hooks of its modules, and hooks of its parameters."""

    modules: dict[str, tuple[nn.Module, type, frozenset[str], dict[str, int]]]
    parameters: dict[str, tuple[nn.Parameter, int]]

    @classmethod
    def of(cls, model: nn.Module) -> ModelShape:
        return cls(
            modules={
                name: (module, type(module), _own_attributes(module), _hooks(module))
                for name, module in model.named_modules()
            },
            parameters={name: (parameter, _tensor_hooks(parameter)) for name, parameter in model.named_parameters()},
        )

    def changes(self) -> list[str]:
        """How the modules and parameters differ from the snapshot."""
        found = []
        for name, (module, cls, attributes, hooks) in self.modules.items():
            where = f"module {name!r}" if name else "the model"
            if type(module) is not cls:
                found.append(f"{where} is now a {type(module).__name__}, and was a {cls.__name__}")
            found += [f"{where} has a new attribute {key!r}" for key in sorted(_own_attributes(module) - attributes)]
            found += [
                f"{where} has {count} {kind.strip('_').replace('_', ' ')}, and had {hooks.get(kind, 0)}"
                for kind, count in _hooks(module).items()
                if count > hooks.get(kind, 0)
            ]
        for name, (parameter, hooks_before) in self.parameters.items():
            if _tensor_hooks(parameter) > hooks_before:
                found.append(f"parameter {name!r} has new hooks")
        return found


def _own_attributes(module: nn.Module) -> frozenset[str]:
    return frozenset(vars(module)) - {*_HOOKS, *_CHILDREN}


def _hooks(module: nn.Module) -> dict[str, int]:
    return {kind: len(getattr(module, kind, None) or ()) for kind in _HOOKS}


def _tensor_hooks(parameter: nn.Parameter) -> int:
    kinds = ("_backward_hooks", "_post_accumulate_grad_hooks")
    return sum(len(getattr(parameter, kind, None) or ()) for kind in kinds)


@dataclass(frozen=True)
class World:
    """A snapshot of the global state of a process: threads, process groups, environment, functions of libraries."""

    threads: frozenset[str]
    groups: int
    environment: dict[str, str] = field(repr=False)
    functions: dict[str, Any] = field(repr=False)

    @classmethod
    def now(cls) -> World:
        return cls(
            threads=frozenset(
                f"{thread.name} ({thread.ident})" for thread in threading.enumerate() if thread.name != THREAD_NAME
            ),
            groups=len(torch.distributed.distributed_c10d._world.pg_map) if torch.distributed.is_initialized() else 0,
            environment=dict(os.environ),
            functions=_functions(),
        )

    def changes(self) -> list[str]:
        after = World.now()
        found = [f"thread {name} is still running" for name in sorted(after.threads - self.threads)]
        if after.groups > self.groups:
            found.append(f"there are {after.groups - self.groups} more process groups")
        found += [
            f"the environment variable {name} has changed"
            for name in sorted({*self.environment, *after.environment})
            if self.environment.get(name) != after.environment.get(name)
        ]
        found += [
            f"{name} was replaced"
            for name, value in self.functions.items()
            if name in after.functions and after.functions[name] is not value
        ]
        return found


def _functions() -> dict[str, Any]:
    """Functions and methods of libraries that a plugin could patch, by dotted name."""
    import accelerate

    places = (
        torch,
        torch.nn.functional,
        torch.distributed,
        torch.autograd,
        torch.Tensor,
        nn.Module,
        nn.Linear,
        nn.Embedding,
        torch.optim.Optimizer,
        torch.optim.AdamW,
        torch.utils.data.DataLoader,
        accelerate.Accelerator,
    )
    return {
        f"{place.__name__}.{name}": value for place in places for name, value in vars(place).items() if callable(value)
    }


def leftovers(case: Case, plain: Case) -> list[str]:
    """Describes what a run leaves behind on this rank, after ``free_memory`` and the shutdown of its backend.

    Args:
        case: a training with the plugins.
        plain: the same without plugins. It runs first, since Accelerate and torch leave changes of their own in a
            process.
    """
    without_plugins = _model_changes(plain)
    world = World.now()
    snapshots = [Attributes(where, place) for plugin in case.plugins for where, place in _places(plugin)]
    found = [change for change in _model_changes(case) if change not in without_plugins]
    found += [change for snapshot in snapshots for change in snapshot.changes()]
    return found + world.changes()


def _model_changes(case: Case) -> list[str]:
    """How a model differs after a run, unless it stays sharded."""
    torch.manual_seed(0)
    built = case.model()
    shape = ModelShape.of(built)
    trainee = Trainee(dataclasses.replace(case, model=lambda: built))
    trainee.train()
    run = trainee.accelerator.run
    sharded = any(r.layout.cuts or r.holders or r.weights for model in run.models for r in model.parameters)
    trainee.accelerator.free_memory()
    changes = [] if sharded else shape.changes()  # a sharded model keeps the hooks that it needs
    run.backend.shutdown()  # not end_training, which destroys every group
    return changes


class Attributes:
    """A snapshot of the attributes of an object, class or module; containers are compared by content.

    Args:
        where: what it is, for messages.
        place: the object, class or module.
    """

    def __init__(self, where: str, place: Any) -> None:
        self._where, self._place = where, place
        self._before = {name: copy.copy(v) if isinstance(v, _CONTAINERS) else v for name, v in vars(place).items()}

    def changes(self) -> list[str]:
        after = vars(self._place)
        return [
            f"{self._where} has changed in {name!r}"
            for name in sorted({*self._before, *after})
            if not name.startswith("__") and not self._same(name, after)
        ]

    def _same(self, name: str, after: Any) -> bool:
        if name not in self._before or name not in after:
            return False
        before, now = self._before[name], after[name]
        return before == now if isinstance(before, _CONTAINERS) else before is now


def _places(plugin: StrategyPlugin) -> list[tuple[str, Any]]:
    """Objects in which a plugin could keep state after a run: itself, its class and its module."""
    cls, name = type(plugin), plugin.spec.name
    module = sys.modules[cls.__module__]
    return [(f"plugin {name!r}", plugin), (f"the class of plugin {name!r}", cls), (f"module {module.__name__}", module)]
