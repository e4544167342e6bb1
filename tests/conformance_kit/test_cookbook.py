"""The plugins of ``examples/own_plugin`` pass the conformance kit, and compute what plain loops compute."""

from __future__ import annotations

import warnings
from typing import ClassVar

import pytest
import torch
from bf16_gradients import BF16Gradients
from block_rates import BlockRates
from freezing import FreezingSchedule
from gradient_noise import GradientNoise
from weight_average import WeightAverage

from neuron_accel import NeuronAccelerator
from neuron_accel.backends.select import Machine
from neuron_accel.contract.events import Observer
from neuron_accel.testing import PluginConformance, RanksError, Tolerance, Training, run_ranks
from neuron_accel.testing._cases import tiny_llama, token_batches
from neuron_accel.testing.parity import loader_of
from neuron_accel.testing.xla_ranks import one_at_a_time
from tests.conformance_kit import cookbook


class Recipe(PluginConformance):
    opt_out: ClassVar = {"test_is_found_by_name": "it is a file of an example, without a distribution"}


class TestGradientNoise(Recipe):
    @pytest.fixture
    def plugin(self):
        return GradientNoise(micro_batch_size=2)


class TestWeightAverage(Recipe):
    @pytest.fixture
    def plugin(self):
        return WeightAverage(decay=0.5)


class TestBlockRates(Recipe):
    train_reference = staticmethod(cookbook.train_with_block_rates)

    @pytest.fixture
    def plugin(self):
        return BlockRates(decay=0.5)


class TestBF16Gradients(Recipe):
    """Rounding to eight bits is a step: an error of float32 upstream of it may grow to one unit of bfloat16."""

    train_reference = staticmethod(cookbook.train_in_bf16)
    tolerance = Tolerance(loss=1e-4, norm=1e-3, gradient=1e-2, weight=2e-2)

    @pytest.fixture
    def plugin(self):
        return BF16Gradients()


class TestFreezingSchedule(Recipe):
    train_reference = staticmethod(cookbook.train_by_schedule)
    steps = 4

    @pytest.fixture
    def plugin(self):
        return FreezingSchedule(until={"*embed*": 1}, after={"model.layers.0.*": 2})


# ---- what each computes ----------------------------------------------------------------------------------------------
TP, SP, ZERO1 = {"tensor_parallel": {"tensor_parallel_size": 2}}, "sequence_parallel", "zero1"
FSDP = {"fully_sharded": {"modules": "*"}}
PP = {"pipeline_parallel": {"pipeline_parallel_size": 2, "num_microbatches": 2}}
STEPS = 3
ON_XLA = pytest.mark.skipif(not Machine().torch_xla, reason="torch_xla is not installed: nox -s xla")


def prepared(plugin, others, backend, *, accumulation=1, seed=0):
    """An accelerator with a tiny Llama, its optimizer and a loader of global micro-batches."""
    config = {"plugins": others, "gradient_accumulation_steps": accumulation}
    accelerator = NeuronAccelerator(plugins=[plugin], config=config | ({"backend": "xla"} if backend == "xla" else {}))
    with one_at_a_time():
        torch.manual_seed(seed)
        model = tiny_llama()
        optimizer = Training().optimizer(model.parameters())
    loader = loader_of(token_batches(STEPS * accumulation), accelerator.data_parallel_size)
    return accelerator, *accelerator.prepare(model, optimizer, loader)


def steps_of(accelerator, model, optimizer, loader, max_norm=None):
    for batch in loader:
        with accelerator.accumulate(model):
            accelerator.backward(model(**batch).loss)
            if max_norm and accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), max_norm)
            optimizer.step()
            optimizer.zero_grad()


def measure_noise(others, accumulation, backend):
    plugin = GradientNoise(micro_batch_size=2, decay=0.5)
    accelerator, model, optimizer, loader = prepared(plugin, others, backend, accumulation=accumulation)
    steps_of(accelerator, model, optimizer, loader, max_norm=0.5)
    return plugin.noise_scale(accelerator.run)


def noise_cases():
    """Other plugins, accumulated micro-batches, ranks, and micro-batches of one batch of the loader."""
    yield pytest.param([TP, SP], 2, 4, 2, "gloo", id="tp2-sp-dp2-accumulation")
    yield pytest.param([ZERO1], 1, 2, 2, "gloo", id="zero1", marks=pytest.mark.slow)
    yield pytest.param([ZERO1], 2, 2, 2, "xla", id="zero1-accumulation-xla", marks=ON_XLA)
    yield pytest.param([PP], 1, 4, 4, "gloo", id="pp2-dp2", marks=pytest.mark.slow)
    yield pytest.param(["fully_sharded"], 1, 2, 2, "gloo", id="fully-sharded", marks=pytest.mark.slow)


@pytest.mark.parametrize(("others", "accumulation", "ranks", "parts", "backend"), list(noise_cases()))
def test_the_noise_scale_is_that_of_every_micro_batch_by_itself(others, accumulation, ranks, parts, backend):
    found = run_ranks(measure_noise, ranks, others, accumulation, backend, backend=backend, timeout=110)
    training = Training(accumulation=accumulation, max_norm=0.5)
    options = {"ranks": parts, "decay": 0.5, "micro_batch_size": 2}
    expected = cookbook.noise_scale(tiny_llama, token_batches(STEPS * accumulation), training, **options)
    assert found == pytest.approx([expected] * ranks, rel=1e-3)  # a difference of norms that are nearly equal


def average_weights(others, backend, folder):
    """The average, its loss on the first batch, and the weights before, within and after the context."""
    plugin = WeightAverage(decay=0.5)
    accelerator, model, optimizer, loader = prepared(plugin, others, backend)
    steps_of(accelerator, model, optimizer, loader)
    if folder:
        accelerator.save_state(folder)
    return read_average(plugin, accelerator, model, loader)


def read_average(plugin, accelerator, model, loader):
    def weights():
        return {name: value.clone() for name, value in accelerator.get_state_dict(model).items()}

    before = weights()
    with plugin.averaged(accelerator.run), torch.no_grad():
        within = weights()
        loss = accelerator.reduce(model(**next(iter(loader))).loss, "mean")
        loss = accelerator.run.backend.to_host(loss).item()  # at once: XLA's ranks here are threads
    after = weights()
    return within, loss, all(torch.equal(before[name], after[name]) for name in before)


def load_average(others, folder):
    plugin = WeightAverage(decay=0.5)
    accelerator, model, _, loader = prepared(plugin, others, "gloo", seed=1)
    accelerator.load_state(folder)
    return read_average(plugin, accelerator, model, loader)


def average_cases():
    yield pytest.param([TP, ZERO1], 4, "gloo", id="tp2-zero1")
    yield pytest.param([PP], 2, "gloo", id="pp2", marks=pytest.mark.slow)
    yield pytest.param([ZERO1], 2, "xla", id="zero1-xla", marks=ON_XLA)


@pytest.mark.parametrize(("others", "ranks", "backend"), list(average_cases()))
def test_the_average_is_the_one_of_torch_and_loads_on_another_mesh(others, ranks, backend, tmp_path):
    folder = str(tmp_path / "checkpoint") if backend == "gloo" else None
    found = [run_ranks(average_weights, ranks, others, backend, folder, backend=backend, timeout=110)[0]]
    if folder:
        found.append(run_ranks(load_average, 2, [ZERO1], folder)[0])
    expected, loss = cookbook.average_of_weights(tiny_llama, token_batches(STEPS), Training(), 0.5)
    for averages, its_loss, restored in found:
        assert restored
        assert its_loss == pytest.approx(loss, rel=1e-5)
        torch.testing.assert_close(averages, expected, rtol=1e-4, atol=1e-5)


def with_a_scheduler(others, when, save_to=None, load_from=None):
    """The weights after steps with a scheduler made before or after `prepare`, and what it has warned of. The run that
    saves does so before its last step, which the run that loads takes."""
    accelerator = NeuronAccelerator(plugins=[BlockRates(decay=0.5)], config={"plugins": others})
    torch.manual_seed(1 if load_from else 0)
    model = tiny_llama()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    if when == "before":
        scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
        model, optimizer, scheduler = accelerator.prepare(model, optimizer, scheduler)
    else:
        model, optimizer = accelerator.prepare(model, optimizer)
        scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
    if load_from:
        accelerator.load_state(load_from)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for step, batch in enumerate(token_batches(STEPS)):
            if load_from and step < STEPS - 1:
                continue
            if save_to and step == STEPS - 1:
                accelerator.save_state(save_to)
            accelerator.backward(model(**batch).loss)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
    said = [str(warning.message) for warning in caught if "scheduler" in str(warning.message)]
    return accelerator.get_state_dict(model), said


def by_hand():
    scheduler = None

    def optimizer(model):
        nonlocal scheduler
        made = torch.optim.SGD(cookbook.llama_groups(model, 0.1, 0.5), momentum=0.9)
        scheduler = torch.optim.lr_scheduler.ExponentialLR(made, 0.5)
        return made

    step = {"optimizer": optimizer, "after": lambda model, steps: scheduler.step()}
    return cookbook.train(tiny_llama, token_batches(STEPS), Training(), lambda model: model, **step).weights


@pytest.mark.parametrize("when", ["before", pytest.param("after", marks=pytest.mark.slow)])
def test_blocks_follow_a_scheduler_and_go_on_from_a_checkpoint(when, tmp_path):
    others, folder, expected = [TP, ZERO1], str(tmp_path / "checkpoint"), by_hand()
    found = [run_ranks(with_a_scheduler, 2, others, when, folder)[0]]
    if when == "before":
        found.append(run_ranks(with_a_scheduler, 1, [ZERO1], when, None, folder)[0])
    for weights, said in found:
        assert not said
        torch.testing.assert_close(weights, expected, rtol=1e-4, atol=1e-5)


class Bytes(Observer):
    """Adds up what this rank sends to be summed."""

    categories = frozenset({"collective"})

    def __init__(self):
        self.sent = 0

    def begin(self, event):
        self.sent += event.sent if "reduce" in event.name else 0


def bytes_of_gradients(plugins, others):
    """What a backward pass of two linear layers sends, and the gradient of the first one's weight."""
    accelerator = NeuronAccelerator(plugins=plugins, config={"plugins": others})
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(16, 64), torch.nn.Linear(64, 16))
    model, _ = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    x = torch.randn(4, 16, generator=torch.Generator().manual_seed(accelerator.process_index))
    loss, counted = model(x).square().mean(), Bytes()
    remove = accelerator.run.events.observe(counted)
    accelerator.backward(loss)
    remove()
    return counted.sent, accelerator.get_gradients(model)["0.weight"]


@pytest.mark.parametrize(
    "others",
    [
        pytest.param([], id="dp"),
        pytest.param([ZERO1], id="zero1"),
        pytest.param([FSDP], id="fully-sharded", marks=pytest.mark.slow),
    ],
)
def test_gradients_take_half_of_the_bytes_and_are_rounded_once_and_their_sum_once_more(others):
    (wide, exact), *_ = run_ranks(bytes_of_gradients, 2, [], others)
    (narrow, found), *_ = run_ranks(bytes_of_gradients, 2, [BF16Gradients(keep=("*.bias",))], others)
    assert narrow == pytest.approx(wide / 2, rel=0.1)  # biases keep theirs
    assert torch.equal(found, found.bfloat16().float())
    assert not torch.equal(found, exact)
    torch.testing.assert_close(found, exact, rtol=2**-7, atol=2e-4)


def test_two_dtypes_on_one_wire_are_refused():
    with pytest.raises(RanksError, match="cannot be sent in two dtypes"):
        run_ranks(bytes_of_gradients, 2, [BF16Gradients()], [{"zero1": {"higher_cc_precision": True}}])
