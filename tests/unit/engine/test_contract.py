"""Plugin classes and hooks that are refused at planning, and the hooks that a run calls."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest
import torch
from torch import nn

from neuron_accel import contract
from neuron_accel.backends.base import COLLECTIVES, Backend
from neuron_accel.backends.torch_distributed import TorchBackend
from neuron_accel.engine.plan.mesh import AxisKind, AxisSpec
from neuron_accel.engine.plan.planner import make_plan
from neuron_accel.engine.plan.plugin import HOOKS, Claim, StrategyPlugin
from neuron_accel.engine.runtime.run import PreparedModel, Run, transform_model
from neuron_accel.engine.sharding.layout import Cut, Layout
from neuron_accel.engine.sharding.parameters import ParameterMap
from neuron_accel.errors import LayoutError, ParameterError, PluginError, UsageError
from tests.unit.fake_plugins import DEFAULTS, fake


def with_methods(name: str, claims: tuple[Claim, ...] = (), **methods) -> StrategyPlugin:
    plugin = fake(name)
    spec = type(plugin).spec
    namespace = {
        "spec": type(spec)(name=name, api_version=spec.api_version, phase=spec.phase, claims=frozenset(claims)),
        **methods,
    }
    return type(name.title(), (type(plugin),), namespace)()


def run_of(*plugins: StrategyPlugin) -> Run:
    backend = TorchBackend(torch.device("cpu"))
    plan = make_plan(plugins, world_size=1, backend_capabilities=backend.capabilities, default_owners=DEFAULTS)
    return Run(plan=plan, backend=backend)


@pytest.mark.parametrize(
    ("plugin", "message"),
    [
        (lambda: with_methods("a", reshapes=lambda self, optimizer, run: None), "did you mean reshape?"),
        (lambda: with_methods("a", step=lambda self, run: (yield)), "step does not accept"),
        (lambda: with_methods("a", transform_model=lambda self, model, run, parameters: model), "transform_model does"),
        (lambda: with_methods("a", claims=(Claim.GRADIENT_REDUCTION,)), "claims gradient_reduction and has no"),
        (lambda: with_methods("a", claims=(Claim.OPTIMIZER_STATE,)), "has no transform_optimizer"),
        (lambda: with_methods("a", claims=(Claim.BACKWARD,)), "has no backward_pass"),
        (lambda: with_methods("a", step=3), "step is the name of a hook"),
        (lambda: with_methods("a", after_step=lambda self, optimizer, run: None), "not a hook any more: step, after"),
        (lambda: with_methods("a", gradients=lambda self, run: None), "only called on the owner"),
        (lambda: with_methods("a", full_gradient=lambda self, parameter, run: None), "not a hook any more: gradients"),
    ],
)
def test_plugin_classes_that_do_not_conform_are_refused_at_planning(plugin, message):
    with pytest.raises(PluginError, match="does not conform") as caught:
        run_of(plugin())
    assert message in caught.value.why


def test_methods_that_are_no_hooks_are_allowed():
    run_of(with_methods("a", graphs=lambda self: 3, survey_of=lambda self, x: x))


def test_only_implemented_hooks_are_called_in_the_order_of_the_plan():
    first = with_methods("first", setup=lambda self, run: None)
    second = with_methods("second", transform_dataloader=lambda self, loader, run: loader * 2)
    run = run_of(second, first)
    assert [hook.__self__.spec.name for hook in run.hooks["setup"]] == ["first"]
    assert run.hooks.transform("transform_dataloader", 3, run) == 6
    assert run.hooks["step"] == ()
    with pytest.raises(KeyError):
        run.hooks["after_step"]


def test_hooks_around_a_moment_act_before_and_after_it_and_are_closed_if_it_fails():
    told = []

    def around(name, factor):
        def backward_pass(self, loss, run):
            told.append(f"{name} begins")
            try:
                yield factor and loss * factor
                told.append(f"{name} ends")
            finally:
                told.append(f"{name} is closed")

        return with_methods(name, backward_pass=backward_pass)

    run = run_of(around("a", 2), around("b", None), around("c", 5))
    with run.hooks.around("backward_pass", 3, run) as loss:
        told.append(loss)
    closed = [f"{name} {does}" for name in "abc" for does in ("ends", "is closed")]
    assert told == ["a begins", "b begins", "c begins", 30, *closed]
    told.clear()
    with pytest.raises(ZeroDivisionError), run.hooks.around("backward_pass", 3, run):
        1 / 0  # noqa: B018
    assert told == ["a begins", "b begins", "c begins", "c is closed", "b is closed", "a is closed"]


def test_one_that_yields_false_closes_those_before_it_and_is_the_last_that_is_called():
    told = []

    def step(self, optimizer, run):
        told.append(f"{self.spec.name} begins")
        yield False if self.spec.name == "b" else None
        told.append(f"{self.spec.name} ends")

    run = run_of(*(with_methods(name, step=step) for name in "abc"))
    with run.hooks.around("step", "optimizer", run) as taken:
        assert taken is False
    assert told == ["a begins", "b begins"]


def test_a_hook_around_a_moment_has_a_yield():
    with pytest.raises(PluginError, match="does not conform") as caught:
        run_of(with_methods("a", reshape=lambda self, model, run: None))
    assert "reshape has no yield" in caught.value.why


def test_explain_lists_the_plugins_of_each_hook():
    def step(self, optimizer, run):
        """Counts the step. And more."""
        yield

    text = run_of(with_methods("counter", step=step)).plan.explain()
    rows = [line.split("  ") for line in text.splitlines()]
    (row,) = [[cell.strip() for cell in row if cell.strip()] for row in rows if "Counts the step" in "".join(row)]
    assert row == [HOOKS["step"].text, "counter", "Counts the step"]
    order = [text.index(HOOKS[name].text) for name in ("gradients", "step")]
    assert order == sorted(order)


@pytest.mark.parametrize(
    ("change", "error", "hint"),
    [
        (lambda p: p.set_layout("wieght", Layout.of(torch.empty(4, 4))), ParameterError, "Did you mean 'weight'?"),
        (lambda p: p.add_partial_axis("weight", "tpp"), LayoutError, "Did you mean 'tp'?"),
        (lambda p: p.set_holders("weight", "tpp", [0]), LayoutError, "Did you mean 'tp'?"),
        (
            lambda p: p.set_layout(
                "weight", Layout(shape=(4, 4), dtype="float32", cuts=(Cut(dim=0, axis="ep", degree=2, size=4),))
            ),
            LayoutError,
            "Known: dp, tp",
        ),
    ],
)
def test_names_are_checked_where_they_are_given(change, error, hint):
    plugin = with_methods("mistaken", transform_model=lambda self, model, run: change(model.parameters))
    tp = fake("other")
    object.__setattr__(tp, "axes", lambda: (AxisSpec(name="tp", degree=1, kind=AxisKind.MODEL),))
    run, module = run_of(plugin, tp), nn.Linear(4, 4)
    model = PreparedModel(original=module, module=module, parameters=ParameterMap(module, mesh=run.mesh))
    with pytest.raises(error) as caught:
        transform_model(model, run)
    assert hint in str(caught.value)
    assert caught.value.where == "plugin 'mistaken'"


def test_a_group_of_an_axis_that_is_not_there():
    with pytest.raises(UsageError, match="no axis 'nonsense'"):
        run_of(fake("a")).group("nonsense")


def test_what_needs_other_ranks_is_marked_on_the_backend():
    assert {"all_reduce", "start_send", "broadcast_object", "barrier"} <= COLLECTIVES
    assert not {"chunk", "number", "record", "rank", "device"} & COLLECTIVES
    public = {name for name in vars(Backend) if not name.startswith("_")}
    assert public >= COLLECTIVES


def test_the_contract_lists_what_it_imports_and_nothing_else():
    source = Path(contract.__file__).read_text(encoding="utf-8")
    nodes = [node for node in ast.parse(source).body if isinstance(node, ast.ImportFrom)]
    nodes = [
        node for node in nodes if str(node.module).startswith("neuron_accel.") and node.module != "neuron_accel.doors"
    ]
    names = {alias.name for node in nodes for alias in node.names} - {
        "norms",
        "version_3",
    }  # for the names of version 3
    assert sorted(names) == sorted(contract.__all__)
