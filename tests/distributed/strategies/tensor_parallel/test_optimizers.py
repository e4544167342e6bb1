"""Optimizers that know their parameters, or run forward and backward themselves, where parameters are sharded."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from neuron_accel.testing import RanksError, run_ranks
from tests.distributed.models import llama, token_batches

TP2 = [{"model_parallelism": {"tensor_parallel_size": 2}}]
STEPS = {"by parameter": 3, "lbfgs": 1}
PP2 = [{"model_parallelism": {"pipeline_parallel_size": 2, "num_microbatches": 2}}]


class ByParameter(torch.optim.SGD):
    """Looks things up: an attribute of the parameter, a rate and a start by parameter, and a list of its own."""

    def __init__(self, parameters, lr):
        super().__init__(parameters, lr=lr)
        self.mine = list(self.param_groups[0]["params"])
        self.rates = {p: 0.1 + 0.1 * (i % 3) for i, p in enumerate(self.mine)}
        self.starts = {p: p.detach().clone() for p in self.mine}

    @torch.no_grad()
    def step(self, closure=None):
        for p in self.mine:
            if p.grad is not None:
                p.add_(p.grad, alpha=-self.rates[p])
                p.lerp_(self.starts[p], 0.3 if getattr(p, "returns", False) else 0.0)


def built(kind):
    torch.manual_seed(0)
    model = llama()
    for name, p in model.named_parameters():
        p.returns = "proj" in name
    if kind == "lbfgs":
        model.double()  # each of its updates magnifies roundings
        return model, torch.optim.LBFGS(model.parameters(), lr=0.05, max_iter=3)
    return model, ByParameter(model.parameters(), lr=0.1)


def train(model, optimizer, backward, steps):
    for batch in token_batches(steps):

        def closure(batch=batch):
            optimizer.zero_grad()
            loss = model(**batch).loss
            backward(loss)
            return loss.detach()

        if isinstance(getattr(optimizer, "optimizer", optimizer), ByParameter):
            closure()
            optimizer.step()
        else:
            optimizer.step(closure)


def alone(kind):
    model, optimizer = built(kind)
    train(model, optimizer, torch.Tensor.backward, STEPS[kind])
    return {name: value.clone() for name, value in model.state_dict().items()}


def on_rank(kind, plugins):
    from neuron_accel import NeuronAccelerator

    accelerator = NeuronAccelerator(config={"plugins": plugins})
    model, optimizer = accelerator.prepare(*built(kind))
    train(model, optimizer, accelerator.backward, STEPS[kind])
    return accelerator.get_state_dict(model)


@pytest.mark.parametrize("kind", ["by parameter", "lbfgs"])
def test_updates_as_in_one_process(kind):
    expected = run_ranks(alone, 1, kind, backend=None)[0]
    found = run_ranks(on_rank, 2, kind, TP2)[0]
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, rtol=1e-3, atol=1e-4)


def test_what_looks_at_all_parameters_is_refused_in_a_pipeline():
    with pytest.raises(RanksError, match="LBFGS uses all parameters together, but a rank has only some"):
        run_ranks(on_rank, 2, "lbfgs", PP2)


def sharded_shapes(plugins):
    from neuron_accel import NeuronAccelerator

    accelerator = NeuronAccelerator(config={"plugins": plugins})
    _, optimizer = accelerator.prepare(*built("by parameter"))
    inner = optimizer.optimizer
    assert all(inner.starts[p].shape == p.shape for p in inner.mine)
    assert all(isinstance(p, nn.Parameter) for p in inner.mine)
    return [id(p) for p in inner.mine] == [id(p) for group in inner.param_groups for p in group["params"]]


def test_what_an_optimizer_lists_is_what_it_updates():
    assert run_ranks(sharded_shapes, 2, TP2) == [True, True]


def added_group(plugins):
    from neuron_accel import NeuronAccelerator

    accelerator = NeuronAccelerator(config={"plugins": plugins})
    torch.manual_seed(0)
    model = llama()
    model.lm_head.requires_grad_(False)
    optimizer = torch.optim.Adafactor([p for p in model.parameters() if p.requires_grad], lr=0.05)
    model, optimizer = accelerator.prepare(model, optimizer)
    model.lm_head.requires_grad_(True)
    optimizer.add_param_group({"params": [model.lm_head.weight], "lr": 0.05})
    for batch in token_batches(2):
        accelerator.backward(model(**batch).loss)
        optimizer.step()
        optimizer.zero_grad()
    return accelerator.get_state_dict(model)


def test_a_group_that_joins_is_updated_in_full():
    expected, found = (run_ranks(added_group, ranks, plugins)[0] for ranks, plugins in ((1, []), (2, TP2)))
    torch.testing.assert_close(found["lm_head.weight"], expected["lm_head.weight"], rtol=1e-3, atol=1e-4)
