"""The public surface changes only on purpose: it is compared with ``public_surface.txt`` beside this file.

After a change that is meant, ``python -m tests.unit.test_public_surface --write`` describes it anew. One that breaks
plugins (a hook renamed, an argument or a name gone) also raises ``API_VERSION`` in ``neuron_accel/engine/plugin.py``.
"""

from __future__ import annotations

import dataclasses
import difflib
import enum
import functools
import importlib
import inspect
import re
import sys
import typing
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

DESCRIPTION = Path(__file__).with_name("public_surface.txt")
MODULES = (
    "neuron_accel",
    "neuron_accel.commands",
    "neuron_accel.contract",
    "neuron_accel.contract.events",
    "neuron_accel.contract.families",
    "neuron_accel.contract.sharded",
    "neuron_accel.errors",
    "neuron_accel.testing",
    "neuron_accel.testing.devices",
)


def describe() -> str:
    from neuron_accel.contract import API_VERSION

    lines = [f"contract version {API_VERSION}"]
    for module_name in MODULES:
        module = importlib.import_module(module_name)
        lines += ["", module_name]
        for name in sorted(module.__all__):
            lines += [f"    {line}" for line in _describe(name, getattr(module, name))]
    return "\n".join(lines) + "\n"


def _describe(name: str, value: Any) -> Iterator[str]:
    if inspect.isclass(value):
        yield f"class {name}({', '.join(base.__name__ for base in value.__bases__)}){_options(value)}"
        yield from (f"    {line}" for line in _members(value))
    elif callable(value):
        yield f"def {name}{_signature(value)}"
    else:
        yield f"{name} = {value!r}"


def _options(cls: type) -> str:
    foreign = [base for base in cls.__mro__ if dataclasses.is_dataclass(base) and not _is_ours(base)]
    if foreign:  # whose fields are not our promise
        theirs = {f.name for base in foreign for f in dataclasses.fields(base)}
        return f": {', '.join(f.name for f in dataclasses.fields(cls) if f.name not in theirs)}"
    return f": {_signature(cls)}" if dataclasses.is_dataclass(cls) or "__init__" in vars(cls) else ""


def _is_ours(cls: type) -> bool:
    return cls.__module__.split(".")[0] == "neuron_accel"


def _members(cls: type) -> Iterator[str]:
    from neuron_accel.contract import StrategyPlugin

    if issubclass(cls, enum.Enum):
        yield from (f"{member.name} = {member.value!r}" for member in cls)
        return
    if issubclass(cls, StrategyPlugin) and cls is not StrategyPlugin:
        return  # what it does in its hooks is its own business
    options = {f.name for f in dataclasses.fields(cls) if f.init} if dataclasses.is_dataclass(cls) else set()
    for name, value in sorted({**inspect.get_annotations(cls), **vars(cls)}.items()):
        if name.startswith("_"):
            continue
        if isinstance(value, (property, functools.cached_property)):
            yield f"property {name}"
        elif isinstance(value, (staticmethod, classmethod)):
            yield f"{type(value).__name__} {name}{_signature(value.__func__)}"
        elif inspect.isfunction(value):
            yield f"def {name}{_signature(value)}"
        elif name not in options:
            yield f"attribute {name}"


def _signature(value: Any) -> str:
    if typing.get_origin(value) is not None:
        return "(...)"  # a type of functions, of which only some releases of Python know a signature
    try:
        text = str(inspect.signature(value))
    except (TypeError, ValueError):
        return "(...)"
    text = re.sub(r" at 0x[0-9a-f]+", "", text)
    return text.replace("pathlib._local.", "pathlib.")  # where Python 3.13 keeps it


@pytest.mark.skipif(sys.version_info < (3, 11), reason="Python 3.10 takes a type of functions for a class")
@pytest.mark.skipif(pytest.version_tuple < (8, 4), reason="fixtures are functions in older releases of pytest")
def test_the_public_surface_is_as_described():
    expected, found = DESCRIPTION.read_text(), describe()
    changes = "\n".join(
        difflib.unified_diff(expected.splitlines(), found.splitlines(), "described", "found", "", "", 1)
    )
    assert not changes, f"the public surface has changed; if that is meant: {__doc__}\n{changes}"


def test_public_names_come_from_their_modules():
    """What a module calls public is there, and nothing public hides in a private name."""
    for name in MODULES:
        module = importlib.import_module(name)
        assert len(set(module.__all__)) == len(module.__all__)
        assert [n for n in module.__all__ if n.startswith("_") or not hasattr(module, n)] == []


def test_changes_are_noticed(monkeypatch):
    from neuron_accel import contract

    class Group:
        def send(self, tensor, *, late=False): ...

    monkeypatch.setattr(contract, "Group", Group)
    added = [line.strip() for line in describe().splitlines() if line not in DESCRIPTION.read_text().splitlines()]
    assert "def send(self, tensor, *, late=False)" in added


if __name__ == "__main__":
    if sys.argv[1:] != ["--write"]:
        sys.exit(__doc__)
    DESCRIPTION.write_text(describe())
    print(f"{DESCRIPTION}: {len(DESCRIPTION.read_text().splitlines())} lines")
