"""Plugins of version 3 of the contract, kept as they were, do what they did; those of versions 1 and 2 are refused."""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from typing import Any, ClassVar

import pytest
import torch

from neuron_accel import NeuronAccelerator
from neuron_accel.contract import Phase, PluginSpec, StrategyPlugin
from neuron_accel.errors import NeuronAccelError
from neuron_accel.testing import run_ranks
from tests.version_3.averaging import AveragingPlugin
from tests.version_3.finite import FiniteGuard
from tests.version_3.gradient_noise import GradientNoise
from tests.version_3.steady import SteadyPlugin
from tests.version_3.weight_average import WeightAverage

STEPS = 4


def train(plugins: list[Any], scales: list[float], folder: str) -> dict[str, Any]:
    """Trains a step for each of ``scales``, the factor of its loss, and saves and loads after the second."""
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        accelerator = NeuronAccelerator(plugins=plugins)
    torch.manual_seed(0)
    model = torch.nn.Linear(4, 3)
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.05))
    weights, norms = [], []
    for step, scale in enumerate(scales):
        x = torch.randn(2, 4, generator=torch.Generator().manual_seed(10 * step + accelerator.process_index))
        for _ in range(2):
            with accelerator.accumulate(model):
                accelerator.backward(model(x).square().mean() * scale)
                norms.append(float(accelerator.clip_grad_norm_(model.parameters(), 1.0)))
                optimizer.step()
                optimizer.zero_grad()
        weights.append(model.weight.detach().clone())
        if step == 1:
            accelerator.save_state(folder)
            accelerator.load_state(folder)
    noise = [plugin.noise_scale(accelerator.run) for plugin in plugins if hasattr(plugin, "noise_scale")]
    texts = [str(each.message) for each in said if each.category is DeprecationWarning and "version 3" in str(each)]
    accelerator.end_training()
    return {"weights": weights, "norms": norms, "noise": noise, "said": texts}


def test_an_owner_of_gradients_and_its_clients(tmp_path):
    """The guide's owner and its client, and the cookbook's observer, beside the owner of this version and theirs."""
    scales = [1.0, 1.0, 1.0, 1.0]
    (plain, *_) = run_ranks(train, 2, [], scales, str(tmp_path / "plain"))
    for plugins in ([AveragingPlugin()], [SteadyPlugin(factor=50.0)], [AveragingPlugin(), SteadyPlugin(factor=50.0)]):
        (found, *_) = run_ranks(train, 2, plugins, scales, str(tmp_path / f"{len(plugins)}-{plugins[0].spec.name}"))
        assert all(map(torch.allclose, found["weights"], plain["weights"])), plugins
        assert found["norms"] == pytest.approx(plain["norms"])
        assert len(found["said"]) == len(plugins)
        assert "api_version=4 in its spec" in found["said"][0]


def test_a_jump_is_left_out_and_a_step_that_is_not_finite(tmp_path):
    (found, *_) = run_ranks(train, 2, [SteadyPlugin(factor=10.0)], [1.0, 1.0, 1e6, 1.0], str(tmp_path / "steady"))
    assert torch.equal(found["weights"][1], found["weights"][2])
    assert not torch.equal(found["weights"][2], found["weights"][3])
    guard = [FiniteGuard(action="skip"), WeightAverage(decay=0.5)]
    (found, *_) = run_ranks(train, 2, guard, [1.0, 1.0, float("nan"), 1.0], str(tmp_path / "finite"))
    assert torch.equal(found["weights"][1], found["weights"][2])
    assert found["weights"][3].isfinite().all()
    assert len(found["said"]) == 2


def test_what_the_cookbooks_observer_measures_is_the_same(tmp_path):
    from examples.own_plugin.gradient_noise import GradientNoise as Now

    results = [
        run_ranks(train, 2, [plugin(micro_batch_size=2)], [1.0] * 3, str(tmp_path / plugin.__module__))
        for plugin in (GradientNoise, Now)
    ]
    (former, *_), (now, *_) = results
    assert former["noise"] == pytest.approx(now["noise"])
    assert (len(former["said"]), len(now["said"])) == (1, 0)
    assert "Plugin 'gradient_noise'" in former["said"][0]


@dataclass(frozen=True, kw_only=True)
class OfVersion1(StrategyPlugin):
    spec: ClassVar[PluginSpec] = PluginSpec(name="of_version_1", phase=Phase.MEMORY)

    def transform_model(self, model, run, parameters):
        return model

    def transform_scheduler(self, scheduler, run):
        return scheduler


@dataclass(frozen=True, kw_only=True)
class OfVersion2(StrategyPlugin):
    spec: ClassVar[PluginSpec] = PluginSpec(name="of_version_2", phase=Phase.MEMORY)

    def model_init(self, run):
        pass

    def lazy_load(self):
        return True


@dataclass(frozen=True, kw_only=True)
class OfVersion4(StrategyPlugin):
    spec: ClassVar[PluginSpec] = PluginSpec(name="of_version_4", phase=Phase.MEMORY)

    def gradients(self, run):
        pass


@pytest.mark.parametrize(
    ("plugin", "what", "fix"),
    [
        (OfVersion1, "was written for version 1", "get the PreparedModel"),
        (OfVersion2, "was written for version 2", "lazy_load=True) replaces model_init"),
        (OfVersion4, "does not state the version", "api_version=4"),
    ],
)
def test_plugins_that_state_no_version_and_are_not_of_version_3(plugin, what, fix):
    with pytest.raises(NeuronAccelError) as caught:
        NeuronAccelerator(plugins=[plugin()])
    assert what in caught.value.what
    assert fix in caught.value.fix
