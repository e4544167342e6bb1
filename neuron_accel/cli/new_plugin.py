# SPDX-License-Identifier: Apache-2.0
"""``neuron-accel new-plugin``: creates a package with a strategy plugin, as a starting point."""

from __future__ import annotations

import argparse
import keyword
import re
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from string import Template

from neuron_accel.engine.plan.registry import Registry
from neuron_accel.errors import UsageError
from neuron_accel.terminal import show

DESCRIPTION = """\
Create a package with a strategy plugin: pyproject.toml with its entry point, a plugin that works, and tests that run
the conformance kit. The package can be installed, and its tests pass; replace what the plugin does. The pages "Writing
a plugin" and "Cookbook" of the documentation explain every part.
"""


@dataclass(frozen=True, kw_only=True)
class Skeleton:
    """A kind of plugin.

    Args:
        about: what plugins of this kind do, for the help.
        does: what the generated one does.
        options: its options in a configuration file.
    """

    about: str
    does: str
    options: str


KINDS = {
    "observer": Skeleton(
        about="reads what other plugins compute, changes nothing",
        does="logs the norm of the gradient of every block",
        options="{every: 10}",
    ),
    "gradients": Skeleton(
        about="changes gradients before the optimizer uses them",
        does="clips the gradient of every block by itself",
        options="{max_norm: 1.0}",
    ),
    "layout": Skeleton(
        about="shards layers over ranks",
        does="shards linear layers by their outputs",
        options='{degree: 2, layers: ["*.up_proj"]}',
    ),
    "axis": Skeleton(
        about="brings an axis of ranks, and what happens along it",
        does="trains replicas that average their weights every few steps",
        options="{replicas: 2, every: 8}",
    ),
}
"""The kinds by name; the first is the default."""

EXAMPLES = """\
kinds, and what the generated plugin does:
{kinds}

examples:
  neuron-accel new-plugin stripes                  writes neuron-accel-stripes/
  neuron-accel new-plugin stripes --kind layout    one that shards layers
  neuron-accel new-plugin stripes --output code    writes code/neuron-accel-stripes/
""".format(kinds="\n".join(f"  {name:<11}{kind.about}:\n             {kind.does}" for name, kind in KINDS.items()))

FILES = {
    "pyproject.toml": "pyproject.toml",
    "README.md": "README.md",
    "src/{package}/__init__.py": "init.py",
    "src/{package}/plugin.py": "{kind}.py",
    "tests/test_{name}.py": "test_{kind}.py",
}
"""Paths in the new package, and the templates of their contents."""

PREFIX = "neuron-accel-"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("name", help="the plugin's name in configuration files: lowercase letters, digits, underscores")
    parser.add_argument(
        "--kind",
        choices=KINDS,
        metavar="KIND",
        default=next(iter(KINDS)),
        help="what it begins with, see below (default: %(default)s)",
    )
    parser.add_argument(
        "--output", type=Path, default=Path(), metavar="FOLDER", help="parent folder (default: the current one)"
    )


def run(args: argparse.Namespace) -> int:
    folder = write(args.name, args.output, args.kind)
    show(f"{folder}: a package with the plugin {plugin_name(args.name)!r}, which {KINDS[args.kind].does}. Next steps:")
    print(f"  cd {folder}")
    print("  pip install -e '.[test]'")
    print("  pytest")
    return 0


def plugin_name(name: str) -> str:
    """Returns the plugin's name for the argument ``name``, which may be the name of a distribution.

    Raises:
        UsageError: if it is not a valid name of a package and class, or another plugin has it.
    """
    result = name.removeprefix(PREFIX).replace("-", "_")
    if keyword.iskeyword(result):
        raise UsageError(
            f"{name!r} is not a valid name for a plugin.",
            why=f"{result!r} is a keyword of Python, and the name of the package and the class is derived from it",
            fix=f"choose another name, such as {result}_plugin",
        )
    if not re.fullmatch(r"[a-z][a-z0-9_]*", result):
        raise UsageError(
            f"{name!r} is not a valid name for a plugin.",
            why="the name is used for the package, the class and the key in configuration files",
            fix="use lowercase letters, digits and underscores, with a letter first",
        )
    taken = [entry for entry in Registry.from_environment().entries() if entry.name == result]
    if taken:
        raise UsageError(
            f"A plugin {result!r} exists already.",
            where=taken[0].source,
            why="names of plugins must be unique",
            fix="choose another name",
        )
    return result


def write(name: str, output: Path, kind: str = next(iter(KINDS))) -> Path:
    """Writes the package of a plugin of this kind below ``output`` and returns its folder.

    Raises:
        UsageError: if the name is not valid, or the folder exists already.
    """
    name = plugin_name(name)
    values = {
        "name": name,
        "package": f"neuron_accel_{name}",
        "distribution": PREFIX + name.replace("_", "-"),
        "kind": kind,
        "does": KINDS[kind].does,
        "options": KINDS[kind].options,
        "cls": "".join(part.capitalize() for part in name.split("_")) + "Plugin",
    }
    folder = output / values["distribution"]
    if folder.exists():
        raise UsageError(f"{folder} exists already.", fix="choose another name or another --output")
    for path, template in FILES.items():
        target = folder / path.format(**values)
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(_filled(template.format(**values), values), encoding="utf-8")
    return folder


def _filled(template: str, values: Mapping[str, str]) -> str:
    text = (resources.files("neuron_accel.cli") / "plugin_template" / f"{template}.template").read_text("utf-8")
    return Template(text).substitute(values)
