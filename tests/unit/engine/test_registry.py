"""Finding plugins in installed distributions, which the tests write by hand and importlib.metadata reads."""

from __future__ import annotations

import importlib.metadata
import sys
import textwrap
from collections.abc import Callable
from fractions import Fraction
from pathlib import Path

import pytest

from neuron_accel.engine.plan.config import load_config, to_config
from neuron_accel.engine.plan.planner import make_plan
from neuron_accel.engine.plan.plugin import Claim
from neuron_accel.engine.plan.registry import (
    DISABLE_VARIABLE,
    TRUST_VARIABLE,
    Registry,
    default_registry,
    import_object,
    register_plugin,
)
from neuron_accel.errors import NeuronAccelError, PlanError, PluginError
from tests.unit.fake_plugins import fake

MODULE = """
from dataclasses import dataclass
from neuron_accel.engine.plan.plugin import Claim, Phase, PluginSpec, StrategyPlugin

@dataclass(frozen=True, kw_only=True)
class {name}(StrategyPlugin):
    spec = PluginSpec(
        name="{spec}", api_version=4, phase=Phase.GRADIENTS, claims=frozenset({{Claim.GRADIENT_REDUCTION}})
    )

    def backward_pass(self, loss, run): yield
    def gradients(self, run): pass
"""

Install = Callable[..., None]


@pytest.fixture
def installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Install:
    """Returns a function that installs a distribution with entry points and one module below ``tmp_path``."""
    monkeypatch.syspath_prepend(str(tmp_path))

    def install(distribution: str, module: str, source: str, *, owners: str = "", version: str = "1.2", **entries: str):
        info = tmp_path / f"{distribution.replace('-', '_')}-{version}.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {distribution}\nVersion: {version}\n")
        lines = ["[neuron_accel.plugins]", *(f"{name} = {value}" for name, value in entries.items())]
        (info / "entry_points.txt").write_text("\n".join([*lines, "[neuron_accel.default_owners]", owners, ""]))
        (tmp_path / f"{module}.py").write_text(textwrap.dedent(source))

    yield install
    for name in [name for name in sys.modules if name.startswith("installed_")]:
        del sys.modules[name]


def registry_of(path: Path, **arguments) -> Registry:
    points = [p for d in importlib.metadata.distributions(path=[str(path)]) for p in d.entry_points]
    return Registry(points, **arguments)


def refusal(function: Callable[[], object]) -> NeuronAccelError:
    with pytest.raises(PluginError) as caught:
        function()
    return caught.value


def test_an_installed_plugin_is_loaded_only_when_named(installed, tmp_path):
    installed("some-dist", "installed_a", MODULE.format(name="A", spec="a"), a="installed_a:A")
    registry = registry_of(tmp_path)
    (entry,) = registry.entries()
    assert (entry.name, entry.distribution, entry.version, entry.value) == ("a", "some-dist", "1.2", "installed_a:A")
    assert not entry.disabled
    assert "installed_a" not in sys.modules
    cls = registry.get("a")
    assert cls.spec.name == "a"
    assert entry.load() is cls
    assert registry.provenance(cls) == "some-dist 1.2"


def test_an_installed_plugin_is_found_in_the_environment(installed):
    installed("some-dist", "installed_a", MODULE.format(name="A", spec="a"), a="installed_a:A")
    registry = Registry.from_environment({})
    assert registry.get("a").__name__ == "A"
    assert {"zero1", "data_parallel", "model_parallelism", "sequence_parallel"} <= {e.name for e in registry.entries()}


def test_a_plugin_that_its_package_exports_under_another_module(installed, tmp_path):
    installed("some-dist", "installed_b", "from installed_inner import A", a="installed_b:A")
    (tmp_path / "installed_inner.py").write_text(MODULE.format(name="A", spec="a"))
    registry = registry_of(tmp_path)
    cls = registry.get("a")
    assert cls.__module__ == "installed_inner"
    assert registry.provenance(cls) == "some-dist 1.2"
    assert registry.register(cls) is cls


def test_an_unknown_name(installed, tmp_path):
    installed("some-dist", "installed_a", MODULE.format(name="A", spec="stripes"), stripes="installed_a:A")
    error = refusal(lambda: registry_of(tmp_path).get("strips"))
    assert "no plugin 'strips'" in error.what
    assert "Did you mean 'stripes'?" in error.fix
    assert "package.module:Class" in error.fix


def test_one_name_in_two_distributions(installed, tmp_path):
    installed("first-dist", "installed_a", MODULE.format(name="A", spec="a"), a="installed_a:A")
    installed("second-dist", "installed_b", MODULE.format(name="B", spec="a"), a="installed_b:B", b="installed_b:B")
    registry = registry_of(tmp_path)
    error = refusal(lambda: registry.get("a"))
    assert "several plugins 'a'" in error.what
    assert "installed_a:A of first-dist 1.2" in error.where
    assert "installed_b:B of second-dist 1.2" in error.where
    assert "uninstall one" in error.fix
    assert [entry.name for entry in registry.entries()] == ["a", "a", "b"]
    assert registry.get("installed_a:A").spec.name == "a"


def test_a_plugin_that_cannot_be_imported_breaks_no_other(installed, tmp_path):
    installed("broken-dist", "installed_x", "import a_module_that_is_not_there", bad="installed_x:X")
    installed("crashing-dist", "installed_y", "1 / 0", worse="installed_y:Y")
    installed("leaving-dist", "installed_z", "raise SystemExit(3)", worst="installed_z:Z")
    installed("good-dist", "installed_a", MODULE.format(name="A", spec="a"), a="installed_a:A", gone="installed_a:Gone")
    registry = registry_of(tmp_path)
    error = refusal(lambda: registry.get("bad"))
    assert "plugin 'bad' of broken-dist 1.2" in error.what
    assert error.where == "installed_x:X"
    assert "a_module_that_is_not_there" in error.why
    assert "install what it needs" in error.fix
    assert "ZeroDivisionError" in refusal(lambda: registry.get("worse")).why
    assert "plugin 'worst' of leaving-dist 1.2" in refusal(lambda: registry.get("worst")).what
    assert "Gone" in refusal(lambda: registry.get("gone")).why
    assert registry.get("a").spec.name == "a"
    assert len(registry.entries()) == 5


def test_an_entry_point_that_calls_itself_otherwise(installed, tmp_path):
    installed("some-dist", "installed_a", MODULE.format(name="A", spec="other"), a="installed_a:A")
    error = refusal(lambda: registry_of(tmp_path).get("a"))
    assert "'a' has the name 'other'" in error.what
    assert "some-dist 1.2" in error.where


def test_another_version_of_the_contract_names_the_distribution(installed, tmp_path):
    source = MODULE.format(name="A", spec="a").replace("api_version=4", "api_version=99")
    installed("future-dist", "installed_a", source, a="installed_a:A")
    error = refusal(lambda: registry_of(tmp_path).get("a"))
    assert "version 99 of the plugin contract" in error.what
    assert "future-dist 1.2" in error.where


def test_what_is_no_plugin_class(installed, tmp_path):
    installed("some-dist", "installed_a", "A = 3", a="installed_a:A")
    error = refusal(lambda: registry_of(tmp_path).get("a"))
    assert "3 is not a plugin class" in error.what
    assert error.where == "some-dist 1.2"


def test_a_class_by_its_module(installed, tmp_path):
    installed("some-dist", "installed_a", MODULE.format(name="A", spec="a"))
    assert Registry().get("installed_a:A").spec.name == "a"
    assert "AttributeError" in refusal(lambda: Registry().get("installed_a:Missing")).why
    assert "ModuleNotFoundError" in refusal(lambda: Registry().get("installed_missing:A")).why
    assert Registry().provenance(Registry().get("installed_a:A")) == "module installed_a"


def test_disabled_plugins(installed, tmp_path):
    installed("some-dist", "installed_a", MODULE.format(name="A", spec="a"), a="installed_a:A", b="installed_a:B")
    registry = Registry.from_environment({DISABLE_VARIABLE: "a, zero1,"})
    error = refusal(lambda: registry.get("a"))
    assert "'a' is disabled" in error.what
    assert error.where == "some-dist 1.2"
    assert DISABLE_VARIABLE in error.why
    assert "installed_a" not in sys.modules
    assert {e.name for e in registry.entries() if e.disabled} == {"a", "zero1"}
    assert "disabled" in refusal(lambda: registry.get("installed_a:A")).what
    error = refusal(lambda: registry.refuse_disabled(Registry().get("installed_a:A")))  # an instance in Python
    assert "'a' is disabled" in error.what
    assert error.where == "some-dist 1.2"


def test_registering_a_class():
    registry = Registry()
    cls = type(fake("mine"))
    assert registry.register(cls) is cls
    assert registry.register(cls) is cls
    assert registry.get("mine") is cls
    (entry,) = registry.entries()
    assert (entry.name, entry.distribution, entry.version) == ("mine", None, None)
    assert entry.load() is cls
    assert "registered in this process" in entry.source


def test_registering_a_name_that_is_taken(installed, tmp_path):
    installed("some-dist", "installed_a", MODULE.format(name="A", spec="a"), a="installed_a:A")
    registry = registry_of(tmp_path)
    cls = type(fake("a"))
    error = refusal(lambda: registry.register(cls))
    assert "There is already a plugin 'a'" in error.what
    assert error.where == "some-dist 1.2"
    assert "override=True" in error.fix
    registry.register(cls, override=True)
    assert registry.get("a") is cls
    assert registry.provenance(cls) == f"module {cls.__module__}"
    assert "installed_a" not in sys.modules


def test_registering_what_is_no_plugin():
    assert "not a plugin class" in refusal(lambda: Registry().register(object)).what
    assert "not a plugin class" in refusal(lambda: Registry().register("zero1")).what


def test_register_plugin_reaches_the_registry_of_the_process():
    cls = type(fake("registered_by_a_unit_test"))
    assert register_plugin(cls) is cls
    assert default_registry().get("registered_by_a_unit_test") is cls
    assert default_registry() is default_registry()


# ---- default owners --------------------------------------------------------------------------------------------------
def test_a_default_owner_is_one_object_for_all_its_responsibilities(installed, tmp_path):
    owners = "gradient_reduction = installed_a:A\noptimizer_state = installed_a:A"
    installed("some-dist", "installed_a", MODULE.format(name="A", spec="a"), owners=owners)
    found = registry_of(tmp_path).default_owners()
    assert set(found) == {Claim.GRADIENT_REDUCTION, Claim.OPTIMIZER_STATE}
    assert found[Claim.GRADIENT_REDUCTION] is found[Claim.OPTIMIZER_STATE]
    assert registry_of(tmp_path, disabled=["a"]).default_owners() == {}


def test_the_built_in_default_owners():
    owners = Registry.from_environment({}).default_owners()
    assert {claim.value: owner.spec.name for claim, owner in owners.items()} == {
        "gradient_reduction": "data_parallel",
    }
    assert Registry.from_environment({}).provenance(type(owners[Claim.GRADIENT_REDUCTION])).startswith("neuron-accel ")


def problem_of(registry: Registry, caplog: pytest.LogCaptureFixture) -> NeuronAccelError:
    """Returns the only problem of the installed distributions, which is a warning and not an error of a run."""
    assert registry.default_owners() == {}
    problems = registry.problems()
    assert [str(problem) for problem in problems] == [record.getMessage() for record in caplog.records]
    return problems[0]


def test_two_default_owners_of_one_responsibility(installed, tmp_path, caplog):
    installed("first-dist", "installed_a", MODULE.format(name="A", spec="a"), owners="backward = installed_a:A")
    installed("second-dist", "installed_b", MODULE.format(name="B", spec="b"), owners="backward = installed_b:B")
    error = problem_of(registry_of(tmp_path), caplog)
    assert "several default owners of backward" in error.what
    assert "first-dist 1.2" in error.where
    assert "second-dist 1.2" in error.where


def test_a_default_owner_without_a_declared_responsibility(installed, tmp_path, caplog):
    installed("some-dist", "installed_a", MODULE.format(name="A", spec="a"), owners="backwards = installed_a:A")
    error = problem_of(registry_of(tmp_path), caplog)
    assert "'backwards' is not a responsibility" in error.what
    assert "some-dist 1.2" in error.where
    assert "Did you mean 'backward'?" in error.fix


def test_a_default_owner_with_a_required_option(installed, tmp_path, caplog):
    source = MODULE.format(name="A", spec="a") + "    needed: int\n"
    installed("some-dist", "installed_a", source, owners="backward = installed_a:A")
    error = problem_of(registry_of(tmp_path), caplog)
    assert "cannot be created without options" in error.what
    assert "some-dist 1.2" in error.where
    assert "needed" in error.why


def test_a_default_owner_that_cannot_be_imported(installed, tmp_path, caplog):
    installed("some-dist", "installed_a", "1 / 0", owners="backward = installed_a:A")
    error = problem_of(registry_of(tmp_path), caplog)
    assert "default owner of backward of some-dist 1.2" in error.what
    assert "ZeroDivisionError" in error.why


def test_a_broken_built_in_default_owner_is_an_error(installed, tmp_path):
    installed("neuron-accel", "installed_a", "1 / 0", owners="backward = installed_a:A")
    assert "default owner of backward of neuron-accel 1.2" in refusal(registry_of(tmp_path).default_owners).what


# ---- what is merely installed ----------------------------------------------------------------------------------------
def test_built_in_names_and_responsibilities_cannot_be_taken(installed, tmp_path, caplog):
    owners = "backward = installed_{0}:{1}"
    mine, theirs = MODULE.format(name="A", spec="a"), MODULE.format(name="B", spec="a")
    installed("neuron-accel", "installed_a", mine, owners=owners.format("a", "A"), a="installed_a:A")
    installed("greedy-dist", "installed_b", theirs, owners=owners.format("b", "B"), a="installed_b:B")
    registry = registry_of(tmp_path)
    assert registry.get("a").__name__ == "A"
    assert [entry.distribution for entry in registry.entries()] == ["neuron-accel"]
    assert [type(owner).__name__ for owner in registry.default_owners().values()] == ["A"]
    assert len(caplog.records) == 1
    assert "'backward' of greedy-dist 1.2 is left out" in caplog.text
    assert "installed_b" not in sys.modules
    first, second = registry.problems()
    assert "'a' of greedy-dist 1.2 is left out: neuron-accel has a plugin of that name" in first.what
    assert first.where == "installed_b:B of greedy-dist 1.2"
    assert "'backward' of greedy-dist 1.2" in second.what
    assert registry.get("installed_b:B").__name__ == "B"
    assert registry.provenance(registry.get("installed_a:A")) == "neuron-accel 1.2"


def test_damaged_metadata(installed, tmp_path):
    installed("some-dist", "installed_a", MODULE.format(name="A", spec="a"), a="installed_a:A")
    (tmp_path / "some_dist-1.2.dist-info" / "METADATA").unlink()
    registry = registry_of(tmp_path)
    assert registry.get("a").spec.name == "a"
    assert registry.entries()[0].source


def test_disabling_what_is_not_there(installed, tmp_path):
    installed("some-dist", "installed_a", MODULE.format(name="A", spec="stripes"), stripes="installed_a:A")
    (problem,) = registry_of(tmp_path, disabled=["strips"]).problems()
    assert f"{DISABLE_VARIABLE} names 'strips'" in problem.what
    assert "Did you mean 'stripes'?" in problem.fix


# ---- the ways to ask for a plugin ------------------------------------------------------------------------------------
def test_by_name_by_import_path_and_by_instance_are_one_plan(installed, tmp_path):
    source = MODULE.format(name="A", spec="a") + "    width: int = 1\n"
    installed("some-dist", "installed_a", source, a="installed_a:A")
    installed("broken-dist", "installed_x", "1 / 0", bad="installed_x:X")
    registry = registry_of(tmp_path)
    (tmp_path / "run.yaml").write_text("plugins:\n  - a: {width: 3}\n")
    (by_name,) = load_config(tmp_path / "run.yaml", registry=registry).plugins
    (by_path,) = load_config({"plugins": [{"installed_a:A": {"width": 3}}]}, registry=registry).plugins
    instance = registry.get("a")(width=3)
    plans = [make_plan([p], world_size=2, provenance=registry.provenance) for p in (by_name, by_path, instance)]
    assert len({plan.fingerprint() for plan in plans}) == 1
    assert plans[0].provenance == {"a": "some-dist 1.2"}
    assert to_config([instance], registry=registry) == {"plugins": [{"a": {"width": 3}}]}
    assert "installed_x" not in sys.modules


def test_two_that_claim_the_same_are_named_by_distribution(installed, tmp_path):
    installed("first-dist", "installed_a", MODULE.format(name="A", spec="a"), a="installed_a:A")
    installed("second-dist", "installed_b", MODULE.format(name="B", spec="b"), b="installed_b:B")
    registry = registry_of(tmp_path)
    a, b = (registry.get(name)() for name in ("a", "b"))
    with pytest.raises(PlanError) as caught:
        make_plan([a, b], world_size=2, provenance=registry.provenance)
    assert "'a' and 'b' both claim gradient_reduction" in caught.value.what
    assert caught.value.where == "plugin 'a' of first-dist 1.2; plugin 'b' of second-dist 1.2"
    assert make_plan([a], world_size=2, provenance=registry.provenance).provenance == {"a": "first-dist 1.2"}


def test_an_accelerator_refuses_an_instance_of_a_disabled_plugin(monkeypatch):
    from neuron_accel import NeuronAccelerator, Zero1Plugin

    monkeypatch.setenv(DISABLE_VARIABLE, "zero1")
    default_registry.cache_clear()
    try:
        error = refusal(lambda: NeuronAccelerator(plugins=[Zero1Plugin()]))
    finally:
        default_registry.cache_clear()
    assert "'zero1' is disabled" in error.what
    assert error.where.startswith("neuron-accel ")


# ---- switches --------------------------------------------------------------------------------------------------------
def test_a_switch_of_the_accelerator_adds_its_plugin_unless_that_is_disabled():
    name = Registry.from_environment({}).switched_on("zero_1").spec.name
    disabled = Registry.from_environment({DISABLE_VARIABLE: name})
    assert f"{name!r} is disabled" in str(refusal(lambda: disabled.switched_on("zero_1")))


def test_a_class_that_takes_the_place_of_another_is_what_a_switch_adds():
    registry = Registry.from_environment({})
    original = type(registry.switched_on("zero_1"))

    class Own(original):
        pass

    registry.register(Own, override=True)
    assert type(registry.switched_on("zero_1")) is Own


# ---- code that a configuration names ---------------------------------------------------------------------------------
def test_a_configuration_can_be_kept_from_importing_code(installed, tmp_path, monkeypatch):
    source = MODULE.format(name="Own", spec="own") + "\nopen(__file__ + '.imported', 'w').close()\n"
    installed("unrelated", "installed_own", source)
    trusting, strict = Registry.from_environment({}), Registry.from_environment({TRUST_VARIABLE: "entry-points"})
    file = tmp_path / "run.yaml"
    file.write_text("plugins:\n  - installed_own:Own\n")
    for config in (file, {"plugins": ["installed_own:Own"]}):
        with pytest.raises(NeuronAccelError, match="would import 'installed_own'") as caught:
            load_config(config, registry=strict)
        assert f"{TRUST_VARIABLE}=entry-points" in str(caught.value)
    assert "installed_own" not in sys.modules
    assert not (tmp_path / "installed_own.py.imported").exists()
    assert load_config({"plugins": ["zero1"]}, registry=strict).plugins
    assert load_config(file, registry=trusting).plugins[0].spec.name == "own"
    assert (tmp_path / "installed_own.py.imported").exists()


def test_what_the_program_registers_itself_is_trusted():
    strict = Registry.from_environment({TRUST_VARIABLE: "entry-points"})
    cls = type(fake("mine"))
    strict.register(cls)
    assert strict.get("mine") is cls


@pytest.mark.parametrize("value", ["entry_points", "all", "1"])
def test_a_trust_that_means_nothing_is_refused(value):
    assert "entry-points" in refusal(lambda: Registry.from_environment({TRUST_VARIABLE: value})).fix


def test_an_object_that_an_option_names_is_imported_unless_that_is_forbidden(monkeypatch):
    monkeypatch.delenv(TRUST_VARIABLE, raising=False)
    assert import_object("fractions:Fraction.from_float", "option") == Fraction.from_float
    assert "No module named 'not_there'" in refusal(lambda: import_object("not_there:Class", "option 'x'")).why
    monkeypatch.setenv(TRUST_VARIABLE, "entry-points")
    error = refusal(lambda: import_object("fractions:Fraction", "option 'x'"))
    assert error.what == "Option 'x' is refused: it would import 'fractions'."
    assert TRUST_VARIABLE in error.why
    assert TRUST_VARIABLE in error.fix
