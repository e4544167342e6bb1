"""Weights that are gathered while the next step begins are waited for where they are used."""

from __future__ import annotations

import contextlib
import copy

import pytest
import torch
from packaging.version import Version
from torch import nn

from neuron_accel.testing import assert_parallel_equivalence, run_ranks
from neuron_accel.testing.parity import Training
from tests.distributed.models import llama, token_batches
from tests.guests import guards

DELAY, COMPUTE = 3.0, 1.0
"""What a bucket takes on the network, and a block in its forward pass, on a clock that nothing but these moves."""


class Block(nn.Module):
    """Its parameters are used by an LSTM, which keeps a list of them, and without a call of the layer that has them."""

    def __init__(self):
        super().__init__()
        self.recurrent, self.layer = nn.LSTM(8, 8, batch_first=True), nn.Linear(8, 8)
        self.tick = lambda: None

    def forward(self, x):
        self.tick()
        return x + nn.functional.linear(self.recurrent(x)[0], self.layer.weight, self.layer.bias)


class Model(nn.Module):
    def __init__(self, blocks=4):
        super().__init__()
        self.first, self.blocks = nn.Linear(8, 8), nn.ModuleList(Block() for _ in range(blocks))
        self.head = nn.Linear(8, 1)
        self.head_bias = [self.head.bias]

    def forward(self, x):
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
        return (x @ self.head.weight.t() + self.head_bias[0]).square().mean()


class Network:
    """Delays the all-gathers of a backend on a clock: one after another, and their result is not written before."""

    def __init__(self, backend):
        self.now, self.free, self.waiting = 0.0, 0.0, 0
        self._start, backend.start_all_gather_into = backend.start_all_gather_into, self.start

    def start(self, out, tensor, group):
        sent, pending = tensor.clone(), torch.empty_like(out)
        work = self._start(pending, sent, group)
        self.free = ready = max(self.now, self.free) + DELAY
        self.waiting += 1
        network = self

        class Delayed:
            def wait(self):
                network.now, network.waiting = max(network.now, ready), network.waiting - 1
                work.wait()
                with torch.no_grad():
                    out.copy_(pending)
                return out

        return Delayed()


def prepare(overlap_gather, plugins=(), delayed=True, seed=0):
    from neuron_accel import NeuronAccelerator, Zero1Plugin

    accelerator = NeuronAccelerator(
        plugins=[Zero1Plugin(overlap_gather=overlap_gather, bucket_cap_mb=0.0005), *plugins]
    )
    torch.manual_seed(seed)
    model = Model()
    model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=0.05))
    return accelerator, model, optimizer, Network(accelerator.run.backend) if delayed else None


def batches(rank, count=4):
    generator = torch.Generator().manual_seed(rank)
    return [torch.randn(2, 3, 8, generator=generator) for _ in range(count)]


def step(accelerator, model, optimizer, x):
    loss = model(x)
    accelerator.backward(loss)
    optimizer.step()
    optimizer.zero_grad()
    return loss.item()


# ---- the same training, sooner ---------------------------------------------------------------------------------------
def train(overlap_gather):
    accelerator, model, optimizer, network = prepare(overlap_gather)
    for block in model.blocks:
        block.tick = lambda: setattr(network, "now", network.now + COMPUTE)
    losses, waiting = [], []
    with accelerator.run.backend.record() as traffic:
        for x in batches(accelerator.process_index):
            losses.append(step(accelerator, model, optimizer, x))
            waiting.append(network.waiting)
    buckets = len(optimizer.optimizer.shards)
    time = network.now
    return losses, accelerator.get_state_dict(model), time, waiting, traffic.sent(), buckets


def test_training_is_the_same_and_communication_is_hidden():
    for at_once, overlapping in zip(run_ranks(train, 2, False), run_ranks(train, 2, True), strict=True):
        torch.testing.assert_close(overlapping[:2], at_once[:2], rtol=0, atol=0)
        *_, time, none, sent, buckets = at_once
        *_, shorter, waiting, sent_too, _ = overlapping
        assert sent_too == sent
        assert none == [0] * 4
        assert waiting == [buckets] * 4
        assert time == 4 * (buckets * DELAY + 4 * COMPUTE)
        # In all steps but the first, all blocks but the last compute while weights of others travel. After the last
        # step nothing has been waited for.
        assert shorter == 3 * (buckets * DELAY + COMPUTE) + 4 * COMPUTE


# ---- what reads weights before the next forward pass -----------------------------------------------------------------
def _values(accelerator, model, optimizer):
    return [p.detach().clone() for p in model.parameters()]


def _state_dict(accelerator, model, optimizer):
    return {name: value.clone() for name, value in model.state_dict().items()}


def _get_state_dict(accelerator, model, optimizer):
    return accelerator.get_state_dict(model)


def _unwrapped(accelerator, model, optimizer):
    return [p.detach().clone() for p in accelerator.unwrap_model(model).parameters()]


def _attribute(accelerator, model, optimizer):
    return model.blocks[3].layer.weight.detach().clone(), model.blocks[1].recurrent.weight_hh_l0.detach().clone()


def _copied(accelerator, model, optimizer):
    return [p.detach().clone() for p in copy.deepcopy(accelerator.unwrap_model(model)).parameters()]


def _averaged(accelerator, model, optimizer):
    from torch.optim.swa_utils import AveragedModel

    averaged = AveragedModel(accelerator.unwrap_model(model))
    step(accelerator, model, optimizer, torch.ones(2, 3, 8))
    averaged.update_parameters(model)
    return [p.detach().clone() for p in averaged.parameters()]


def _evaluated(accelerator, model, optimizer):
    model.eval()
    with torch.no_grad():
        return model(torch.ones(2, 3, 8))


def _part(accelerator, model, optimizer):
    with torch.no_grad():
        return model.blocks[2].recurrent(torch.ones(2, 3, 8))[0], model.blocks[3](torch.ones(2, 3, 8))


def _functional(accelerator, model, optimizer):
    module = accelerator.unwrap_model(model)
    return torch.func.functional_call(module, dict(module.named_parameters()), (torch.ones(2, 3, 8),)).detach()


def _edited(accelerator, model, optimizer):
    with torch.no_grad():
        model.head.weight.mul_(2)
    model.first.bias.data = torch.ones(8)
    step(accelerator, model, optimizer, torch.ones(2, 3, 8))
    return accelerator.get_state_dict(model)


def _optimizers_state(accelerator, model, optimizer):
    saved = copy.deepcopy(optimizer.state_dict())
    step(accelerator, model, optimizer, torch.ones(2, 3, 8))
    optimizer.load_state_dict(saved)
    step(accelerator, model, optimizer, torch.ones(2, 3, 8))
    return accelerator.get_state_dict(model)


def _frozen(accelerator, model, optimizer):
    model.blocks[0].requires_grad_(False)
    step(accelerator, model, optimizer, torch.ones(2, 3, 8))
    model.blocks[0].requires_grad_(True)
    step(accelerator, model, optimizer, torch.ones(2, 3, 8))
    return accelerator.get_state_dict(model)


def _released(accelerator, model, optimizer):
    references = list(model.parameters())
    accelerator.free_memory()
    assert all(type(module._parameters) is dict for module in model.modules())
    return [p.detach().clone() for p in references]


READERS = [_values, _state_dict, _get_state_dict, _unwrapped, _attribute, _copied, _averaged, _evaluated, _part]
READERS += [_functional, _edited, _optimizers_state, _frozen, _released]


def read(overlap_gather, readers):
    found = []
    for reader in readers:
        accelerator, model, optimizer, network = prepare(overlap_gather)
        for x in batches(accelerator.process_index, 2):
            step(accelerator, model, optimizer, x)
        assert network.waiting == (len(optimizer.optimizer.shards) if overlap_gather else 0)
        found.append(reader(accelerator, model, optimizer))
        accelerator.free_memory()
    return found


def test_what_reads_weights_sees_those_that_were_gathered():
    expected, found = run_ranks(read, 2, False, READERS), run_ranks(read, 2, True, READERS)
    for theirs, mine in zip(expected, found, strict=True):
        for reader, one, other in zip(READERS, theirs, mine, strict=True):
            torch.testing.assert_close(other, one, rtol=0, atol=0, msg=lambda text, r=reader: f"{r.__name__}: {text}")


def save_and_load(overlap_gather, folder):
    accelerator, model, optimizer, network = prepare(overlap_gather)
    data = batches(accelerator.process_index)
    step(accelerator, model, optimizer, data[0])
    accelerator.save_state(folder)
    expected = accelerator.get_state_dict(model)
    step(accelerator, model, optimizer, data[1])
    assert network.waiting == (len(optimizer.optimizer.shards) if overlap_gather else 0)
    accelerator.load_state(folder)
    loaded = accelerator.get_state_dict(model)
    torch.testing.assert_close(loaded, expected, rtol=0, atol=0)
    step(accelerator, model, optimizer, data[1])
    return accelerator.get_state_dict(model)


def test_checkpoints(tmp_path):
    expected = run_ranks(save_and_load, 2, False, str(tmp_path / "at once"))
    found = run_ranks(save_and_load, 2, True, str(tmp_path / "overlapping"))
    torch.testing.assert_close(found, expected, rtol=0, atol=0)


# ---- beside other strategies, against one process --------------------------------------------------------------------
TP, OVERLAPPING = {"tensor_parallel": {"tensor_parallel_size": 2}}, {"zero1": {"overlap_gather": True}}
COMPOSITIONS = {
    "dp2": (2, [OVERLAPPING], 1),
    "accumulates": (2, [OVERLAPPING], 2),
    "tp2-dp2": (4, [TP, OVERLAPPING], 1),
    "tp2-sp-dp2-recomputes": (4, [TP, "sequence_parallel", "activation_checkpointing", OVERLAPPING], 2),
    "pp2-dp2": (4, [{"pipeline_parallel": {"pipeline_parallel_size": 2, "num_microbatches": 2}}, OVERLAPPING], 1),
    "guards": (2, [OVERLAPPING, *guards("finite_guard", "replica_check", "sum_check")], 1),
}


@pytest.mark.parametrize("composition", COMPOSITIONS)
def test_trains_like_one_process(composition):
    ranks, plugins, accumulation = COMPOSITIONS[composition]
    training = Training(max_norm=0.5, accumulation=accumulation)
    batches = token_batches(3 * accumulation, size=8)
    assert_parallel_equivalence(llama, batches, plugins, ranks=ranks, training=training)


def two_models():
    """Two models in turn, of which one is used twice and generates text in between."""
    from neuron_accel import NeuronAccelerator, Zero1Plugin

    results = []
    for overlap_gather in (False, True):
        accelerator = NeuronAccelerator(plugins=[Zero1Plugin(overlap_gather=overlap_gather, bucket_cap_mb=0.01)])
        torch.manual_seed(0)
        models = [llama(), llama()]
        optimizers = [torch.optim.AdamW(model.parameters(), lr=1e-2) for model in models]
        *models, one, other = accelerator.prepare(*models, *optimizers)
        batch, texts = token_batches(1, size=2)[0], []
        for _ in range(2):
            for model, optimizer in zip(models, (one, other), strict=True):
                accelerator.backward(model(**batch).loss + models[0](**batch).loss)
                optimizer.step()
                optimizer.zero_grad()
                one.zero_grad()
            texts.append(accelerator.unwrap_model(models[0]).generate(batch["input_ids"][:, :4], max_new_tokens=3))
        results.append(([accelerator.get_state_dict(model) for model in models], texts))
        accelerator.free_memory()
    torch.testing.assert_close(results[1], results[0], rtol=0, atol=0)


def test_two_models_and_generated_text():
    run_ranks(two_models, 2)


# ---- where weights are not awaited -----------------------------------------------------------------------------------
def of_a_third_party(*provides):
    from neuron_accel.contract import Phase, PluginSpec, StrategyPlugin

    class OfAThirdParty(StrategyPlugin):
        spec = PluginSpec(name="of_a_third_party", phase=Phase.OPTIMIZER, provides=frozenset(provides))

    return OfAThirdParty()


def count_waiting(kind):
    plugins = []
    if kind == "a plugin that does not say when it reads weights":
        plugins = [of_a_third_party("gathered-weights")]
    if kind == "a plugin that reads weights in passes":
        plugins = [of_a_third_party("weights-in-passes")]
    if kind == "guards":
        from neuron_accel_guards import FiniteGuard, RecompileGuard

        plugins = [FiniteGuard(), RecompileGuard()]
    if kind == "replica check":
        from neuron_accel_guards import ReplicaCheck

        plugins = [ReplicaCheck()]
    accelerator, model, optimizer, network = prepare(True, plugins)
    if kind == "compiled":
        model.blocks[0].compile(backend="eager")
    for x in batches(accelerator.process_index, 2):
        step(accelerator, model, optimizer, x)
    return network.waiting


@pytest.mark.parametrize("kind", ["a plugin that reads weights in passes", *guards("guards")])
def test_plugins_that_read_weights_in_passes_leave_it_on(kind):
    assert min(run_ranks(count_waiting, 2, kind)) > 0


@pytest.mark.parametrize(
    "kind", [*guards("replica check"), "compiled", "a plugin that does not say when it reads weights"]
)
def test_weights_are_gathered_at_the_end_of_the_step(kind):
    assert run_ranks(count_waiting, 2, kind) == [0, 0]


def compile_later():
    accelerator, model, optimizer, _ = prepare(True)
    step(accelerator, model, optimizer, torch.ones(2, 3, 8))
    compiled = torch.compile(model, backend="eager")(torch.ones(2, 3, 8))
    torch.testing.assert_close(compiled, model(torch.ones(2, 3, 8)))


def test_a_model_that_is_compiled_later_waits_or_is_refused():
    """From torch 2.15 on, Dynamo does not trace a hook that raises an error, and calls it instead."""
    from neuron_accel.testing import RanksError

    refused = pytest.raises(RanksError, match="cannot be compiled later")
    with contextlib.nullcontext() if Version(torch.__version__) >= Version("2.15.dev0") else refused:
        run_ranks(compile_later, 2)


def test_fully_sharded_refuses_it():
    from neuron_accel import FullyShardedPlugin
    from neuron_accel.errors import ConfigurationError

    with pytest.raises(ConfigurationError, match="overlap_gather is an option of ZeRO-1"):
        FullyShardedPlugin(overlap_gather=True)
