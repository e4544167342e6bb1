"""What a loop does around the parameters of a model has the effect that it has in one process."""

from __future__ import annotations

import copy
import functools
import pickle
from dataclasses import dataclass, replace
from typing import ClassVar

import pytest
import torch
from torch import nn

from neuron_accel.contract import AxisKind, AxisSpec, Cut, Layout, Phase, PluginSpec, StrategyPlugin
from neuron_accel.errors import NeuronAccelError, UsageError
from neuron_accel.testing import RanksError, run_ranks
from tests.distributed.models import llama

COMPOSITIONS = {
    "data_parallel": [],
    "zero1": [{"zero1": {"bucket_cap_mb": 1e-4}}],
    "fully_sharded": [{"fully_sharded": {"modules": "0"}}],
}


def net():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 11), nn.Tanh(), nn.Linear(11, 5))


def batches(accelerator, count):
    generator = torch.Generator().manual_seed(5)
    size, rank = accelerator.data_parallel_size, accelerator.data_parallel_rank
    for _ in range(count):
        yield torch.randn(8, 6, generator=generator).chunk(size)[rank].to(accelerator.device)


def cached_gradients(accelerator):
    """GradCache: a hook of a backward pass runs the passes of the micro-batches, each of which uses every weight."""
    model = net()
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.5))

    def inner(parts, gradient):
        with torch.enable_grad():
            for part in parts:
                (model(part).square().mean() / len(parts) * gradient).backward()

    for leaf in (True, False):
        for x in batches(accelerator, 1):
            loss = torch.zeros((), requires_grad=True)
            loss.register_hook(functools.partial(inner, x.split(2)))
            accelerator.backward(loss if leaf else loss * 1.0)
            accelerator.clip_grad_norm_(model.parameters(), 0.5)
            optimizer.step()
            optimizer.zero_grad()
    return accelerator.get_state_dict(model)


def trained(accelerator, model, optimizer):
    for x in batches(accelerator, 3):
        accelerator.backward(model(x).square().mean())
        optimizer.step()
        optimizer.zero_grad()
    return accelerator.get_state_dict(model)


def halve(parameter):
    parameter.grad.mul_(0.5)


def hooks_registered_after_prepare(accelerator):
    """They see the gradient of this rank's samples, before it is reduced."""
    model = net()
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.5))
    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(halve)
    return trained(accelerator, model, optimizer)


FORMS = {"cached gradients": cached_gradients, "hooks registered after prepare": hooks_registered_after_prepare}


def loops(plugins):
    from neuron_accel import NeuronAccelerator

    return {name: form(NeuronAccelerator(config={"plugins": plugins})) for name, form in FORMS.items()}


@functools.cache
def alone():
    return run_ranks(loops, 1, [])[0]


@pytest.mark.parametrize("composition", COMPOSITIONS)
def test_loops_train_as_in_one_process(composition):
    found = run_ranks(loops, 2, COMPOSITIONS[composition])[0]
    for name, weights in alone().items():
        for key, value in weights.items():
            torch.testing.assert_close(found[name][key], value, rtol=1e-4, atol=1e-6, msg=lambda m, n=name: f"{n}: {m}")


# ---- gradients that a loop assigns -----------------------------------------------------------------------------------
def assigned_gradients(plugins, reduces):
    from neuron_accel import NeuronAccelerator

    accelerator = NeuronAccelerator(config={"plugins": plugins})
    model = net()
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.5))
    trained(accelerator, model, optimizer)
    parameters = list(model.parameters())
    for x in batches(accelerator, 3):
        gradients = torch.autograd.grad(model(x).square().mean(), parameters)
        for parameter, gradient in zip(parameters, gradients, strict=True):
            parameter.grad = accelerator.reduce(gradient, reduction="mean") if reduces else gradient
        accelerator.clip_grad_norm_(parameters, 0.5)
        optimizer.step()
        optimizer.zero_grad()
    return accelerator.get_state_dict(model)


@pytest.mark.parametrize("composition", ["data_parallel", "zero1"])
def test_assigned_gradients_are_reduced_or_refused(composition):
    plugins = COMPOSITIONS[composition]
    alone, found = run_ranks(assigned_gradients, 1, [], False)[0], run_ranks(assigned_gradients, 2, plugins, True)
    for state in found:
        for key, value in alone.items():
            torch.testing.assert_close(state[key], value, rtol=1e-4, atol=1e-6)
    with pytest.raises(
        RanksError, match=r"that no backward pass has reduced differ[\s\S]*accelerator\.reduce"
    ) as raised:
        run_ranks(assigned_gradients, 2, plugins, False)
    assert len(raised.value.errors) == 2


def test_fully_sharded_weights_have_no_gradients_to_assign():
    with pytest.raises(RanksError, match="used outside of the forward and backward pass of its module, by `grad`"):
        run_ranks(assigned_gradients, 2, COMPOSITIONS["fully_sharded"], True)


def own_gradients_of_shards():
    """Each rank has its own elements of a parameter, and assigns their gradient."""
    from neuron_accel import NeuronAccelerator

    accelerator = NeuronAccelerator(plugins=[OwnShards()])
    model = nn.Linear(4, 4, bias=False)
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=1.0))
    before = model.weight.detach().clone()
    model.weight.grad = torch.full_like(model.weight, accelerator.process_index + 1.0)
    optimizer.step()
    return float((before - model.weight.detach()).mean())


@dataclass(frozen=True, kw_only=True)
class OwnShards(StrategyPlugin):
    """Shards rows of a linear layer over the data-parallel ranks, as experts are."""

    spec: ClassVar[PluginSpec] = PluginSpec(name="own_shards", phase=Phase.LAYOUT, api_version=4)

    def axes(self):
        return (AxisSpec(name="rows", degree=2, kind=AxisKind.DATA),)

    def transform_model(self, model, run):
        layer, cut = model.module, Cut(dim=0, axis="rows", degree=2, size=4)
        layout = replace(Layout.of(layer.weight), cuts=(cut,))
        model.parameters.set_layout("weight", layout)
        layer.weight = nn.Parameter(layout.shard(layer.weight.detach(), run.coordinates))


def test_gradients_of_shards_of_ones_own_are_not_compared():
    assert run_ranks(own_gradients_of_shards, 2) == pytest.approx([1.0, 2.0])


# ---- copies ----------------------------------------------------------------------------------------------------------
def moving_average(plugins, mixed_precision):
    """An average of weights in a copy of the model, and what the copy computes with it."""
    from neuron_accel import NeuronAccelerator

    accelerator = NeuronAccelerator(config={"plugins": plugins}, mixed_precision=mixed_precision)
    torch.manual_seed(0)
    model = llama()
    model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=0.1))
    batch = dict.fromkeys(["input_ids", "labels"], torch.arange(8).repeat(2, 1))
    average = copy.deepcopy(model).eval()
    accelerator.backward(model(**batch).loss)
    optimizer.step()
    with torch.no_grad():
        for mean, weight in zip(average.parameters(), model.parameters(), strict=True):
            mean.lerp_(weight, 0.5)
        losses = [float(average(**batch).loss), float(model.eval()(**batch).loss)]
    refused = None
    try:
        pickle.dumps(average)
    except NeuronAccelError as error:
        refused = str(error)
    return losses, refused


@pytest.mark.parametrize("mixed_precision", [None, "bf16"])
@pytest.mark.parametrize(
    "plugins",
    [
        [{"model_parallelism": {"tensor_parallel_size": 2}}],
        [{"model_parallelism": {"tensor_parallel_size": 2}}, "sequence_parallel"],
        [{"model_parallelism": {"pipeline_parallel_size": 2}}],
    ],
    ids=["tp2", "sp2", "pp2"],
)
def test_a_copy_computes_with_its_own_weights(plugins, mixed_precision):
    (expected, refused), tolerance = run_ranks(moving_average, 1, [], None)[0], 2e-2 if mixed_precision else 1e-5
    assert abs(expected[0] - expected[1]) > 0.05
    assert refused is None
    for losses, refused in run_ranks(moving_average, 2, plugins, mixed_precision):
        assert losses == pytest.approx(expected, rel=tolerance)
        assert "cannot be pickled" in refused


def copies_of_a_pipeline(virtual_stages):
    from neuron_accel import NeuronAccelerator

    options = {"pipeline_parallel_size": 2, "num_microbatches": 2, "virtual_stages": virtual_stages}
    options["schedule"] = "1f1b" if virtual_stages == 1 else "interleaved"
    accelerator = NeuronAccelerator(config={"plugins": [{"model_parallelism": options}]})
    model = llama(blocks=4)
    model, _ = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    batch = dict.fromkeys(["input_ids", "labels"], torch.arange(8).repeat(2, 1))
    copied, said = copy.deepcopy(model), []
    with torch.no_grad():
        for weight in copied.parameters():
            weight.mul_(0.5)
    for mode in (True, False):
        try:
            loss = copied.train(mode)(**batch).loss
        except UsageError as error:
            said.append(str(error))
    if virtual_stages == 1:  # as the error says
        model.load_state_dict(copied.state_dict())
        assert torch.equal(model.eval()(**batch).loss, loss)
    return said


def test_a_copy_of_a_pipeline_is_evaluated_only():
    for (said,) in run_ranks(copies_of_a_pipeline, 2, 1):
        assert "it was not prepared" in said
    for said in run_ranks(copies_of_a_pipeline, 2, 2):
        assert ["one of this rank's stages" in each for each in said] == [True, True]


# ---- hooks that a strategy would lose --------------------------------------------------------------------------------
TENSOR_PARALLEL = {
    "tp2": [{"model_parallelism": {"tensor_parallel_size": 2}}],
    "tp2+sp": [{"model_parallelism": {"tensor_parallel_size": 2}}, "sequence_parallel"],
}


def hooks_registered_before_prepare(plugins):
    from neuron_accel import NeuronAccelerator

    accelerator, seen = NeuronAccelerator(config={"plugins": plugins}), []
    model = llama()
    embeddings = model.get_input_embeddings().weight
    mask = torch.ones(len(embeddings), 1)
    mask[:48] = 0
    embeddings.register_hook(lambda gradient: gradient * mask)
    embeddings.register_hook(lambda gradient: seen.append(gradient.norm().item()))
    embeddings.register_hook(lambda gradient: gradient * 1000).remove()
    norm = model.model.norm.weight
    norm.register_hook(lambda gradient: gradient.clamp(-1e-3, 1e-3))
    removed = [p.register_hook(torch.zeros_like) for p in (model.lm_head.weight, norm)]
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.5))
    for handle in removed:
        handle.remove()
    ids = torch.randint(0, 96, (4, 12), generator=torch.Generator().manual_seed(0))
    for _ in range(2):
        accelerator.backward(model(input_ids=ids, labels=ids).loss)
        optimizer.step()
        optimizer.zero_grad()
    return seen, accelerator.get_state_dict(model)


@functools.cache
def hooked_alone():
    return run_ranks(hooks_registered_before_prepare, 1, [])[0]


@pytest.mark.parametrize("composition", TENSOR_PARALLEL)
def test_hooks_registered_before_prepare_see_full_gradients(composition):
    seen, weights = run_ranks(hooks_registered_before_prepare, 2, TENSOR_PARALLEL[composition])[0]
    expected, plain = hooked_alone()
    assert seen == pytest.approx(expected, rel=1e-4)
    for key, value in plain.items():
        torch.testing.assert_close(weights[key], value, rtol=1e-4, atol=1e-5, msg=lambda m, k=key: f"{k}: {m}")


# ---- what joins later ------------------------------------------------------------------------------------------------
def joins_later():
    from neuron_accel import NeuronAccelerator

    accelerator, model = NeuronAccelerator(), net()
    model = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.5))[0]
    assert model.module is model  # as a DistributedDataParallel has one
    assert model.device.type == accelerator.device.type
    said, kept = [], model[2].weight
    for join in (
        lambda: setattr(model[2], "weight", nn.Parameter(model[2].weight.detach().clone())),
        lambda: setattr(model, "2", nn.Sequential(model[2], nn.Linear(5, 5))),
        lambda: model[2][1].requires_grad_(False),
    ):
        model.zero_grad()
        join()
        try:
            model(next(batches(accelerator, 1)))
            said.append(None)
        except UsageError as error:
            said.append(str(error))
            if isinstance(model[2], nn.Linear):
                model[2].weight = kept
    accelerator.free_memory()
    assert not hasattr(model, "module")
    assert not hasattr(model, "device")  # another run may have another one
    return said


def test_a_parameter_that_joins_later_is_refused_by_name():
    replaced, added, frozen = run_ranks(joins_later, 2)[0]
    assert replaced.startswith("'2.weight' is a parameter that was added")
    assert "2.1.weight" in added
    assert frozen is None


# ---- what is refused -------------------------------------------------------------------------------------------------
def refused(plugins):
    from neuron_accel import NeuronAccelerator

    accelerator, model = NeuronAccelerator(config={"plugins": plugins}), net()
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.5))
    said = []
    with pytest.raises(UsageError) as caught:
        accelerator.backward(model(next(batches(accelerator, 1))).square().mean(), create_graph=True)
    said.append(str(caught.value))

    def converted():
        accelerator.backward(model.double()(next(batches(accelerator, 1)).double()).square().mean())
        optimizer.step()

    with pytest.raises(NeuronAccelError) as caught:
        converted()
    return [*said, str(caught.value)]


@pytest.mark.parametrize("composition", ["data_parallel", "zero1"])
def test_what_cannot_be_right_is_refused_by_name(composition):
    graph, converted = run_ranks(refused, 2, COMPOSITIONS[composition])[0]
    assert "create_graph" in graph
    assert "float64" in converted
