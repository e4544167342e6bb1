"""Other distributions: what they add is listed without being imported, and what is missing says which to install."""

from __future__ import annotations

import configparser
import re
from pathlib import Path

import pytest

from neuron_accel import doors
from neuron_accel.engine.plan.registry import Registry
from neuron_accel.errors import PluginError

ROOT = Path(__file__).parents[2]
PROJECTS = {
    path.parent.name: path.read_text(encoding="utf-8") for path in sorted(ROOT.glob("plugins/*/pyproject.toml"))
}


GROUPS = [value for name, value in vars(doors).items() if name.isupper() and str(value).startswith("neuron_accel.")]


def added_by(project: str, group: str) -> set[str]:
    """Names of a group of entry points in a pyproject.toml."""
    table = re.search(rf'^\[project\.entry-points\."{re.escape(group)}"\]\n((?:\w.*\n)*)', project, re.MULTILINE)
    return set(re.findall(r"^([\w-]+) =", table[1], re.MULTILINE)) if table else set()


@pytest.mark.parametrize("package", [*PROJECTS])
def test_what_a_package_adds_is_known(package):
    for group in GROUPS:
        assert set(doors.PACKAGES[package].get(group, ())) == added_by(PROJECTS[package], group)


def test_no_other_package_is_named():
    assert set(doors.PACKAGES) == set(PROJECTS)
    setup = configparser.ConfigParser()
    setup.read(ROOT / "setup.cfg")
    required = "\n".join([setup["options"]["install_requires"], *setup["options.extras_require"].values()])
    assert not [package for package in PROJECTS if package in required]  # an index could serve somebody else's


def test_a_plugin_of_a_package_that_is_missing():
    with pytest.raises(PluginError, match="'lora' is in a package of its own") as info:
        Registry().get("lora")
    assert "neuron-accel-lora" in info.value.fix


def test_a_name_of_a_package_that_is_missing(monkeypatch):
    packages = {"neuron-accel-x": {doors.NAMES: ("Surprise",)}}
    monkeypatch.setattr(doors, "PACKAGES", packages)
    with pytest.raises(ImportError, match=r"Surprise is in a package .* install the package neuron-accel-x"):
        doors.moved("Surprise", "neuron_accel")
    with pytest.raises(AttributeError, match="'neuron_accel' has no attribute 'Nothing'"):
        doors.moved("Nothing", "neuron_accel")
