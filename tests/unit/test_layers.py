"""Layers know those below them and none above. These tests read the sources; nothing is imported."""

from __future__ import annotations

import ast
import configparser
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "neuron_accel"

# Layer to the parts of this package that it may import while it runs; what only type checkers read is free.
BELOW_FACES = {"loop", "lazy", "data", "checkpoint", "neuron", "engine", "backends", "storage", "errors"}
MAY_IMPORT = {
    "errors": set(),
    "doors": set(),
    "storage": {"errors"},
    "web_page": set(),
    "terminal": set(),
    "run_report": {"doors"},
    "backends": {"backends", "doors", "errors"},
    "engine": {"engine", "backends", "doors", "errors"},
    "contract": {"models", "engine", "backends", "doors", "errors"},
    "commands": {"web_page", "terminal", "cli", "launch", "engine", "neuron"},
    "models": {"models", "engine", "errors"},
    "lazy": {"lazy", "engine", "checkpoint", "errors"},
    "strategies": {"strategies", "contract", "errors"},
    "data": {"data", "engine", "backends", "errors"},
    "neuron": {"neuron", "engine", "backends", "storage", "errors"},
    "checkpoint": {"checkpoint", "lazy", "engine", "backends", "storage", "doors", "errors"},
    "loop": BELOW_FACES,
    "standalone": {"strategies", "engine", "backends", "errors"},
    "accelerator": {"loop", "lazy", "data", "checkpoint", "neuron", "engine", "backends", "storage", "errors"},
    "trainer": {
        "",
        "trainer",
        "accelerator",
        "strategies",
        "loop",
        "lazy",
        "data",
        "checkpoint",
        "neuron",
        "engine",
        "backends",
        "storage",
        "errors",
    },
    "planning": {"doors"},
    "launch": {"launch", "terminal", "engine", "neuron", "backends", "errors"},
    "cli": {
        "",
        "cli",
        "terminal",
        "launch",
        "strategies",
        "models",
        "checkpoint",
        "neuron",
        "engine",
        "backends",
        "storage",
        "doors",
        "errors",
        "parity",
    },
    "parity": {"", "backends", "errors"},
    "testing": {"doors"},
}
PUBLIC = re.compile(
    r"neuron_accel\.[A-Za-z_0-9]*[A-Z]\w*|neuron_accel\.(__version__|register_\w+|\w*lazy\w*|materialize)"
)
NOT_IN_ENGINE = {"accelerate", "torch_xla", "transformers"}


@dataclass(frozen=True)
class Import:
    """One imported module; ``lazy`` inside a function, ``typing`` for type checkers only."""

    module: str
    lazy: bool
    typing: bool
    line: int


def imports(source: str, package: str) -> Iterator[Import]:
    """Every import of a module in ``package``, also through importlib."""
    yield from _imports(ast.parse(source), package, lazy=False, typing=False)


def _imports(node: ast.AST, package: str, lazy: bool, typing: bool) -> Iterator[Import]:
    for module in _modules(node, package):
        yield Import(module, lazy, typing, node.lineno)
    lazy = lazy or isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda))
    if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
        for child in node.body:
            yield from _imports(child, package, lazy, True)
        for child in node.orelse:
            yield from _imports(child, package, lazy, typing)
        return
    for child in ast.iter_child_nodes(node):
        yield from _imports(child, package, lazy, typing)


def _modules(node: ast.AST, package: str) -> list[str]:
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names]
    if isinstance(node, ast.ImportFrom):
        base = package.split(".")[: len(package.split(".")) - node.level + 1] if node.level else []
        module = ".".join([*base, *([node.module] if node.module else [])])
        return [f"{module}.{alias.name}" for alias in node.names]
    if isinstance(node, ast.Call) and ast.unparse(node.func).split(".")[-1] in ("import_module", "__import__"):
        return [a.value for a in node.args[:1] if isinstance(a, ast.Constant) and isinstance(a.value, str)]
    return []


def below(module: str, roots: set[str]) -> bool:
    return any(module == root or module.startswith(f"{root}.") for root in roots)


def sources(folder: Path) -> list[Path]:
    return sorted(folder.rglob("*.py"))


def imports_of(path: Path) -> list[Import]:
    package = ".".join(path.relative_to(ROOT).parent.parts)
    return list(imports(path.read_text(encoding="utf-8"), package))


def layer_violations(found: list[Import], allowed: set[str]) -> list[str]:
    own = {f"neuron_accel.{name}" for name in allowed if name}
    if "" in allowed:  # the package's own, public names
        found = [item for item in found if not PUBLIC.fullmatch(item.module)]
    return [
        f"line {item.line}: {item.module}"
        for item in found
        if below(item.module, {"neuron_accel"}) and not item.typing and not below(item.module, own)
    ]


def files_with(violations: dict[Path, list[str]]) -> dict[str, list[str]]:
    return {str(path.relative_to(ROOT)): found for path, found in violations.items() if found}


@pytest.mark.parametrize("layer", MAY_IMPORT)
def test_a_layer_imports_only_those_below_it(layer):
    files = sources(PACKAGE / layer) or [PACKAGE / f"{layer}.py"]
    assert not files_with({path: layer_violations(imports_of(path), MAY_IMPORT[layer]) for path in files})


def test_every_part_of_the_package_is_a_layer():
    parts = {path.stem for path in PACKAGE.iterdir() if path.suffix == ".py" or (path / "__init__.py").exists()}
    assert parts - {"__init__", "__pycache__"} == set(MAY_IMPORT)


def test_the_engine_imports_neither_accelerate_nor_torch_xla_nor_transformers():
    found = {
        path: [f"line {i.line}: {i.module}" for i in imports_of(path) if below(i.module, NOT_IN_ENGINE)]
        for path in sources(PACKAGE / "engine")
    }
    assert not files_with(found)


def test_torch_xla_is_imported_only_by_functions_of_backends():
    def wrong(path: Path, item: Import) -> bool:
        may = (PACKAGE / "backends") in path.parents
        return below(item.module, {"torch_xla"}) and not (item.typing or (may and item.lazy))

    found = {
        path: [f"line {item.line}: {item.module}" for item in imports_of(path) if wrong(path, item)]
        for path in sources(PACKAGE)
    }
    assert not files_with(found)


def test_strategies_do_not_import_accelerate():
    found = {
        path: [f"line {i.line}: {i.module}" for i in imports_of(path) if below(i.module, {"accelerate"})]
        for path in sources(PACKAGE / "strategies")
    }
    assert not files_with(found)


# ---- no circles ------------------------------------------------------------------------------------------------------
ALLOWED_CIRCLE = ("neuron_accel.engine.plan.plugin", "neuron_accel.engine.runtime.run")
"""A hook of a plugin is given the run, which holds the plugins: the one pair that names each other."""


def import_graph(folder: Path, base: Path) -> dict[str, set[str]]:
    """Which modules below ``folder`` import which others of them, also inside functions and for type checkers."""
    paths = {}
    for path in sources(folder):
        parts = path.relative_to(base).with_suffix("").parts
        paths[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    graph = {}
    for module, path in paths.items():
        package = module if path.name == "__init__.py" else module.rpartition(".")[0]
        found = set()
        for item in imports(path.read_text(encoding="utf-8"), package):
            target = item.module
            while target and target not in paths:
                target = target.rpartition(".")[0]
            found.add(target)
        graph[module] = found - {"", module}
    return graph


def circles(graph: dict[str, set[str]]) -> list[str]:
    """Modules that import themselves by way of others: what is left once no module without imports is."""
    left = {module: set(targets) for module, targets in graph.items()}
    while free := [module for module, targets in left.items() if not targets & left.keys()]:
        for module in free:
            del left[module]
    while unused := [module for module in left if not any(module in targets for targets in left.values())]:
        for module in unused:
            del left[module]
    return sorted(left)


@pytest.mark.parametrize("folder", [PACKAGE, *sorted(ROOT.glob("plugins/*/src"))], ids=lambda path: path.parent.name)
def test_no_files_import_each_other_but_plugin_and_run(folder):
    graph = import_graph(folder, ROOT if folder == PACKAGE else folder)
    assert len(graph) > 2
    if folder == PACKAGE:
        plugin, run = ALLOWED_CIRCLE
        assert {plugin, run} <= set(circles(graph))
        graph[plugin].discard(run)
    assert not circles(graph)


def test_circles_are_found():
    assert circles({"a": {"b"}, "b": {"c"}, "c": {"b", "d"}, "d": set(), "e": {"a"}}) == ["b", "c"]


# ---- the core names no strategy and no axis --------------------------------------------------------------------------
NAMES_THEM = {
    "strategies": "they bring them",
    "models": "plans of families give each axis its name",
    "cli": "options that size an axis, and those that make plugins",
    "trainer": "transformers' arguments become plugins",
    "standalone": "ZeRO-1 without an accelerator",
    "__init__": "the public names",
}
"""Parts of the package that name strategies, or axes that these bring, and why. Others ask the mesh and the plan."""
AXES = {"pp", "cp", "tp", "dp"}
OWN_AXIS = ("engine/plan/mesh.py", "dp")
"""The mesh brings this one itself."""


def named_axes(source: str) -> list[str]:
    """Constants that are the name of an axis."""
    nodes = ast.walk(ast.parse(source))
    return [f"line {n.lineno}: {n.value!r}" for n in nodes if isinstance(n, ast.Constant) and n.value in AXES]


def test_what_is_no_strategy_names_none_and_no_axis():
    others = [path for path in sources(PACKAGE) if path.relative_to(PACKAGE).parts[0].split(".")[0] not in NAMES_THEM]
    assert len(others) > 80
    found = {}
    for path in others:
        text = path.read_text(encoding="utf-8")
        found[path] = named_strategies(text) + named_axes(text)
    (own,) = found.pop(PACKAGE / OWN_AXIS[0])
    assert own.endswith(repr(OWN_AXIS[1]))
    assert not files_with(found)


def strategies() -> tuple[set[str], set[str]]:
    """Names and class names of the strategies that this distribution registers."""
    setup = configparser.ConfigParser()
    setup.read(ROOT / "setup.cfg")
    lines = setup["options.entry_points"]["neuron_accel.plugins"].strip().splitlines()
    pairs = [line.split("=") for line in lines]
    return {name.strip() for name, _ in pairs}, {value.split(":")[1].strip() for _, value in pairs}


def named_strategies(source: str) -> list[str]:
    """Uses of a strategy's name or class, and checks for a class of plugin other than the base."""
    names, classes = strategies()
    found = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Constant) and node.value in names:
            found.append(f"line {node.lineno}: {node.value!r}")
        name = node.id if isinstance(node, ast.Name) else node.attr if isinstance(node, ast.Attribute) else ""
        if name in classes:
            found.append(f"line {node.lineno}: {name}")
        if isinstance(node, ast.Call) and ast.unparse(node.func) in ("isinstance", "issubclass"):
            of = ast.unparse(node.args[1])
            if "Plugin" in of.replace("StrategyPlugin", "").replace("PluginSpec", ""):
                found.append(f"line {node.lineno}: {ast.unparse(node)}")
    return found


def test_the_distributions_strategies_are_found():
    names, classes = strategies()
    assert len(names) == len(classes) >= 4


# ---- that these tests can fail ---------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("source", "module", "lazy", "typing"),
    [
        ("import torch_xla.core as x", "torch_xla.core", False, False),
        ("from torch_xla import core", "torch_xla.core", False, False),
        ("def f():\n    import torch_xla", "torch_xla", True, False),
        ("def f():\n    importlib.import_module('torch_xla')", "torch_xla", True, False),
        ("try:\n    import torch_xla\nexcept ImportError: pass", "torch_xla", False, False),
        ("if TYPE_CHECKING:\n    import torch_xla", "torch_xla", False, True),
        ("if TYPE_CHECKING:\n    pass\nelse:\n    import torch_xla", "torch_xla", False, False),
        ("from . import x", "neuron_accel.engine.x", False, False),
        ("from ..strategies import x", "neuron_accel.strategies.x", False, False),
        ("from neuron_accel import strategies", "neuron_accel.strategies", False, False),
    ],
)
def test_imports_are_found(source, module, lazy, typing):
    (found,) = imports(source, "neuron_accel.engine")
    assert (found.module, found.lazy, found.typing) == (module, lazy, typing)


def test_violations_are_found():
    lines = ["from neuron_accel import strategies", "from .mesh import Mesh", "import neuron_accel.cli", "import torch"]
    source = "\n".join(lines)
    found = layer_violations(list(imports(source, "neuron_accel.engine")), MAY_IMPORT["engine"])
    assert found == ["line 1: neuron_accel.strategies", "line 3: neuron_accel.cli"]
    assert not below("torch_xla_extras", {"torch_xla"})


@pytest.mark.parametrize(
    "source",
    ["if name == 'zero1': pass", "isinstance(x, OtherPlugin)", "Zero1Plugin()", "isinstance(x, (A, m.BPlugin))"],
)
def test_named_strategies_are_found(source):
    assert named_strategies(source)
    assert not named_strategies("isinstance(x, StrategyPlugin) and isinstance(y, PluginSpec) and name == 'plan'")


def test_named_axes_are_found():
    assert named_axes("mesh.degree('tp')")
    assert not named_axes("mesh.names(AxisKind.MODEL)")
