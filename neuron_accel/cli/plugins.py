# SPDX-License-Identifier: Apache-2.0
"""``neuron-accel plugins``: lists the installed strategies."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
from collections.abc import Sequence
from typing import Any

from neuron_accel.engine.plan.plugin import AxisSpec, StrategyPlugin
from neuron_accel.engine.plan.registry import PluginEntry, Registry
from neuron_accel.errors import NeuronAccelError
from neuron_accel.terminal import format_pairs, format_table, terminal_width

DESCRIPTION = """\
List every installed strategy, built in or from another distribution: its phase, the axes it can add to the mesh, the
responsibilities it claims, its requirements, and the version of the plugin contract that it was written for. A plugin
that cannot be loaded is listed with the reason, and the exit code is 1; likewise conflicts between distributions about
a name or a default responsibility. NEURON_ACCEL_DISABLE_PLUGINS disables plugins, by names separated by commas.
"""
EXAMPLES = """\
examples:
  neuron-accel plugins            print a table
  neuron-accel plugins --json     print JSON
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="print JSON")


def run(args: argparse.Namespace) -> int:
    registry = Registry.from_environment()
    plugins = [describe(entry) for entry in registry.entries()]
    problems = [str(problem) for problem in registry.problems()]
    print(json.dumps(plugins, indent=2) if args.json else format_plugins(plugins, problems, terminal_width()))
    return 1 if problems or any(plugin["error"] for plugin in plugins) else 0


def describe(entry: PluginEntry) -> dict[str, Any]:
    """Describes a plugin as a dict; ``error`` is the reason why it cannot be loaded, or None."""
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
    except Exception as error:  # raised by the code of the plugin
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
    """The axes that a plugin can add to the mesh; None if an option has no default.

    Some axes, also those of companions, exist only if an option is larger than its default. So each integer option is
    also tried with its default plus one.
    """
    fields = [field for field in dataclasses.fields(cls) if field.init]
    if any(f.default is dataclasses.MISSING and f.default_factory is dataclasses.MISSING for f in fields):
        return None
    by_default = cls()
    names = [axis.name for axis in _all_axes(by_default)]
    for field in fields:
        if type(field.default) is int:
            with contextlib.suppress(Exception):  # an invalid value; errors with the defaults are reported above
                larger = dataclasses.replace(by_default, **{field.name: field.default + 1})
                names += [axis.name for axis in _all_axes(larger)]
    return list(dict.fromkeys(names))


def _all_axes(plugin: StrategyPlugin) -> list[AxisSpec]:
    return [*plugin.axes(), *(axis for companion in plugin.companions() for axis in _all_axes(companion))]


HEADERS = ("name", "version", "distribution", "contract", "phase", "axes", "claims", "refines", "requires", "conflicts")


def format_plugins(plugins: list[dict[str, Any]], problems: Sequence[str] = (), width: int | None = None) -> str:
    """Formats plugins as a table, or as a paragraph each if the table is wider than ``width`` columns."""
    if not plugins:
        return "no plugin is installed"
    rows = [[_cell(plugin, header) for header in HEADERS] for plugin in plugins]
    shown = format_table(HEADERS, rows)
    if width is not None and max(map(len, shown.splitlines())) > width:
        shown = "\n\n".join(_paragraph(row, width) for row in rows)
    broken = [f"{plugin['name']}: {plugin['error']}" for plugin in plugins if plugin["error"]]
    sections = [["", "cannot be loaded:", *broken] if broken else [], ["", "problems:", *problems] if problems else []]
    return "\n".join([shown, *(line for section in sections for line in section)])


def _paragraph(row: Sequence[str], width: int) -> str:
    name, version, distribution, *rest = row
    pairs = [(header, cell) for header, cell in zip(HEADERS[3:], rest, strict=True) if cell != "-"]
    return f"{name}  ({distribution} {version})\n{format_pairs(pairs, width=width)}"


def _cell(plugin: dict[str, Any], header: str) -> str:
    if header == "name" and plugin["disabled"]:
        return f"{plugin['name']} (disabled)"
    if header == "phase" and plugin["error"]:
        return "broken"
    value = plugin.get(header)
    return (", ".join(value) if isinstance(value, list) else str(value or "")) or "-"
