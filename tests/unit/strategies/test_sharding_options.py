"""Options of strategies that shard that are not possible, and those that reach the optimizer."""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from typing import ClassVar

import pytest
import torch

from neuron_accel import FullyShardedPlugin, ModelParallelismPlugin, NeuronAccelerator, Zero1Plugin
from neuron_accel.contract import Phase, PluginSpec, StrategyPlugin
from neuron_accel.engine.shards.optimizer import ShardedOptimizer
from neuron_accel.errors import ConfigurationError, PlanError, UsageError


@pytest.mark.parametrize("plugin", [Zero1Plugin, FullyShardedPlugin])
@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"max_norm": 0.0}, "max_norm is 0.0; it must be positive"),
        ({"max_norm": -1.0}, "leave it out to clip nothing"),
        ({"bucket_cap_mb": 0.0}, "bucket_cap_mb is 0.0; it must be positive"),
        ({"partition": "odd"}, "partition"),
        ({"optimizer_dtype": torch.int32}, "it must be a floating-point dtype"),
    ],
)
def test_impossible_options_are_refused(plugin, options, words):
    with pytest.raises(ConfigurationError, match=words):
        plugin(**options)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"prefetch": -1}, "prefetch is -1; it must not be negative"),
        ({"persistence_threshold": -1}, "persistence_threshold is -1; it must not be negative"),
        ({"modules": ""}, "matches nothing"),
        ({"modules": ("layers.*", "")}, "matches nothing"),
    ],
)
def test_impossible_options_of_fully_sharded_parameters_are_refused(options, words):
    with pytest.raises(ConfigurationError, match=words):
        FullyShardedPlugin(**options)


def test_the_optimizer_gets_every_option_that_it_has():
    """Neither can forget an option of the other's, and both have the same defaults."""
    options = {
        name: parameter.default
        for name, parameter in inspect.signature(ShardedOptimizer.__init__).parameters.items()
        if parameter.kind is parameter.KEYWORD_ONLY and name not in ("synchronises", "others")
    }
    assert Zero1Plugin().optimizer_options() == {**options, "plugin": "zero1", "title": "ZeRO-1"}
    given = FullyShardedPlugin(max_norm=2.0, overlap=False).optimizer_options()
    assert given.keys() == options.keys()
    assert (given["plugin"], given["title"]) == ("fully_sharded", "fully sharded parameters")
    assert (given["max_norm"], given["overlap"]) == (2.0, False)


class NormalisedSGD(torch.optim.SGD):
    """Divides all gradients by their common norm."""

    def step(self, closure=None):
        gradients = [p.grad for group in self.param_groups for p in group["params"] if p.grad is not None]
        norm = torch.stack([g.norm() for g in gradients]).norm()
        for gradient in gradients:
            gradient.div_(norm)
        return super().step(closure)


@pytest.mark.parametrize(
    ("plugin", "title"),
    [(Zero1Plugin(), "ZeRO-1"), (FullyShardedPlugin(modules="0"), "fully sharded parameters")],
)
@pytest.mark.parametrize(
    ("optimizer", "words"),
    [
        (torch.optim.Adafactor, "is not element-wise, but with {} each rank updates shards of parameters"),
        (NormalisedSGD, "but with {} each rank updates only some of them"),
    ],
)
def test_the_refusal_of_an_optimizer_names_the_strategy(plugin, title, optimizer, words):
    accelerator = NeuronAccelerator(cpu=True, plugins=[plugin])
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 4))
    try:
        with pytest.raises(PlanError) as caught:
            accelerator.prepare(model, optimizer(model.parameters(), lr=0.1))
        assert words.format(title) in str(caught.value)
        assert f"plugin {plugin.spec.name!r}" in str(caught.value)
    finally:
        accelerator.free_memory()


KEEPS_ALL = FullyShardedPlugin(modules="0", persistence_threshold=1000)  # its shards are like those of ZeRO-1


@pytest.mark.parametrize(
    ("plugin", "name"),
    [(Zero1Plugin(), "zero1"), (FullyShardedPlugin(modules="0"), "fully_sharded"), (KEEPS_ALL, "fully_sharded")],
)
def test_errors_about_state_and_weights_name_the_plugin_in_use(plugin, name):
    accelerator = NeuronAccelerator(cpu=True, plugins=[plugin])
    model = torch.nn.Sequential(torch.nn.Linear(4, 4))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    try:
        optimizer.state[model[0].weight]["other"] = torch.ones(3)
        with pytest.raises(UsageError, match="cannot be sharded") as caught:
            accelerator.prepare(model, optimizer)
        assert f"plugin {name!r}" in str(caught.value)
    finally:
        accelerator.free_memory()
    accelerator = NeuronAccelerator(cpu=True, plugins=[plugin])
    model = torch.nn.Sequential(torch.nn.Linear(4, 4))
    try:
        model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
        accelerator.backward(model(torch.ones(2, 4)).sum())
        model[0].weight.data = torch.ones(4, 4, dtype=torch.float64)
        with pytest.raises(UsageError, match=r"expected torch\.float32") as caught:
            optimizer.step()
        assert f"plugin {name!r}" in str(caught.value)
    finally:
        accelerator.free_memory()


@pytest.mark.parametrize("shape", [(3, 4), (16,), (5, 4)])
@pytest.mark.parametrize("plugin", [Zero1Plugin(), FullyShardedPlugin(modules="0"), KEEPS_ALL])
def test_a_weight_of_another_shape_is_an_error(plugin, shape):
    accelerator = NeuronAccelerator(cpu=True, plugins=[plugin])
    model = torch.nn.Sequential(torch.nn.Linear(4, 4))
    try:
        model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
        accelerator.backward(model(torch.ones(2, 4)).sum())
        model[0].weight.data = torch.ones(shape)
        with pytest.raises(UsageError, match=r"expected torch\.float32 \(4, 4\)"):
            optimizer.step()
    finally:
        accelerator.free_memory()


def test_an_option_that_is_gone_names_the_way_round():
    for make in (
        lambda: Zero1Plugin(overlap_gather=True),
        lambda: NeuronAccelerator(config={"plugins": [{"zero1": {"overlap_gather": True}}]}),
    ):
        with pytest.raises(ConfigurationError, match=r"FullyShardedPlugin\(reshard_after_forward=False\)"):
            make()


def test_weights_to_begin_with_are_named_by_one_plugin(tmp_path):
    @dataclass(frozen=True, kw_only=True)
    class Begins(StrategyPlugin):
        spec: ClassVar[PluginSpec] = PluginSpec(name="begins", api_version=4, phase=Phase.LAYOUT)

        def transform_model(self, model, run):
            model.initial_weights["begins"] = tmp_path

    accelerator = NeuronAccelerator(plugins=[Begins(), ModelParallelismPlugin(checkpoint_dir=tmp_path)])
    with pytest.raises(UsageError, match="'begins' and 'model_parallelism' name initial weights"):
        accelerator.prepare(torch.nn.Linear(2, 2))
    accelerator.end_training()
