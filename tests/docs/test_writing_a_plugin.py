"""The page about plugins: its package is written as shown, built, installed, found and put through the kit; its tables
have what the code has."""

from __future__ import annotations

import inspect
import json
import re
import shutil
from pathlib import Path

import pytest

from neuron_accel.contract import AxisKind, Claim, Phase
from neuron_accel.engine.plan.plugin import HOOKS
from neuron_accel.testing import PluginConformance
from tests.packages import ROOT, install, run_in

PAGE = ROOT / "docs" / "writing-a-plugin.md"
FILE = re.compile(r"^\*\*`([^`]+)`\*\*\n\n```\w+\n(.*?)^```$", re.MULTILINE | re.DOTALL)
QUICK = "not (Steady or Averaging) or is_ or form or configuration or ((alone or promises) and gloo)"
USE = """
import json, torch
from neuron_accel import NeuronAccelerator
from neuron_accel.cli.main import main
from neuron_accel.engine.plan.plugin import HOOKS
main(["plugins", "--json"])
accelerator = NeuronAccelerator(config="train.yaml")
model = torch.nn.Linear(4, 1)
model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters()))
accelerator.backward(model(torch.ones(2, 4)).sum())
optimizer.step()
print(json.dumps([accelerator.plan.provenance["steady"], *(plugin.spec.name for plugin in accelerator.plan.plugins)]))
"""
OTHER_VERSION = """
from dataclasses import dataclass
from neuron_accel.engine.plan.plugin import HOOKS
from neuron_accel.contract import Phase, PluginSpec, StrategyPlugin

@dataclass(frozen=True, kw_only=True)
class Plugin(StrategyPlugin):
    spec = PluginSpec(name="newer", phase=Phase.MEMORY, api_version=99)
"""
NEIGHBOURS = {
    "broken-dist": ("[neuron_accel.plugins]\nbroken = neighbour_a:Plugin", "import a_module_that_is_not_there"),
    "newer-dist": ("[neuron_accel.plugins]\nnewer = neighbour_b:Plugin", OTHER_VERSION),
    "greedy-dist": (
        "[neuron_accel.plugins]\nzero1 = neighbour_c:Plugin\n"
        "[neuron_accel.default_owners]\ngradient_reduction = neighbour_c:Plugin",
        "1 / 0",
    ),
}
"""What else is installed: entry points and the source of a module."""


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
    shutil.copy(Path(__file__).with_name("owning_checks.py"), folder / "tests" / "test_owning.py")
    target = folder.parent / "installed"
    assert install(folder, target).name == "neuron_accel_steady-0.1.0-py3-none-any.whl"
    for letter, (name, (entry_points, source)) in zip("abc", NEIGHBOURS.items(), strict=True):
        info = target / f"{name.replace('-', '_')}-2.0.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 2.0\n")
        (info / "entry_points.txt").write_text(entry_points)
        (target / f"neighbour_{letter}.py").write_text(source)
    return folder, target


def test_the_package_is_found_by_name_and_runs_whatever_else_is_installed(steady):
    folder, target = steady
    *shown, plan = run_in(target, ["-c", USE], folder).splitlines()
    plugins = {plugin["name"]: plugin for plugin in json.loads("\n".join(shown))}
    mine = plugins["steady"]
    assert (mine["distribution"], mine["version"], mine["error"]) == ("neuron-accel-steady", "0.1.0", None)
    assert mine["refines"] == ["gradient_reduction"]
    assert "a_module_that_is_not_there" in plugins["broken"]["error"]
    assert "version 99 of the plugin contract" in plugins["newer"]["error"]
    assert [plugins[name]["distribution"] for name in ("broken", "newer")] == ["broken-dist", "newer-dist"]
    assert plugins["zero1"]["distribution"] == "neuron-accel"
    provenance, *names = json.loads(plan)
    assert provenance == "neuron-accel-steady 0.1.0"
    assert {"steady", "zero1"} <= set(names)


def run_its_tests(steady, *arguments):
    folder, target = steady
    output = run_in(target, ["-m", "pytest", "-q", "-p", "no:cacheprovider", *arguments], folder / "tests")
    return int(re.search(r"(\d+) passed", output)[1])


def test_the_package_and_the_other_example_pass_their_tests(steady):
    assert run_its_tests(steady, "-k", QUICK) >= 11


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_the_package_passes_the_whole_kit(steady):
    assert run_its_tests(steady) >= 24


# ---- tables ----------------------------------------------------------------------------------------------------------
def column(title: str, number: int = 0) -> list[str]:
    """A column of the table whose first header is ``title``, without marks of code."""
    table = re.search(rf"^\| {title} \|.*?\n\n", PAGE.read_text() + "\n\n", re.MULTILINE | re.DOTALL)[0]
    rows = [line.strip("| ").split(" | ") for line in table.strip().splitlines()[2:]]
    return [name.strip("` ") for row in rows for name in row[number].split("`, `")]


def test_every_hook_is_there():
    assert sorted(column("hook")) == sorted(["axes", "companions", "validate", *HOOKS])


def test_phases_claims_and_kinds_are_those_of_the_code():
    assert list(zip(column("phase"), column("phase", 1), strict=True)) == [(p.name, str(p.value)) for p in Phase]
    assert column("claim") == [claim.value for claim in Claim]
    assert column("kind") == [kind.name for kind in AxisKind]


def test_the_kit_is_described():
    names = [name for name in vars(PluginConformance) if not name.startswith(("_", "pytest_"))]
    checks = [name for name in names if name.startswith("test_")]
    assert column("check") == checks
    attributes = {name for name in names if name not in (*checks, "plugin", "made_once")}
    assert set(column("attribute")) == attributes
    assert all(inspect.getdoc(getattr(PluginConformance, check)) for check in checks)
