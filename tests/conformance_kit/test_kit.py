"""What the kit tries, and its other half: a user's own model under plugins."""

from __future__ import annotations

import importlib.metadata
import inspect
import itertools

import pytest
import torch
from torch import nn

from neuron_accel import ModelParallelismPlugin, Zero1Plugin
from neuron_accel.backends.select import Machine
from neuron_accel.errors import UsageError
from neuron_accel.testing import Training, assert_parallel_equivalence, run_ranks
from neuron_accel.testing._compositions import COMPOSITIONS
from neuron_accel.testing.conformance import _orders
from tests.conformance_kit import test_built_in
from tests.conformance_kit.mutants import HalvesGradients, Unfreezes


def built_in() -> set[str]:
    points = importlib.metadata.entry_points(group="neuron_accel.plugins")
    return {point.name for point in points if point.dist.name == "neuron-accel"}


def test_every_built_in_plugin_is_part_of_a_composition():
    names = {plugin.spec.name for c in COMPOSITIONS.values() if not c.needs for plugin in c.built_in()}
    # The first is there by default, the second is a name for tensor parallelism and pipelines together, the next two
    # need models of transformers, while a plugin's author may train any, and the last composes only with plugins that
    # declare it.
    others = {"data_parallel", "model_parallelism", "flash_attention", "chunked_loss", "fully_sharded"}
    assert names == built_in() - others
    assert COMPOSITIONS["tp2"].beside((ModelParallelismPlugin(tensor_parallel_size=2),)) is None


def test_every_built_in_plugin_goes_through_the_kit(tmp_path):
    classes = [value for name, value in vars(test_built_in).items() if name.startswith("Test")]
    fixtures = [cls.plugin for cls in classes]
    plugins = [getattr(f, "_fixture_function", None) or f.__wrapped__ for f in fixtures]
    given = {"self": None, "tmp_path": tmp_path}
    made = [make(**{name: given[name] for name in inspect.signature(make).parameters}) for make in plugins]
    assert {plugin.spec.name for plugin in made} == built_in()


# ---- a user's own model ----------------------------------------------------------------------------------------------
class Own(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x):
        return (self.second(torch.tanh(self.first(x))) - x).square().mean()


def freeze_first(model):
    model.first.requires_grad_(False)
    return model


BATCH = {"x": torch.linspace(-1, 1, 32).view(4, 8)}


def test_names_options_and_objects():
    assert_parallel_equivalence(Own, [BATCH] * 2, [Zero1Plugin()], training=Training(max_norm=0.1))
    assert_parallel_equivalence(Own, BATCH, [{"zero1": {"partition": "parameters"}}], ranks=1)


def test_another_function_needs_a_reference():
    training = Training(prepare_model=freeze_first)
    with pytest.raises(AssertionError, match=r"weights\[first.weight\]"):
        assert_parallel_equivalence(Own, BATCH, [Unfreezes()], training=training, ranks=1)
    assert_parallel_equivalence(Own, BATCH, [], training=training, reference=freeze_first, ranks=1)


def test_a_difference_is_found():
    with pytest.raises(AssertionError, match="gradients"):
        assert_parallel_equivalence(Own, BATCH, [HalvesGradients()], ranks=1)


def test_batches_that_cannot_be_shared():
    with pytest.raises(Exception, match="Batches of 4 samples cannot be sharded over 3 ranks") as caught:
        assert_parallel_equivalence(Own, BATCH, [], ranks=3)
    assert isinstance(caught.value.__cause__, UsageError)


def prepare_twice():
    from neuron_accel import NeuronAccelerator

    model, steered = Own(), []
    for _ in range(2):
        accelerator = NeuronAccelerator()
        prepared = accelerator.prepare(model)
        with accelerator.run.models[0].module.no_sync():
            steered.append(accelerator.run.prepared(prepared).sync_enabled)
        accelerator.free_memory()
        steered.append("no_sync" in vars(model))
    return steered


def test_a_model_that_is_prepared_again_is_steered_by_its_new_run():
    assert run_ranks(prepare_twice, 1) == [[False, False] * 2]


@pytest.mark.skipif(not Machine().torch_xla, reason="torch_xla is not installed: nox -s xla")
def test_on_xla_ranks():
    assert_parallel_equivalence(Own, BATCH, ["zero1"], backend="xla", timeout=110)
    with pytest.raises(AssertionError, match="weights"):
        assert_parallel_equivalence(Own, BATCH, [], backend="xla", timeout=110, reference=freeze_first)


@pytest.mark.parametrize("count", range(1, 9))
def test_of_each_two_plugins_either_comes_first_in_some_order(count):
    orders = _orders(range(count))
    assert all(sorted(order) == list(range(count)) for order in orders)
    assert len(orders) <= 100
    before = {pair for order in orders for pair in itertools.combinations(order, 2)}
    assert before == set(itertools.permutations(range(count), 2))
