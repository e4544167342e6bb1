"""Planning: the plan depends only on the set of plugins, and every responsibility has one owner."""

from __future__ import annotations

import copy
import hashlib
import itertools
import json
import os
import pickle
import subprocess
import sys
from dataclasses import dataclass, field, replace
from enum import Enum
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from neuron_accel.backends.events import Event, Events
from neuron_accel.backends.group import Group
from neuron_accel.engine.plan.plan import ABSENT, Plan, difference
from neuron_accel.engine.plan.planner import in_order, make_plan
from neuron_accel.engine.plan.plugin import API_VERSION, Claim, Phase, PlanContext, PluginSpec, StrategyPlugin
from neuron_accel.engine.plan.registry import Registry
from neuron_accel.engine.runtime.replica_groups import PartitionLimit
from neuron_accel.errors import NeuronAccelError, PlanError, PluginError
from tests.unit.fake_plugins import DEFAULTS, REDUCER, fake

NAMES = "abcdef"


def plan_of(*plugins: StrategyPlugin, world_size: int = 1, **arguments: Any) -> Plan:
    return make_plan(plugins, world_size=world_size, **{"default_owners": DEFAULTS, **arguments})


def names(plan: Plan) -> list[str]:
    return [plugin.spec.name for plugin in plan.plugins]


def refusal(*plugins: Any, kind: type[NeuronAccelError] = PlanError, **arguments: Any) -> NeuronAccelError:
    """Returns the error of planning ``plugins``, which must not depend on their order."""
    caught = []
    for order in itertools.permutations(plugins):
        with pytest.raises(kind) as info:
            plan_of(*order, **arguments)
        caught.append(info.value)
    assert len({str(error) for error in caught}) == 1
    assert caught[0].where
    assert caught[0].why
    assert caught[0].fix
    return caught[0]


# ---- order -----------------------------------------------------------------------------------------------------------
@st.composite
def plugin_sets(draw: st.DrawFn) -> list[StrategyPlugin]:
    chosen = draw(st.lists(st.sampled_from(NAMES), unique=True))
    others = st.frozensets(st.sampled_from(NAMES + "z"), max_size=2)
    phases = st.sampled_from([Phase.LAYOUT, Phase.MEMORY])
    return [fake(name, draw(phases), after=draw(others)) for name in chosen]


def outcome(plugins: list[StrategyPlugin]) -> str:
    try:
        plan = plan_of(*plugins, world_size=4)
    except PlanError as error:
        return str(error)
    return f"{plan.fingerprint()} {plan.explain()}"


@given(plugin_sets(), st.data())
def test_permuting_the_list_changes_neither_plan_nor_error(plugins, data):
    assert outcome(plugins) == outcome(data.draw(st.permutations(plugins)))


@given(plugin_sets())
def test_phases_and_declarations_are_obeyed(plugins):
    try:
        order = names(plan_of(*plugins))
    except PlanError:
        return
    place = {name: order.index(name) for name in order}
    for plugin in plugins:
        mine = place[plugin.spec.name]
        for other in plugins:
            if plugin.spec.phase < other.spec.phase:
                assert mine < place[other.spec.name]
        assert all(place[name] < mine for name in plugin.spec.after & place.keys())


def test_plugins_without_an_order_are_sorted_by_name():
    assert names(plan_of(fake("b"), fake("c"), fake("a"), default_owners={})) == ["a", "b", "c"]
    plugins = [fake("b"), fake("c"), fake("a", after={"c"}), fake("z", Phase.LAYOUT)]
    plan = plan_of(*plugins, default_owners={})
    assert names(plan) == ["z", "b", "c", "a"]
    assert plan.reasons["plugins.z"] == "phase layout"
    assert plan.reasons["plugins.b"] == "phase memory; by name where nothing else is declared"
    assert plan.reasons["plugins.a"] == "phase memory; 'a' declares after='c'"


def test_a_cycle_is_printed():
    error = refusal(fake("a", after={"c"}), fake("b", after={"a"}), fake("c", after={"b"}), fake("d", after={"a"}))
    assert "a -> b -> c -> a" in error.what
    for declaration in ("'a' declares after='c'", "'b' declares after='a'", "'c' declares after='b'"):
        assert declaration in error.where
    assert "leave one of a, b, c out" in error.fix
    assert "a -> a" in refusal(fake("a", after={"a"})).what


def test_in_order_sorts_by_name_and_finds_cycles():
    given = {name: fake(name) for name in "cab"}
    assert [plugin.spec.name for plugin, _ in in_order(given)] == ["a", "b", "c"]
    pairs = {name: fake(name, after={other}) for name, other in ("dc", "cd", "ba", "ab")}
    with pytest.raises(PlanError, match="a -> b -> a"):
        in_order(pairs)


def test_a_declaration_against_the_phases():
    error = refusal(fake("early", Phase.LAYOUT, after={"late"}), fake("late", Phase.MEMORY))
    assert "'late' cannot act before 'early'" in error.what
    assert error.where == "'early' declares after='late'"
    assert "phase memory" in error.why
    assert "phase layout" in error.why


# ---- duties ----------------------------------------------------------------------------------------------------------
def test_default_owners_own_only_unclaimed_responsibilities():
    plan = plan_of(world_size=2)
    assert dict(plan.owners) == {Claim.GRADIENT_REDUCTION: "reducer"}
    assert "by default" in plan.reasons["owners.gradient_reduction"]
    plan = plan_of(fake("other", claims={Claim.GRADIENT_REDUCTION}), world_size=2)
    assert dict(plan.owners) == {Claim.GRADIENT_REDUCTION: "other"}
    assert "otherwise 'reducer'" in plan.reasons["owners.gradient_reduction"]


def test_a_default_owner_without_a_responsibility_is_left_out():
    plan = plan_of(fake("all", claims=set(Claim)), world_size=2)
    assert names(plan) == ["all"]
    assert set(plan.owners) == set(Claim)


def test_a_default_owner_given_explicitly_keeps_its_options():
    cls = type(fake("reducer", Phase.GRADIENTS, claims=DEFAULTS.keys(), options={"bucket": 1}))
    plan = plan_of(cls(bucket=7), world_size=2)
    assert plan.plugin("reducer") == cls(bucket=7)
    assert plan.owners[Claim.GRADIENT_REDUCTION] == "reducer"


def test_a_default_owner_given_explicitly_but_without_a_responsibility():
    error = refusal(REDUCER, fake("all", claims=set(Claim)), world_size=2)
    assert "'reducer' has nothing left to own" in error.what
    assert "'reducer'" in error.where
    assert "'all'" in error.where
    assert "gradient_reduction is owned by 'all'" in error.why
    assert "leave 'reducer' out" in error.fix


def test_a_default_owner_used_for_one_responsibility_owns_its_other_unclaimed_ones():
    helper = fake("helper", claims={Claim.GRADIENT_REDUCTION, Claim.BACKWARD})
    plan = plan_of(default_owners={Claim.GRADIENT_REDUCTION: helper})
    assert plan.owners[Claim.BACKWARD] == "helper"


def test_two_owners_of_one_responsibility():
    plugins = [fake(name, claims={Claim.OPTIMIZER_STATE}) for name in ("one", "two")]
    error = refusal(*plugins, provenance=lambda cls: f"dist-of-{cls.spec.name} 1.{len(cls.spec.name)}")
    assert error.what == "Plugins 'one' and 'two' both claim optimizer_state."
    assert "'one' of dist-of-one 1.3" in error.where
    assert "'two' of dist-of-two 1.3" in error.where
    assert "exactly one owner" in error.why
    assert "leave out all but one" in error.fix


def test_refining_needs_an_owner():
    error = refusal(fake("refiner", refines={Claim.OPTIMIZER_STATE}))
    assert "'refiner' takes part in optimizer_state, which no plugin owns" in error.what
    assert "add a plugin that claims optimizer_state" in error.fix
    plan = plan_of(fake("refiner", refines={Claim.GRADIENT_REDUCTION}))
    assert plan.owners[Claim.GRADIENT_REDUCTION] == "reducer"


def test_gradient_reduction_needs_an_owner_if_ranks_replicate_parameters():
    error = refusal(fake("quiet"), world_size=2, default_owners={})
    assert "No plugin owns gradient_reduction" in error.what
    assert "along dp" in error.why
    assert plan_of(fake("quiet", axes={"tp": 2}), world_size=2, default_owners={}).owners == {}


# ---- relations -------------------------------------------------------------------------------------------------------
def test_a_required_axis_that_no_plugin_adds():
    error = refusal(fake("sequence", requires={"axis:tp"}), world_size=2)
    assert "'sequence' requires an axis 'tp' of more than one rank" in error.what
    assert "'axis:tp'" in error.why
    assert "no plugin of this run adds that axis" in error.why
    assert "add a plugin that adds axis 'tp'" in error.fix


def test_a_required_axis_of_one_rank():
    error = refusal(fake("sequence", requires={"axis:tp"}), fake("tensor", axes={"tp": 1}), world_size=2)
    assert "'tensor' adds that axis with degree 1" in error.why
    assert "raise the degree of axis 'tp' in 'tensor'" in error.fix
    plan = plan_of(fake("sequence", requires={"axis:tp"}), fake("tensor", axes={"tp": 2}), world_size=2)
    assert "axis:tp" in plan.capabilities


def test_a_required_data_axis():
    error = refusal(fake("shard", requires={"axis:dp"}), fake("tensor", axes={"tp": 2}), world_size=2)
    assert "use up every rank" in error.why
    assert "start more ranks" in error.fix
    assert "axis:dp" in plan_of(fake("shard", requires={"axis:dp"}), world_size=2).capabilities


def test_requirements_are_met_by_names_capabilities_and_the_backend():
    needy = fake("needy", requires={"other", "cap", "host-reads"})
    error = refusal(needy, fake("other"), backend_capabilities={"host-reads"})
    assert "'needy' requires 'cap'" in error.what
    assert "provides 'cap'" in error.fix
    plan = plan_of(needy, fake("other", provides={"cap"}), backend_capabilities={"host-reads"})
    assert plan.capabilities == {"cap", "host-reads"}


@pytest.mark.parametrize("enemy", ["other", "cap", "axis:tp"])
def test_conflicts(enemy):
    plugins = [fake("shy", conflicts={enemy}), fake("other", provides={"cap"}, axes={"tp": 2})]
    error = refusal(*plugins, world_size=2)
    assert f"'shy' cannot run together with {enemy!r}" in error.what
    assert "'shy'" in error.where
    assert "'other'" in error.where
    assert "leave out 'shy'" in error.fix


def test_conflict_with_the_backend():
    error = refusal(fake("shy", conflicts={"async"}), backend_capabilities={"async"})
    assert "comes from the backend" in error.what


def test_no_plugin_conflicts_with_itself():
    plan_of(
        fake("only", provides={"exclusive"}, conflicts={"exclusive", "only", "axis:tp"}, axes={"tp": 2}), world_size=2
    )


# ---- mesh ------------------------------------------------------------------------------------------------------------
def test_the_mesh_has_the_axes_of_all_plugins():
    plan = plan_of(fake("stages", axes={"pp": 2}), fake("tensor", axes={"tp": 4}), world_size=16)
    assert str(plan.mesh) == "pp 2 x dp 2 x tp 4"


def test_an_axis_added_by_two_plugins():
    error = refusal(fake("one", axes={"tp": 2}), fake("two", axes={"tp": 2}), world_size=4)
    assert "Axis 'tp' is added twice, by 'one' and by 'two'" in error.what
    assert "'one' of module" in error.where


def test_ranks_that_do_not_divide():
    error = refusal(fake("tensor", axes={"tp": 4}), world_size=6)
    assert "6 ranks cannot be divided into groups of 4 (tp 4)" in error.what


# ---- what is given ---------------------------------------------------------------------------------------------------
def test_a_plugin_given_twice():
    error = refusal(fake("twin"), fake("twin"), provenance=lambda cls: "dist 1.0")
    assert error.what == "Plugin 'twin' is given 2 times."
    assert error.where.count("TwinPlugin of dist 1.0") == 2
    assert error.fix == "keep one of them"


@pytest.mark.parametrize(
    ("version", "what", "fix"),
    [
        (
            1,
            "version 1 of the plugin contract",
            ("newer version of dist 1.0", "get the PreparedModel", "lazy_load=True"),
        ),
        (2, "version 2 of the plugin contract", ("newer version of dist 1.0", "lazy_load=True", "gradients, and")),
        (API_VERSION + 1, "of the plugin contract", ("newer version of neuron-accel",)),
        ("3", "version '3' of the plugin contract", ("newer version of neuron-accel",)),
    ],
)
def test_a_plugin_for_another_version_of_the_contract_is_told_what_to_change(version, what, fix):
    error = refusal(fake("old", api_version=version), kind=PluginError, provenance=lambda cls: "dist 1.0")
    assert what in error.what
    assert "dist 1.0" in error.where
    assert all(text in error.fix for text in fix)


def test_classes_and_other_things_are_no_plugins():
    error = refusal(type(fake("some")), kind=PluginError)
    assert error.fix == "write SomePlugin(...)"
    assert "'zero' is not a plugin" in refusal("zero", kind=PluginError).what


def test_a_plugin_without_a_spec():
    @dataclass(frozen=True, kw_only=True)
    class Nameless(StrategyPlugin):
        pass

    assert "Nameless declares no spec" in refusal(Nameless(), kind=PluginError).what


def test_a_plugin_that_forgot_to_be_a_dataclass():
    class Forgetful(StrategyPlugin):
        spec: ClassVar[PluginSpec] = PluginSpec(name="forgetful", api_version=4, phase=Phase.MEMORY)
        degree: int = 1

    error = refusal(Forgetful(), kind=PluginError)
    assert "has fields (degree) but is not a dataclass" in error.what
    assert "@dataclass(frozen=True, kw_only=True)" in error.fix


def test_validation_hooks_receive_the_finished_plan():
    seen: list[PlanContext] = []

    @dataclass(frozen=True, kw_only=True)
    class Curious(StrategyPlugin):
        spec: ClassVar[PluginSpec] = PluginSpec(name="curious", api_version=4, phase=Phase.OPTIMIZER)

        def validate(self, context: PlanContext) -> None:
            seen.append(context)
            if context.mesh.world_size == 4:
                raise PlanError("not on four")

    plan = plan_of(Curious(), fake("a", provides={"cap"}), world_size=2)
    (context,) = seen
    assert (list(context.plugins), context.capabilities, context.mesh) == (names(plan), plan.capabilities, plan.mesh)
    with pytest.raises(PlanError, match="not on four"):
        plan_of(Curious(), world_size=4)


# ---- the plan --------------------------------------------------------------------------------------------------------
CPU = torch.device("cpu")


class Color(Enum):
    RED = "red"


@dataclass(frozen=True, kw_only=True)
class Inner:
    depth: int = 1


def some_function() -> None: ...


@dataclass(frozen=True, kw_only=True)
class Rich(StrategyPlugin):
    spec: ClassVar[PluginSpec] = PluginSpec(name="rich", api_version=4, phase=Phase.LAYOUT)
    number: float = 1.0
    dtype: Any = torch.float32
    shape: tuple[int, ...] = (1, 2)
    names: frozenset[str] = frozenset({"x", "y", "z", "w"})
    table: dict[str, int] = field(default_factory=lambda: {"b": 1, "a": 2})
    color: Any = Color.RED
    path: Path = Path("a/b")
    inner: Inner = Inner()
    call: Any = some_function
    device: Any = CPU
    private: int = field(default=0, metadata={"in_plan": False})
    anything: Any = None


CHANGES = {
    "number": 2.0,
    "dtype": torch.bfloat16,
    "shape": (1, 3),
    "names": frozenset({"x"}),
    "table": {"b": 1, "a": 3},
    "color": "blue",
    "path": Path("a/c"),
    "inner": Inner(depth=2),
    "call": test_plugins_without_an_order_are_sorted_by_name,
    "device": torch.device("meta"),
    "anything": float("inf"),
}


@pytest.mark.parametrize("option", CHANGES)
def test_any_option_changes_the_fingerprint(option):
    before, after = plan_of(Rich()), plan_of(replace(Rich(), **{option: CHANGES[option]}))
    assert before.fingerprint() != after.fingerprint()
    paths = [item.path for item in difference(before.to_dict(), after.to_dict())]
    assert paths
    assert all(path.startswith(f"plugins.rich.config.{option}") for path in paths)


def test_what_is_not_in_the_plan_does_not_change_the_fingerprint():
    assert plan_of(Rich()).fingerprint() == plan_of(Rich(private=5)).fingerprint()
    assert plan_of(Rich(device=torch.device("cuda:0"))).fingerprint() == (
        plan_of(Rich(device=torch.device("cuda:1"))).fingerprint()
    )


@given(
    st.integers(1, 4),
    st.integers(1, 4),
    st.sets(st.sampled_from(["a", "b"])),
    st.floats(allow_nan=False, allow_infinity=False),
)
def test_equal_decisions_have_equal_fingerprints(tp, rest, capabilities, number):
    def decide(reverse: bool) -> Plan:
        plugins = [Rich(number=number), fake("tensor", axes={"tp": tp})]
        return plan_of(
            *(plugins[::-1] if reverse else plugins), world_size=tp * rest, backend_capabilities=capabilities
        )

    one, other = decide(False), decide(True)
    assert one.fingerprint() == other.fingerprint()
    assert difference(one.to_dict(), other.to_dict()) == []
    assert one.fingerprint() != plan_of(Rich(number=number), world_size=tp * rest + 1).fingerprint()


def test_ranks_agree_although_their_sets_are_hashed_differently():
    """The iteration order of sets of strings differs between processes."""
    program = """
import sys
sys.path[:0] = sys.argv[1:]
from neuron_accel.engine.plan.planner import make_plan
from tests.unit.fake_plugins import DEFAULTS, fake
options = {"names": frozenset("abcdefgh"), "table": {name: 1 for name in set("abcdefgh")}}
plugins = [fake(name, options=options, provides=set("xyz"), axes={name + "p": 2}) for name in set("dct")]
plan = make_plan(plugins, world_size=8, backend_capabilities=set("uvw"), default_owners=DEFAULTS)
print(set("abcdefgh"), plan.fingerprint())
"""
    command = [sys.executable, "-c", program, str(Path(__file__).parents[3])]
    results = []
    for seed in ("1", "2"):
        environment = {**os.environ, "PYTHONHASHSEED": seed}
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
        results.append(done.stdout.rsplit(maxsplit=1))
    (one, first), (other, second) = results
    assert one != other
    assert first == second


def test_planning_needs_no_torch():
    program = "import sys, neuron_accel.engine.plan.planner; sys.exit('torch' in sys.modules)"
    subprocess.run([sys.executable, "-c", program], check=True)


def test_plan_is_plain_data():
    plan = plan_of(Rich(), fake("tensor", axes={"tp": 2}), world_size=4, provenance=lambda cls: "dist 1.0")
    data = plan.to_dict()
    text = json.dumps(data, sort_keys=True, separators=(",", ":"))
    assert json.loads(text) == data
    assert plan.fingerprint() == hashlib.sha256(text.encode()).hexdigest()
    assert data["mesh"] == {"dp": {"degree": 2, "kind": "data"}, "tp": {"degree": 2, "kind": "model"}}
    assert data["owners"] == {"gradient_reduction": "reducer"}
    assert data["order"] == ["rich", "tensor", "reducer"]
    rich = data["plugins"]["rich"]
    assert (rich["provenance"], rich["class"]) == ("dist 1.0", f"{Rich.__module__}:Rich")
    config = rich["config"]
    assert (config["dtype"], config["names"], config["color"]) == ("float32", ["w", "x", "y", "z"], "red")
    assert (config["inner"], config["path"], config["shape"]) == ({"depth": 1}, "a/b", [1, 2])
    assert config["call"].endswith(":some_function")


def test_an_option_without_a_plain_form():
    with pytest.raises(PluginError) as caught:
        plan_of(Rich(anything=object())).fingerprint()
    assert "Option 'anything' of plugin 'rich'" in caught.value.what
    assert "cannot be compared between ranks" in caught.value.why
    assert "in_plan" in caught.value.fix


def test_difference():
    a = {"x": {"y": 1, "l": [1, 2]}, "same": None, "gone": 1, "t": [1], "nan": float("nan"), "i": 1}
    b = {"x": {"y": 2, "l": [1, 3]}, "same": None, "new": 2, "t": [1, 2], "nan": float("nan"), "i": 1.0}
    assert difference(a, b) == [
        ("gone", 1, ABSENT),
        ("i", 1, 1.0),
        ("new", ABSENT, 2),
        ("t", [1], [1, 2]),
        ("x.l[1]", 2, 3),
        ("x.y", 1, 2),
    ]
    assert str(difference(a, b)[-1]) == "x.y: 1 against 2"


def test_a_plan_is_immutable_and_can_be_copied_and_sent():
    plan = plan_of(fake("a"), REDUCER)
    plan = replace(plan, plugins=(Rich(),))
    with pytest.raises(TypeError):
        plan.owners[Claim.BACKWARD] = "a"
    with pytest.raises(AttributeError):
        plan.mesh = None
    assert pickle.loads(pickle.dumps(plan)) == plan
    assert copy.deepcopy(plan) == plan
    assert replace(plan, plugins=()) != plan


def test_asking_for_a_plugin():
    plan = plan_of(fake("tensor"))
    assert plan.plugin("tensor").spec.name == "tensor"
    with pytest.raises(PlanError) as caught:
        plan.plugin("tenser")
    assert "no plugin 'tenser'" in caught.value.what
    assert "Did you mean 'tensor'?" in caught.value.fix


def test_explain():
    plan = plan_of(
        Rich(number=3.5),
        fake("tensor", axes={"tp": 2}),
        world_size=4,
        provenance=lambda cls: f"{cls.spec.name}-dist 1.0",
    )
    text = plan.explain()
    assert str(plan) == text
    lines = [" ".join(line.split()) for line in text.splitlines()]
    for expected in (
        "Plan for 4 ranks: dp 2 x tp 2",
        "dp 2 data {0 2} {1 3}",
        "tp 2 model {0 1} {2 3}",
        "1. rich (rich-dist 1.0)",
        "options: number=3.5",
        "2. tensor (tensor-dist 1.0)",
        "axes: tp 2",
        "options: all at their defaults",
        "order: phase gradients",
        "gradient_reduction reducer owns it by default; no other plugin claims it",
        "backward - autograd (default)",
        f"Fingerprint {plan.fingerprint()[:16]}",
    ):
        assert expected in lines


def test_explain_abbreviates_large_meshes():
    text = plan_of(fake("tensor", axes={"tp": 32}), world_size=1024).explain()
    assert "{0 1 2 ... 31}" in text
    assert "(32 groups of 32)" in text
    assert max(map(len, text.splitlines())) <= 120
    assert "none" in make_plan([], world_size=1).explain()
    assert "Plan for 1 rank: one rank" in make_plan([], world_size=1).explain()


# ---- the built-in plugins --------------------------------------------------------------------------------------------
def test_the_order_of_the_built_in_plugins_means_nothing():
    registry = Registry.from_environment({})
    tensor = registry.get("model_parallelism")(tensor_parallel_size=2)
    plugins = [tensor, registry.get("sequence_parallel")(), registry.get("zero1")()]
    arguments = {"default_owners": registry.default_owners(), "provenance": registry.provenance, "world_size": 4}
    plans = [plan_of(*order, **arguments) for order in itertools.permutations(plugins)]
    assert {plan.explain() for plan in plans} == {plans[0].explain()}
    assert plans[0].provenance["zero1"].startswith("neuron-accel ")
    assert str(plans[0].mesh) == "dp 2 x tp 2"
    error = refusal(registry.get("sequence_parallel")(), registry.get("zero1")(), **arguments)
    assert "'axis:tp'" in error.why


# ---- groups that plugins make themselves -----------------------------------------------------------------------------
def way(number: int) -> Group:
    """Returns one of many ways to partition 32 ranks into pairs."""
    pairs = {tuple(sorted((rank, rank ^ number))) for rank in range(32)}
    return Group(ranks=(0, number), index=0, partition=tuple(sorted(pairs)), name=f"way {number}")


def add(limit: PartitionLimit, op: str, number: int, category: str = "deferred") -> None:
    """Adds a collective to the graph."""
    events = Events()
    events.observe(limit)
    with events.collective(op, way(number), 8, deferred=category == "deferred"):
        pass


def test_one_process_group_layout_too_many_in_a_graph_is_refused_and_the_others_are_named():
    limit = PartitionLimit(3, "trn1.32xlarge")
    for number in (1, 2, 3, 2, 1):
        add(limit, "all_reduce", number)
    with pytest.raises(PlanError, match=r"more than 3 ways, .* 'way 4'") as caught:
        add(limit, "all_gather", 4)
    for number in (1, 2, 3):
        assert f"'way {number}' (all_reduce in engine/test_planner.py:" in caught.value.why
    assert "(all_gather in engine/test_planner.py:" in caught.value.what
    assert "[0, 4], [1, 5]" in caught.value.where
    assert "run.group" in caught.value.fix


def test_process_group_layouts_are_counted_per_graph():
    limit = PartitionLimit(3, "trn1.32xlarge")
    for number in range(1, 13):
        add(limit, "all_gather_object", number, "collective")
        add(limit, "all_reduce", number)
        if number % 3 == 0:
            limit.begin(Event(Events(), "execute the graph", "graph", None, {}))
