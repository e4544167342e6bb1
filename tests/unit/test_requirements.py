"""What is required of torch, for each way to a device: the files under constraints fit the package and its extras."""

from __future__ import annotations

import configparser
import re
from pathlib import Path

import pytest
from packaging.requirements import Requirement

ROOT = Path(__file__).parents[2]
WAYS = {"xla": "xla", "native-2.13": "native", "native-2.14": "native"}  # file to extra


def requirements(text):
    lines = (line.partition("#")[0].strip() for line in text.splitlines())
    return {re.sub(r"[-_]+", "-", r.name): r.specifier for r in map(Requirement, filter(None, lines))}


@pytest.fixture(scope="module")
def declared():
    config = configparser.ConfigParser()
    config.read(ROOT / "setup.cfg")
    return config


def releases(specifier):
    """Some releases of torch that a specifier allows."""
    every = [f"2.{minor}.{patch}" for minor in range(8, 18) for patch in (0, 1)]
    return set(specifier.filter(every))


@pytest.mark.parametrize(("way", "extra"), WAYS.items())
def test_a_way_to_a_device_can_be_installed(declared, way, extra):
    fixed = requirements((ROOT / "constraints" / f"{way}.txt").read_text())
    required = requirements(declared["options"]["install_requires"])
    further = requirements(declared["options.extras_require"][extra])
    torch = releases(fixed["torch"])
    assert torch
    assert torch <= releases(required["torch"]) & releases(further["torch"])
    for name, specifier in further.items():
        if name != "torch":
            assert str(specifier) == str(fixed[name])
    assert not fixed["torch-neuronx"].contains("1.0")  # the placeholder of the public index
    assert fixed["torch-neuronx"].contains({"xla": "2.9.0.2.15.32035"}.get(way, f"{way.partition('-')[2]}.3.0"))


def test_torch_has_an_upper_bound_and_every_way_is_named():
    files = {path.stem for path in (ROOT / "constraints").glob("*.txt")}
    assert files == set(WAYS)
    config = configparser.ConfigParser()
    config.read(ROOT / "setup.cfg")
    allowed = releases(requirements(config["options"]["install_requires"])["torch"])
    assert allowed == {f"2.{minor}.{patch}" for minor in range(9, 16) for patch in (0, 1)}
