"""The page about plugins: its package is written as shown, built, installed, found and put through the kit; its tables
have what the code has."""

from __future__ import annotations

import inspect
import json
import re

import pytest

from neuron_accel.contract import AxisKind, Claim, Phase
from neuron_accel.testing import PluginConformance
from neuron_accel.testing._form import hooks
from tests.packages import ROOT, install, run_in

PAGE = ROOT / "docs" / "writing-a-plugin.md"
FILE = re.compile(r"^\*\*`([^`]+)`\*\*\n\n```\w+\n(.*?)^```$", re.MULTILINE | re.DOTALL)
QUICK = "not Steady or is_ or form or configuration or (alone and gloo)"
USE = """
import json
from neuron_accel.cli.main import main
from neuron_accel.engine.config import load_config
main(["plugins", "--json"])
print(json.dumps([type(plugin).__name__ for plugin in load_config("train.yaml").plugins]))
"""


def the_other_example() -> str:
    """The one block of Python that is no file of the package."""
    blocks = re.findall(r"^```python\n(.*?)^```$", PAGE.read_text(), re.MULTILINE | re.DOTALL)
    shown = {text for _, text in FILE.findall(PAGE.read_text())}
    (text,) = [block for block in blocks if block not in shown]
    return text


@pytest.fixture(scope="module")
def steady(tmp_path_factory):
    """The folder of the package and that in which its wheel is installed."""
    folder = tmp_path_factory.mktemp("steady") / "package"
    for path, text in FILE.findall(PAGE.read_text()):
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / path).write_text(text)
    (folder / "tests" / "test_own.py").write_text(the_other_example())
    target = folder.parent / "installed"
    assert install(folder, target).name == "neuron_accel_steady-0.1.0-py3-none-any.whl"
    return folder, target


def test_the_package_is_found_by_name(steady):
    folder, target = steady
    *shown, configured = run_in(target, ["-c", USE], folder).splitlines()
    (plugin,) = [plugin for plugin in json.loads("\n".join(shown)) if plugin["name"] == "steady"]
    assert (plugin["distribution"], plugin["version"], plugin["error"]) == ("neuron-accel-steady", "0.1.0", None)
    assert plugin["refines"] == ["gradient_reduction"]
    assert json.loads(configured) == ["Zero1Plugin", "SteadyPlugin"]


def run_its_tests(steady, *arguments, timeout=100):
    folder, target = steady
    output = run_in(target, ["-m", "pytest", "-q", "-p", "no:cacheprovider", *arguments], folder / "tests", timeout)
    return int(re.search(r"(\d+) passed", output)[1])


def test_the_package_and_the_other_example_pass_their_tests(steady):
    assert run_its_tests(steady, "-k", QUICK) >= 11


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_the_package_passes_the_whole_kit(steady):
    assert run_its_tests(steady, timeout=550) >= 24


# ---- tables ----------------------------------------------------------------------------------------------------------
def column(title: str, number: int = 0) -> list[str]:
    """A column of the table whose first header is ``title``, without marks of code."""
    table = re.search(rf"^\| {title} \|.*?\n\n", PAGE.read_text() + "\n\n", re.MULTILINE | re.DOTALL)[0]
    rows = [line.strip("| ").split(" | ") for line in table.strip().splitlines()[2:]]
    return [name.strip("` ") for row in rows for name in row[number].split("`, `")]


def test_every_hook_is_there():
    assert sorted(column("hook")) == sorted(hooks())


def test_phases_claims_and_kinds_are_those_of_the_code():
    assert list(zip(column("phase"), column("phase", 1), strict=True)) == [(p.name, str(p.value)) for p in Phase]
    assert column("claim") == [claim.value for claim in Claim]
    assert column("kind") == [kind.name for kind in AxisKind]


def test_the_kit_is_described():
    names = [name for name in vars(PluginConformance) if not name.startswith("_")]
    checks = [name for name in names if name.startswith("test_")]
    assert column("check") == checks
    attributes = {name for name in names if name not in (*checks, "plugin", "made_once")}
    assert set(column("attribute")) == attributes
    assert all(inspect.getdoc(getattr(PluginConformance, check)) for check in checks)
