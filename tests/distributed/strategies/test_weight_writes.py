"""Whatever way a loop writes to weights, training goes on from what it has written, as in one process."""

from __future__ import annotations

import functools

import pytest
import torch
from torch import nn

from neuron_accel.testing import RanksError, run_ranks
from tests.distributed.strategies.test_gradient_edits import batches, full_weights

no_grad = torch.no_grad()


def load(layer, tensor):
    layer.load_state_dict({"weight": tensor, "bias": layer.bias.detach()})


WRITES = {
    "nothing": lambda layer: None,
    "load_state_dict": lambda layer: load(layer, torch.full_like(layer.weight, 0.25)),
    "init": lambda layer: nn.init.constant_(layer.weight, 0.25),
    "zero": no_grad(lambda layer: layer.weight.zero_()),
    "rows": no_grad(lambda layer: layer.weight.__setitem__(slice(2), 0)),
    "data": lambda layer: layer.weight.data.zero_(),
    "data of rows": lambda layer: layer.weight.data[:2].fill_(0.5),
    "clamped": lambda layer: layer.weight.data.clamp_(-0.1, 0.1),
    "detached": lambda layer: layer.weight.detach().mul_(0.5),
    "view": no_grad(lambda layer: layer.weight.view(-1)[:3].zero_()),
    "copied": lambda layer: layer.weight.data.copy_(layer.weight.data * 0.5),
    "foreach": lambda layer: torch._foreach_mul_([layer.weight.data], 0.5),
    "lerp": no_grad(lambda layer: layer.weight.lerp_(torch.ones_like(layer.weight), 0.5)),
    "out": no_grad(lambda layer: torch.mul(layer.weight, 0.5, out=layer.weight)),
    "assigned": lambda layer: setattr(layer.weight, "data", layer.weight.data * 0.5),
}
COMPOSITIONS = {
    "zero1": ["zero1"],
    "zero1, parameters": [{"zero1": {"partition": "parameters"}}],
    "data parallel": [],
}


FULL = {
    "zero1": ["zero1"],
    "stage 3": [{"fully_sharded": {"modules": "layers.*"}}],
    "stage 2": [{"fully_sharded": {"modules": "layers.*", "reshard_after_forward": False}}],
    "kept": [{"fully_sharded": {"modules": "layers.*", "persistence_threshold": 10}}],
}


class Layers(nn.Module):
    """A layer for each way to write."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(6, 5) for _ in WRITES)

    def forward(self, x):
        return sum(layer(x).square().float().mean() for layer in self.layers)


def written(plugins, dtype, lr):
    """The weights after a step, a write, a checkpoint, and another step."""
    from neuron_accel import NeuronAccelerator

    accelerator = NeuronAccelerator(config={"plugins": plugins})
    model = Layers().to(dtype)
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=lr, momentum=0.9))
    for x in batches(accelerator, 2):
        accelerator.backward(model(x.to(dtype)))
        optimizer.step()
        optimizer.zero_grad()
        for write, layer in zip(WRITES.values(), model.layers, strict=True):
            write(layer)
    accelerator.backward(model(x.to(dtype)))
    optimizer.step()
    return dict(zip(WRITES, full_weights(accelerator, model)[::2], strict=True))


@functools.cache
def in_one_process(dtype, lr):
    return run_ranks(written, 1, [], dtype, lr)[0]


@pytest.mark.parametrize("name", COMPOSITIONS)
def test_every_way_to_write_a_weight_counts(name):
    for dtype, lr, tolerance in [(torch.float32, 0.1, 1e-6), (torch.bfloat16, 1e-2, 1e-2)]:
        for found in run_ranks(written, 2, COMPOSITIONS[name], dtype, lr):
            torch.testing.assert_close(found, in_one_process(dtype, lr), rtol=tolerance, atol=tolerance)


def kept_precision(plugins):
    """How far a weight gets by updates too small for bf16, while another one is written to."""
    from neuron_accel import NeuronAccelerator

    accelerator = NeuronAccelerator(config={"plugins": plugins})
    model = nn.Linear(4, 4, bias=False, dtype=torch.bfloat16)
    nn.init.ones_(model.weight)
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=1e-3))
    for _ in range(8):
        accelerator.backward(model(torch.ones(1, 4, dtype=torch.bfloat16)).sum())
        optimizer.step()
        optimizer.zero_grad()
        model.weight.data[0] = 0.5
    masters = optimizer.optimizer.state_dict()["master_weights"]
    return model.weight.detach().clone(), list(masters.values())


def test_weights_that_were_not_written_keep_their_masters():
    for rank, (weight, (masters,)) in enumerate(run_ranks(kept_precision, 2, ["zero1"])):
        assert (weight[0] == 0.5).all()
        assert (weight[1:] < 1).all()
        expected = torch.full((8,), 1 - 8e-3)
        if rank == 0:
            expected[:4] = 0.5
        torch.testing.assert_close(masters, expected, rtol=1e-5, atol=1e-6)


def saved_after_a_write(folder):
    from neuron_accel import NeuronAccelerator

    accelerator = NeuronAccelerator(config={"plugins": ["zero1"]})
    model = nn.Linear(4, 4, bias=False, dtype=torch.bfloat16)
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=1e-3))
    model.weight.data.fill_(0.5)
    accelerator.save_state(folder)
    model.weight.data.fill_(2.0)
    optimizer.optimizer.take_user_weights()
    accelerator.load_state(folder)
    masters = optimizer.optimizer.state_dict()["master_weights"]
    return masters["weight"].unique().tolist(), model.weight[0, 0].item()


def test_a_checkpoint_has_the_masters_of_written_weights(tmp_path):
    assert run_ranks(saved_after_a_write, 2, str(tmp_path / "saved")) == [([0.5], 0.5)] * 2


# ---- memory of a weight that the loop keeps, or hands on -------------------------------------------------------------
def swap(one, other):
    one.data, other.data = other.data, one.data


def evaluated_with_other_weights(plugins, dtype):
    """The saved weights while the loop uses other ones in their place, and the weights after it has put its own back
    and trained on."""
    from neuron_accel import NeuronAccelerator

    accelerator = NeuronAccelerator(config={"plugins": plugins})
    x, found = next(batches(accelerator, 1)).to(dtype), []
    for how in ("kept", "swapped", "swapped with each other"):
        model = Layers().to(dtype)
        others = [p.detach() * 0.5 for p in model.parameters()]
        model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=1e-2, momentum=0.9))
        for _ in range(2):
            accelerator.backward(model(x))
            optimizer.step()
            optimizer.zero_grad()
            with accelerator.full_weights(model):
                parameters = list(model.parameters())
                kept = [p.data for p in parameters]
                for p, other in zip(parameters, others, strict=True):
                    if how == "kept":
                        p.data = other
                    elif how == "swapped":
                        swap(p, other)
                if how == "swapped with each other":
                    swap(parameters[0], parameters[2])
                    swap(parameters[1], parameters[-1])
            found.append(full_weights(accelerator, model))
            with accelerator.full_weights(model):
                for p, own, other in zip(model.parameters(), kept, others, strict=True):
                    if how == "kept":
                        p.data = own
                    elif how == "swapped":
                        swap(p, other)
        accelerator.backward(model(x))
        optimizer.step()
        found.append(full_weights(accelerator, model))
    return found


@pytest.mark.parametrize("name", ["zero1", "stage 3"])
def test_the_loop_may_keep_the_memory_of_weights_that_it_replaces(name):
    for dtype, tolerance in [(torch.float32, 1e-6), (torch.bfloat16, 2e-2)]:
        expected = run_ranks(evaluated_with_other_weights, 1, [], dtype)[0]
        for found in run_ranks(evaluated_with_other_weights, 2, FULL[name], dtype):
            torch.testing.assert_close(found, expected, rtol=tolerance, atol=tolerance)


def handed(plugins, how):
    from neuron_accel import NeuronAccelerator

    accelerator = NeuronAccelerator(config={"plugins": plugins})
    model = Layers()
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=1e-2))
    first, second = model.layers[0], model.layers[1]
    if how == "put back without values":
        kept = first.weight.data
        first.weight.data = torch.ones(5, 6)
        model(torch.ones(2, 6))
        first.weight.data = kept
        model(torch.ones(2, 6))
    with accelerator.full_weights(model):
        if how == "handed on":
            second.weight.data = first.weight.data
        else:
            second.bias.data = first.weight.data[0, :5]
    optimizer.step()


@pytest.mark.parametrize(
    ("name", "how", "words"),
    [
        ("zero1", "handed on", "'layers.1.weight' was assigned memory of the weight 'layers.0.weight'"),
        ("zero1", "a row of it", "'layers.1.bias' was assigned memory of the weight 'layers.0.weight'"),
        ("stage 3", "handed on", "'layers.1.weight' was assigned memory of the weight 'layers.0.weight'"),
        ("stage 3", "a row of it", "'layers.1.bias' was assigned memory of the weight 'layers.0.weight'"),
        ("stage 3", "put back without values", "NaN was assigned to the weight 'layers.0.weight'"),
    ],
)
def test_a_weight_whose_memory_becomes_that_of_another_is_an_error(name, how, words):
    with pytest.raises(RanksError, match=words) as caught:
        run_ranks(handed, 2, FULL[name], how)
    assert len(caught.value.errors) == 2


# ---- full weights ----------------------------------------------------------------------------------------------------
def averaged(plugins, dtype):
    """Keeps an average of the weights, evaluates with it, trains on; writes to weights in every way."""
    from neuron_accel import NeuronAccelerator

    accelerator = NeuronAccelerator(config={"plugins": plugins})
    model = Layers().to(dtype)
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=1e-2, momentum=0.9))
    with accelerator.full_weights(model):
        average = {name: p.detach().clone() for name, p in model.named_parameters()}
    losses = []
    for x in batches(accelerator, 3):
        accelerator.backward(model(x.to(dtype)))
        optimizer.step()
        optimizer.zero_grad()
        with accelerator.full_weights(model):
            for name, p in model.named_parameters():
                average[name].lerp_(p.detach(), 0.5)
            trained = {name: p.detach().clone() for name, p in model.named_parameters()}
            model.load_state_dict(average)
            with torch.no_grad():
                losses.append(accelerator.reduce(model(x.to(dtype)), "mean"))
            model.load_state_dict(trained)
    with accelerator.full_weights(model):
        for write, layer in zip(WRITES.values(), model.layers, strict=True):
            write(layer)
    with accelerator.full_weights(model.layers[1]):
        model.layers[1].bias.data.add_(1)
    accelerator.backward(model(x.to(dtype)))
    optimizer.step()
    return losses, average, full_weights(accelerator, model)


@functools.cache
def averaged_in_one_process(dtype):
    return run_ranks(averaged, 1, [], dtype)[0]


@pytest.mark.parametrize("name", FULL)
def test_full_weights_are_read_and_written(name):
    for dtype, tolerance in [(torch.float32, 1e-6), (torch.bfloat16, 2e-2)]:
        for found in run_ranks(averaged, 2, FULL[name], dtype):
            torch.testing.assert_close(found, averaged_in_one_process(dtype), rtol=tolerance, atol=tolerance)


def misused(kind):
    from neuron_accel import NeuronAccelerator

    accelerator = NeuronAccelerator(config={"plugins": [{"fully_sharded": {"modules": "layers.*"}}]})
    model = Layers()
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=1e-2))
    if kind == "other model":
        with accelerator.full_weights(Layers()):
            pass
    elif kind == "assigned":
        model.layers[0].weight.data = model.layers[0].weight.data * 0.5
        model(torch.ones(2, 6))
    elif kind == "step":
        accelerator.backward(model(torch.ones(2, 6)))
        with accelerator.full_weights(model):
            optimizer.step()


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        ("other model", "not a prepared model"),
        ("assigned", "is used outside of"),
        ("step", "leave the context before"),
    ],
)
def test_wrong_uses_of_full_weights_raise(kind, words):
    with pytest.raises(RanksError, match=words) as caught:
        run_ranks(misused, 2, kind)
    assert len(caught.value.errors) == 2
