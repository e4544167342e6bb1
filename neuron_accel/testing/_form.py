"""What the conformance kit can tell without training: form, configuration, planning, and files."""

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
from neuron_accel.testing._cases import fingerprint
from neuron_accel.testing.ranks import run_ranks


def discovery_problems(plugin: StrategyPlugin) -> list[str]:
    name, cls = plugin.spec.name, type(plugin)
    try:
        found = default_registry().get(name)
    except PluginError as error:
        return [str(error)]
    if found is not cls:
        return [f"the name {name!r} is that of {found!r}, not of {cls!r}"]
    if default_registry().provenance(cls) == f"module {cls.__module__}":
        return [f"no installed distribution has an entry point {name!r} in the group neuron_accel.plugins"]
    return []


# ---- form ------------------------------------------------------------------------------------------------------------
def form_problems(plugin: StrategyPlugin) -> list[str]:
    cls = type(plugin)
    try:
        check_contract(cls, f"module {cls.__module__}")
    except PluginError as error:
        return [str(error)]
    problems = []
    parameters = getattr(cls, "__dataclass_params__", None)
    if parameters is None or not parameters.frozen:
        problems.append("it is not a frozen dataclass; put @dataclass(frozen=True, kw_only=True) above it")
    positional = [f.name for f in dataclasses.fields(plugin) if f.init and not f.kw_only]
    if positional:
        problems.append(f"options {', '.join(positional)} can be given by position; say kw_only=True")
    return problems


# ---- configuration ---------------------------------------------------------------------------------------------------
def round_trip_problems(plugins: Sequence[StrategyPlugin]) -> list[str]:
    try:
        text = yaml.safe_dump(to_config(plugins))
        again = load_config(yaml.safe_load(text)).plugins
    except (NeuronAccelError, yaml.YAMLError) as error:
        return [f"it cannot be written into a configuration and read back: {error}"]
    return [
        f"{before!r} reads back as {after!r}" for before, after in zip(plugins, again, strict=True) if before != after
    ]


class _Nothing:
    """A value of a type that no option has."""


def strictness_problems(plugin: StrategyPlugin) -> list[str]:
    ((name, options),) = to_config([plugin])["plugins"][0].items()
    problems = []
    if _accepts(name, {**options, "no_such_option": 1}):
        problems.append("an unknown option is accepted")
    problems += [
        f"option {option!r} takes anything; annotate it with the type that it has"
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
    """Plans here, again here, and in two other processes with other environments: always the same, and without a trace
    in this process."""
    before = _world(plugins)
    here = [fingerprint(plugins, ranks) for _ in range(2)]
    after = _world(plugins)
    problems = [f"planning changed {what}" for what in before if before[what] != after[what]]
    elsewhere = run_ranks(fingerprint, 2, list(plugins), ranks, backend=None)
    wrong = [text for text in here if ":" in text]  # an error, not a fingerprint
    if wrong:
        return [*problems, f"there is no plan for it on {ranks} ranks: {wrong[0]}"]
    if len(set(here)) > 1:
        problems.append("planning twice gives two plans")
    if {*elsewhere} - {here[0]}:
        problems.append("the plan depends on the process, its rank or its environment, not only on plugins and ranks")
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
    from safetensors.torch import load_file

    from neuron_accel.checkpoint.tools.consolidate import consolidate

    found: dict[str, torch.Tensor] = {}
    for path in consolidate(Path(folder), output / "model"):
        found |= load_file(path)
    problems = [f"the consolidated model has a {name!r} that the run had not" for name in found if name not in weights]
    for name, value in weights.items():
        if name in found and not torch.equal(found[name], value):
            problems.append(f"{name} is not what the run had")
        elif name not in found and not any(torch.equal(other, value) for other in found.values()):
            problems.append(f"{name} is missing, and tied to nothing that is there")
    return problems
