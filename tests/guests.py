"""Plugins of packages under ``plugins/`` that tests of the core compose with, where they are installed."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from neuron_accel import doors


def guards(*plugins: Any) -> list[Any]:
    """The guards, or none: a composition is then tested without them."""
    return [*plugins] if is_installed("neuron-accel-guards") else []


def is_installed(package: str) -> bool:
    return importlib.util.find_spec(package.replace("-", "_")) is not None


def skip_without_packages_of(text: str) -> None:
    """Skips a test of a program that uses a name of a package that is not installed."""
    for package, offers in doors.PACKAGES.items():
        names = [name for name in offers.get(doors.NAMES, ()) if re.search(rf"\b{name}\(", text)]
        if names and not is_installed(package):
            pytest.skip(f"{package} is not installed")


def helper(package: str, name: str) -> ModuleType:
    """A module of the tests of a package that is installed."""
    path = Path(__file__).parents[1] / "plugins" / package / "tests" / f"{name}.py"
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
