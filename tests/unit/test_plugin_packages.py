"""Packages under ``plugins/`` use nothing but the public surface; their sources are read, nothing is imported."""

from __future__ import annotations

import ast
import importlib
from pathlib import Path

import pytest

from tests.unit.test_layers import imports
from tests.unit.test_public_surface import MODULES

ROOT = Path(__file__).parents[2]
PACKAGES = sorted(path.parent for path in ROOT.glob("plugins/*/pyproject.toml"))


COMPANION = "neuron-accel-testing"
"""It tests the core with the core's own means, is released with it, and adds nothing to a run."""


def private_imports(source: str) -> list[str]:
    """Every import from neuron_accel of something that is not public."""
    return [i.module for i in imports(source, "a_plugin") if not _is_public(i.module)]


def _is_public(name: str) -> bool:
    if name.split(".")[0] != "neuron_accel" or name in MODULES:
        return True
    module, _, last = name.rpartition(".")
    return module in MODULES and last in importlib.import_module(module).__all__


def private_attributes() -> set[str]:
    """Names with an underscore of the objects that plugins get to see."""
    from neuron_accel import NeuronAccelerator, contract

    classes = [value for name in contract.__all__ if isinstance(value := getattr(contract, name), type)]
    names = {name for cls in (*classes, NeuronAccelerator) for name in (*vars(cls), *getattr(cls, "__slots__", ()))}
    names |= {name for cls in classes for name in getattr(cls, "__dataclass_fields__", ())}
    return {name for name in names if name.startswith("_") and not name.startswith("__")}


def private_uses(source: str) -> list[str]:
    private = private_attributes()
    return [
        f"line {node.lineno}: {ast.unparse(node)}"
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.Attribute)
        and (
            (node.attr in private and ast.unparse(node.value) not in ("self", "cls"))
            or (ast.unparse(node.value) == "neuron_accel" and not _is_public(f"neuron_accel.{node.attr}"))
        )
    ]


@pytest.mark.parametrize("package", [p for p in PACKAGES if p.name != COMPANION], ids=lambda path: path.name)
def test_a_package_uses_public_names_only(package):
    sources = sorted(package.rglob("*.py"))
    texts = {str(path.relative_to(ROOT)): path.read_text(encoding="utf-8") for path in sources}
    imported = {path: private_imports(text) for path, text in texts.items()}
    used = {path: private_uses(text) for path, text in texts.items()}
    assert len(sources) > 1
    assert {path: names for path, names in imported.items() if names} == {}
    assert {path: names for path, names in used.items() if names} == {}


@pytest.mark.parametrize("package", PACKAGES, ids=lambda path: path.name)
def test_a_package_is_complete(package):
    """It can be installed, tested and released by itself."""
    text = (package / "pyproject.toml").read_text(encoding="utf-8")
    assert 'entry-points."neuron_accel.' in text or package.name == COMPANION
    assert "neuron-accel" in text.partition("dependencies")[2]
    assert (package / "README.md").exists()
    assert list((package / "tests").glob("test_*.py"))


@pytest.mark.parametrize(
    "source",
    [
        "from neuron_accel.engine.runtime.run import Run",
        "import neuron_accel.engine",
        "from neuron_accel import engine",
        "from neuron_accel.testing.ranks import run_ranks",
        "from neuron_accel.contract import annotations",
        "def f():\n    importlib.import_module('neuron_accel.backends.base')",
    ],
)
def test_private_imports_are_found(source):
    assert private_imports(source)


@pytest.mark.parametrize("source", ["run._groups[()]", "import neuron_accel\nneuron_accel.engine.run.Run"])
def test_private_uses_are_found(source):
    assert private_uses(source)


def test_public_names_are_none_of_these():
    source = "\n".join(
        [
            "from neuron_accel import NeuronAccelerator, contract",
            "from neuron_accel.contract import Phase, StrategyPlugin",
            "from neuron_accel.testing import PluginConformance, run_ranks",
            "import neuron_accel",
            "neuron_accel.Zero1Plugin()",
            "self._state = run.state(self)",
        ]
    )
    assert private_imports(source) == private_uses(source) == []
