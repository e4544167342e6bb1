"""``neuron-accel plugins``: which strategies are installed, from where, and what they do."""

from __future__ import annotations

import argparse
import dataclasses
import json
from collections.abc import Sequence
from typing import Any

from neuron_accel.cli.terminal import format_table
from neuron_accel.engine.plan.plugin import StrategyPlugin
from neuron_accel.engine.plan.registry import PluginEntry, Registry
from neuron_accel.errors import NeuronAccelError

SUMMARY = "list the strategies that are installed"
DESCRIPTION = """\
List every strategy that is installed, built in or from another distribution: when it acts, which axes of the
mesh it can bring, which duties it owns, what it needs, and for which version of the plugin contract it was written.
One that cannot be loaded is listed with the reason, and the exit code is 1. Reports what is installed and cannot act as
it wants to: a name or a default duty that is taken. NEURON_ACCEL_DISABLE_PLUGINS, names separated by commas, forbids
the use of plugins.
"""
EXAMPLES = """\
examples:
  neuron-accel plugins            for people
  neuron-accel plugins --json     for programs
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="print JSON")


def run(args: argparse.Namespace) -> int:
    registry = Registry.from_environment()
    plugins = [describe(entry) for entry in registry.entries()]
    problems = [str(problem) for problem in registry.problems()]
    print(json.dumps(plugins, indent=2) if args.json else format_plugins(plugins, problems))
    return 1 if problems or any(plugin["error"] for plugin in plugins) else 0


def describe(entry: PluginEntry) -> dict[str, Any]:
    """What is known about a plugin as plain data; ``error`` says why it cannot be loaded, if so."""
    known: dict[str, Any] = {
        "name": entry.name,
        "version": entry.version,
        "distribution": entry.distribution,
        "class": entry.value,
        "disabled": entry.disabled,
        "contract": None,
        "error": None,
    }
    try:
        cls = entry.load()
        axes = _axes(cls)
    except NeuronAccelError as error:
        return {**known, "error": str(error)}
    except Exception as error:  # of code that is not ours
        return {**known, "error": f"{type(error).__name__}: {error}\n  where: {entry.value} of {entry.source}"}
    spec = cls.spec
    return {
        **known,
        "contract": spec.api_version,
        "phase": spec.phase.name.lower(),
        "axes": axes,
        "provides": sorted(spec.provides),
        "claims": sorted(claim.value for claim in spec.claims),
        "refines": sorted(claim.value for claim in spec.refines),
        "requires": sorted(spec.requires),
        "conflicts": sorted(spec.conflicts),
    }


def _axes(cls: type[StrategyPlugin]) -> list[str] | None:
    """The axes of the mesh that it can bring; None where its options have no defaults to ask with."""
    required = [
        field
        for field in dataclasses.fields(cls)
        if field.init and field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING
    ]
    return None if required else [axis.name for axis in cls().axes()]


def format_plugins(plugins: list[dict[str, Any]], problems: Sequence[str] = ()) -> str:
    if not plugins:
        return "no plugin is installed"
    headers = (
        "name",
        "version",
        "distribution",
        "contract",
        "phase",
        "axes",
        "claims",
        "refines",
        "requires",
        "conflicts",
    )
    rows = [[_cell(plugin, header) for header in headers] for plugin in plugins]
    broken = [f"{plugin['name']}: {plugin['error']}" for plugin in plugins if plugin["error"]]
    sections = [["", "cannot be loaded:", *broken] if broken else [], ["", "problems:", *problems] if problems else []]
    return "\n".join([format_table(headers, rows), *(line for section in sections for line in section)])


def _cell(plugin: dict[str, Any], header: str) -> str:
    if header == "name" and plugin["disabled"]:
        return f"{plugin['name']} (disabled)"
    if header == "phase" and plugin["error"]:
        return "broken"
    value = plugin.get(header)
    return (", ".join(value) if isinstance(value, list) else str(value or "")) or "-"
