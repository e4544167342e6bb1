# SPDX-License-Identifier: Apache-2.0
"""Checks of the conformance kit without training: contract, configuration, planning, and consolidated files."""

from __future__ import annotations

import dataclasses
import os
import random
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import yaml

from neuron_accel.engine.plan.config import load_config, to_config
from neuron_accel.engine.plan.plugin import StrategyPlugin, check_contract
from neuron_accel.engine.plan.registry import default_registry
from neuron_accel.errors import NeuronAccelError, PluginError

from ._cases import fingerprint
from .ranks import run_ranks


def discovery_problems(plugin: StrategyPlugin) -> list[str]:
    """Whether an entry point of an installed distribution refers to the plugin's class."""
    name, cls = plugin.spec.name, type(plugin)
    try:
        found = default_registry().get(name)
    except PluginError as error:
        return [str(error)]
    if found is not cls:
        return [f"the name {name!r} refers to {found!r}, not to {cls!r}"]
    if default_registry().provenance(cls) == f"module {cls.__module__}":
        return [f"no installed distribution has an entry point {name!r} in the group neuron_accel.plugins"]
    return []


# ---- contract --------------------------------------------------------------------------------------------------------
def form_problems(plugin: StrategyPlugin) -> list[str]:
    """Whether the plugin is a frozen dataclass with keyword-only options and valid hooks."""
    cls = type(plugin)
    try:
        check_contract(cls, f"module {cls.__module__}")
    except PluginError as error:
        return [str(error)]
    problems = []
    parameters = getattr(cls, "__dataclass_params__", None)
    if parameters is None or not parameters.frozen:
        problems.append("it is not a frozen dataclass; decorate it with @dataclass(frozen=True, kw_only=True)")
    positional = [f.name for f in dataclasses.fields(plugin) if f.init and not f.kw_only]
    if positional:
        problems.append(f"options {', '.join(positional)} can be given by position; set kw_only=True")
    return problems


# ---- configuration ---------------------------------------------------------------------------------------------------
def round_trip_problems(plugins: Sequence[StrategyPlugin]) -> list[str]:
    """Whether plugins are equal after writing them to a configuration and reading it."""
    try:
        text = yaml.safe_dump(to_config(plugins))
        again = load_config(yaml.safe_load(text)).plugins
    except (NeuronAccelError, yaml.YAMLError) as error:
        return [f"it cannot be written to a configuration and read from it: {error}"]
    return [
        f"{before!r} is read back as {after!r}" for before, after in zip(plugins, again, strict=True) if before != after
    ]


class _Nothing:
    """A type that no option has."""


def strictness_problems(plugin: StrategyPlugin) -> list[str]:
    """Whether unknown options and values of a wrong type are errors."""
    ((name, options),) = to_config([plugin])["plugins"][0].items()
    problems = []
    if _accepts(name, {**options, "no_such_option": 1}):
        problems.append("an unknown option is accepted")
    problems += [
        f"option {option!r} accepts values of any type; annotate it with its type"
        for option in options
        if _accepts(name, {**options, option: _Nothing()})
    ]
    return problems


def _accepts(name: str, options: Mapping[str, Any]) -> bool:
    try:
        load_config({"plugins": [{name: dict(options)}]})
    except NeuronAccelError:
        return False
    return True


# ---- planning --------------------------------------------------------------------------------------------------------
def purity_problems(plugins: Sequence[StrategyPlugin], ranks: int) -> list[str]:
    """Whether planning twice in this process, and in two others with other environments, makes the same plan, and
    leaves this process unchanged."""
    before = _world(plugins)
    here = [fingerprint(plugins, ranks) for _ in range(2)]
    after = _world(plugins)
    problems = [f"planning changed {what}" for what in before if before[what] != after[what]]
    elsewhere = run_ranks(fingerprint, 2, list(plugins), ranks, backend=None)
    wrong = [text for text in here if ":" in text]  # contains an error instead of a fingerprint
    if wrong:
        return [*problems, f"planning for {ranks} ranks fails: {wrong[0]}"]
    if len(set(here)) > 1:
        problems.append("planning twice makes two different plans")
    if {*elsewhere} - {here[0]}:
        problems.append("the plan depends on the process, its rank or its environment")
    return problems


def _world(plugins: Sequence[StrategyPlugin]) -> dict[str, Any]:
    return {
        "environment variables": dict(os.environ),
        "the random state of torch": torch.get_rng_state().tolist(),
        "the random state of Python": random.getstate(),
        "the number of threads": threading.active_count(),
        "the default dtype": torch.get_default_dtype(),
        "the process group": torch.distributed.is_initialized(),
        "the plugin": [dict(vars(plugin)) for plugin in plugins],
    }


# ---- files -----------------------------------------------------------------------------------------------------------
def consolidation_problems(folder: str, weights: Mapping[str, torch.Tensor], output: Path) -> list[str]:
    """Whether consolidating a checkpoint yields the weights of the run, under the names of published models."""
    from safetensors.torch import load_file

    from neuron_accel.checkpoint.format.published import as_published, model_of
    from neuron_accel.checkpoint.tools.consolidate import consolidate

    found: dict[str, torch.Tensor] = {}
    for path in consolidate(Path(folder), output / "model"):
        found |= load_file(str(path))
    config = output / "model" / "config.json"
    if config.exists() and (model := model_of(config.read_bytes(), weights.keys())) is not None:
        weights = as_published(model, dict(weights))
    problems = [f"the consolidated model has {name!r}, and the run had not" for name in found if name not in weights]
    for name, value in weights.items():
        if name in found and not torch.equal(found[name], value):
            problems.append(f"{name} differs from the run")
        elif name not in found and not any(torch.equal(other, value) for other in found.values()):
            problems.append(f"{name} is missing, and equal to no other tensor that it may be tied to")
    return problems
