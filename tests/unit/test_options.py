"""Options are counted: a new one takes the place of an old one, or its commit says why there is one more."""

from __future__ import annotations

import argparse
import dataclasses
import inspect
import re
from collections.abc import Iterator
from pathlib import Path

from neuron_accel import NeuronAccelerator
from neuron_accel.cli.main import COMMANDS, build_parser
from neuron_accel.commands import plugin_classes
from neuron_accel.doors import COMMANDS as GROUP
from neuron_accel.doors import PACKAGES

ROOT = Path(__file__).parents[2]
OURS = {*COMMANDS, *(name for offers in PACKAGES.values() for name in offers.get(GROUP, ()))}
CEILING = {"constructor arguments": 27, "flags": 143, "environment variables": 21, "plugin fields": 79}
"""Of the core and the packages together. Where a package is not installed, its flags and fields are not counted."""


def flags() -> Iterator[tuple[str, str]]:
    """Command and name of every option that the help of a command shows."""
    (commands,) = [a for a in build_parser()._actions if isinstance(a.choices, dict)]
    for name, parser in commands.choices.items():
        if name in OURS:
            parser.load()
            for action in parser._actions:
                if action.option_strings and action.dest != "help" and action.help != argparse.SUPPRESS:
                    yield name, action.option_strings[0]


def fields() -> set[tuple[type, str]]:
    """Fields of the plugins of this repository, each with the class that declares it."""
    found = set()
    for cls in plugin_classes():
        if cls.__module__.startswith("neuron_accel"):
            for field in dataclasses.fields(cls):
                owner = next(base for base in cls.__mro__ if field.name in inspect.get_annotations(base))
                found.add((owner, field.name))
    return found


def variables() -> set[str]:
    """Variables of the environment that have this project's name."""
    sources = [*ROOT.glob("neuron_accel/**/*.py"), *ROOT.glob("plugins/*/src/**/*.py")]
    return {name for path in sources for name in re.findall(r'"(NEURON_ACCEL_[A-Z_]+)"', path.read_text())}


def test_options_are_not_more_than_they_were():
    found = {
        "constructor arguments": len(inspect.signature(NeuronAccelerator).parameters),
        "flags": len(set(flags())),
        "environment variables": len(variables()),
        "plugin fields": len(fields()),
    }
    assert {what: count for what, count in found.items() if count > CEILING[what]} == {}, (
        "a new option takes the place of an old one, or raises the ceiling with its reason"
    )
    assert found["constructor arguments"] == CEILING["constructor arguments"]
    assert found["environment variables"] == CEILING["environment variables"], "lower the ceiling"
