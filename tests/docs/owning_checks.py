"""What the chapter about owning a responsibility promises, tried on the plugin that it shows. The test of the page puts
this file into the package as one of its tests."""

from __future__ import annotations

import pytest
import torch
from neuron_accel_steady.averaging import AveragingPlugin

from neuron_accel import NeuronAccelerator
from neuron_accel.testing import run_ranks

RANKS = 2


class Branches(torch.nn.Module):
    """The first row says which of two branches a batch takes; a third is never used."""

    def __init__(self):
        super().__init__()
        self.left, self.right, self.never = (torch.nn.Linear(3, 2) for _ in range(3))

    def forward(self, x, branch):
        return (self.left if branch == 0 else self.right)(x).square().mean()


def batch(rank, step):
    generator = torch.Generator().manual_seed(10 * step + rank)
    return torch.randn(4, 3, generator=generator), (rank + step) % 2


def made():
    torch.manual_seed(0)
    model = Branches()
    return model, torch.optim.SGD(model.parameters(), lr=0.1, weight_decay=0.5)


def gradients_of(model):
    return {name: None if p.grad is None else p.grad.detach().clone() for name, p in model.named_parameters()}


def alone(steps_of_rank, weights=None, zero=True):
    """One process that adds up the losses of all ranks, divided by their number; gradients, then weights."""
    model, optimizer = made()
    for step in range(max(steps_of_rank)):
        for rank, steps in enumerate(steps_of_rank):
            if step < steps:
                (model(*batch(rank, step)) / len(steps_of_rank) * (weights[rank] if weights else 1)).backward()
        if zero:
            seen = gradients_of(model)
            optimizer.step()
            optimizer.zero_grad()
    return seen if zero else gradients_of(model), model.state_dict()


def close(found, expected):
    for one, other in zip(found, expected, strict=True):
        assert one.keys() == other.keys()
        for name, value in one.items():
            assert (value is None) == (other[name] is None), name
            if value is not None:
                torch.testing.assert_close(value, other[name], msg=name)


def prepared(**options):
    accelerator = NeuronAccelerator(plugins=[AveragingPlugin()], **options)
    assert "data_parallel" not in [plugin.spec.name for plugin in accelerator.plan.plugins]
    return accelerator, *accelerator.prepare(*made())


def branches_apart(steps):
    """Each rank uses another branch in each step; none uses the third."""
    accelerator, model, optimizer = prepared()
    for step in range(steps):
        accelerator.backward(model(*batch(accelerator.process_index, step)))
        seen = gradients_of(model)
        optimizer.step()
        optimizer.zero_grad()
    return seen, model.state_dict()


def test_parameters_that_some_ranks_do_not_use():
    expected = alone([3, 3])
    assert expected[0]["never.weight"] is None
    assert expected[0]["left.weight"] is not None
    for found in run_ranks(branches_apart, RANKS, 3):
        close(found, expected)


def without_synchronisation():
    """Two passes under `no_sync` and one that synchronises."""
    accelerator, model, _ = prepared()
    with accelerator.no_sync(model):
        for step in range(2):
            accelerator.backward(model(*batch(accelerator.process_index, step)))
    local = gradients_of(model)
    accelerator.backward(model(*batch(accelerator.process_index, 2)))
    return gradients_of(model), local


def test_passes_without_synchronisation_are_reduced_by_the_next():
    results = run_ranks(without_synchronisation, RANKS)
    expected, _ = alone([3, 3], zero=False)
    assert not torch.equal(results[0][1]["left.weight"], results[1][1]["left.weight"])
    for found, _ in results:
        close([found], [expected])


def clipped_after_no_sync():
    """What passes without synchronisation have left is reduced before it is clipped."""
    accelerator, model, _ = prepared()
    with accelerator.no_sync(model):
        accelerator.backward(model(*batch(accelerator.process_index, 0)))
    norm = accelerator.clip_grad_norm_(model.parameters(), 0.01)
    return float(norm), gradients_of(model)


def test_what_was_left_is_reduced_before_it_is_clipped():
    gradients, _ = alone([1, 1], zero=False)
    norm = torch.stack([g.norm() for g in gradients.values() if g is not None]).norm()
    for found, clipped in run_ranks(clipped_after_no_sync, RANKS):
        assert found == pytest.approx(float(norm), rel=1e-5)
        torch.testing.assert_close(clipped["left.weight"], gradients["left.weight"] * 0.01 / (norm + 1e-6))


def uneven():
    """The second rank has one batch, the first has three."""
    accelerator, model, optimizer = prepared()
    with accelerator.join_uneven_inputs([model], even_batches=False):
        for step in range(1 if accelerator.process_index else 3):
            accelerator.backward(model(*batch(accelerator.process_index, step)))
            optimizer.step()
            optimizer.zero_grad()
    return model.state_dict()


def test_ranks_that_run_out_of_data():
    expected = alone([3, 1])[1]
    for found in run_ranks(uneven, RANKS):
        close([found], [expected])


def averaged_over_items():
    accelerator, model, optimizer = prepared()
    rank = accelerator.process_index
    accelerator.backward(model(*batch(rank, 0)), num_items=1 + 2 * rank)
    optimizer.step()
    return model.state_dict()


def test_averages_over_items():
    """Of four items the first rank has one and the second three."""
    expected = alone([1, 1], weights=[2 * 1 / 4, 2 * 3 / 4])[1]
    for found in run_ranks(averaged_over_items, RANKS):
        close([found], [expected])


class Counted(Branches):
    """With running statistics."""

    def __init__(self):
        super().__init__()
        self.register_buffer("mean", torch.zeros(3))

    def forward(self, x, branch):
        self.mean.lerp_(x.mean(0), 0.5)
        return super().forward(x, branch)


def buffers_after_a_step():
    accelerator = NeuronAccelerator(plugins=[AveragingPlugin()])
    torch.manual_seed(0)
    model = Counted()
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    accelerator.backward(model(*batch(accelerator.process_index, 0)))
    optimizer.step()
    return model.mean.clone()


def test_buffers_are_those_of_the_first_rank():
    expected = 0.5 * batch(0, 0)[0].mean(0)
    for found in run_ranks(buffers_after_a_step, RANKS):
        torch.testing.assert_close(found, expected)
