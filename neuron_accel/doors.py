# SPDX-License-Identifier: Apache-2.0
"""Where other distributions add to this one: entry points, and which package offers what is not installed.

Names are listed without importing anything, and imported when they are used.
"""

from __future__ import annotations

import functools
import importlib
import importlib.metadata
import sys
from collections.abc import Mapping
from importlib.metadata import EntryPoint
from typing import Any

PLUGINS = "neuron_accel.plugins"
"""Group of entry points of plugin classes; the name is that of the plugin's spec."""

COMMANDS = "neuron_accel.commands"
"""Group of entry points of commands of ``neuron-accel``: modules with ``DESCRIPTION``, ``EXAMPLES``,
``add_arguments(parser)`` and ``run(args)``, which returns the exit code."""

CHECKPOINT_READERS = "neuron_accel.checkpoint_readers"
"""Group of entry points of functions that find checkpoints of other libraries (``checkpoint/tools/foreign.py``)."""

TRANSPORTS = "neuron_accel.transports"
"""Group of entry points of packages that connect CPU ranks: the name of a backend of torch.distributed, and the module
whose import registers it. Its reduce-scatters sum in the order of the ranks, bfloat16 and float16 in float32."""

TEST_DEVICES = "neuron_accel.test_devices"
"""Group of entry points of kinds of ranks for tests (``neuron_accel.testing.devices``); the name is a ``backend`` of
``run_ranks``."""

GRAPH_CHECKS = "neuron_accel.graph_checks"
"""Group of entry points of modules that check the graphs of a training (``cli/precompile.py``), with
``run(args, script, launch_options)``, which returns the exit code."""

LAYOUT_CHOICES = "neuron_accel.layout_choices"
"""Group of entry points of functions that choose the layout of ``plugins="auto"`` (``engine/plan/auto.py``)."""

NAMES = "names"
"""No group of entry points: names that ``neuron_accel`` once had itself."""

PACKAGES: Mapping[str, Mapping[str, tuple[str, ...]]] = {
    "neuron-accel-context-parallel": {PLUGINS: ("context_parallel",)},
    "neuron-accel-doctor": {COMMANDS: ("doctor",)},
    "neuron-accel-emulation": {
        TEST_DEVICES: ("native", "native-p2p", "neuron"),
        GRAPH_CHECKS: ("neuron",),
    },
    "neuron-accel-expert-parallel": {PLUGINS: ("expert_parallel",)},
    "neuron-accel-guards": {
        PLUGINS: ("desync_guard", "finite_guard", "recompile_guard", "replica_check", "sum_check"),
    },
    "neuron-accel-host": {TRANSPORTS: ("host",)},
    "neuron-accel-local-sgd": {PLUGINS: ("local_sgd",)},
    "neuron-accel-lora": {PLUGINS: ("lora",)},
    "neuron-accel-migrate": {CHECKPOINT_READERS: ("neuronx",)},
    "neuron-accel-plan": {
        PLUGINS: ("auto_layout",),
        COMMANDS: ("calibrate", "init", "plan", "schedule"),
        LAYOUT_CHOICES: ("search",),
        NAMES: ("LayoutSpace", "Stages", "plan"),
    },
    "neuron-accel-report": {
        PLUGINS: ("run_report",),
        COMMANDS: ("bundle", "report", "trace"),
        NAMES: ("RunReportPlugin",),
    },
    "neuron-accel-testing": {},
}
"""What each package of this project's repository adds."""

SUMMARIES = {
    "bundle": "write what a support ticket asks for into one file",
    "calibrate": "measure this machine, so that plan predicts time on it",
    "doctor": "say what this machine lacks to train on Trainium, and what to do",
    "init": "ask what is trained, and write its script and layout",
    "plan": "count what a training run needs, without hardware",
    "report": "show what training runs did, as a page for a browser",
    "schedule": "draw a pipeline schedule",
    "trace": "make a trace of a run, for Perfetto or Chrome",
}
"""What the commands of these packages do; of others the summary of their distribution is shown."""


@functools.cache
def installed(path: tuple[str, ...]) -> Mapping[str, tuple[EntryPoint, ...]]:
    """Returns the entry points of this project's groups, of the distributions that are installed in ``path``, which is
    ``sys.path``. All distributions are read for them, once for each path."""
    found = importlib.metadata.entry_points()
    return {group: tuple(found.select(group=group)) for group in found.groups if group.startswith("neuron_accel.")}


def entry_points(group: str) -> tuple[EntryPoint, ...]:
    """Returns the installed entry points of a group."""
    return installed(tuple(sys.path)).get(group, ())


def offered_by(group: str, name: str) -> str | None:
    """Returns the package of this project that offers a name, whether or not it is installed; None if none does."""
    return next((package for package, offers in PACKAGES.items() if name in offers.get(group, ())), None)


def not_installed(group: str) -> list[str]:
    """Returns the packages of this project that add to a group, and of which nothing is installed."""
    names = {point.name for point in entry_points(group)}
    return [package for package, offers in PACKAGES.items() if group in offers and not names & {*offers[group]}]


def how_to_install(package: str) -> str:
    """What to do where a package of this project is missing."""
    return f"install the package {package} of this project; in a clone: pip install ./plugins/{package}"


def moved(name: str, asked: str, package: str | None = None) -> Any:
    """Returns an object of a package of this project that ``neuron_accel`` once had.

    Args:
        name: its name.
        asked: the module that is asked for it.
        package: the package; by default the one that offers the name.

    Raises:
        AttributeError: if no package offers it.
        ImportError: if the package is not installed.
    """
    package = package or offered_by(NAMES, name)
    if package is None or name.startswith("_"):
        raise AttributeError(f"module {asked!r} has no attribute {name!r}")
    module = package.replace("-", "_")
    try:
        return getattr(importlib.import_module(module), name)
    except ModuleNotFoundError as error:
        if error.name != module:
            raise
        raise ImportError(f"{name} is in a package of its own: {how_to_install(package)}") from None
