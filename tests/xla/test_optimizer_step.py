"""`xm.optimizer_step` of a prepared optimizer, as scripts for torch_xla have it."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
from torch import nn

from neuron_accel.errors import DesyncError
from neuron_accel.testing import RanksError, run_ranks
from neuron_accel.testing._cases import tiny_llama
from neuron_accel.testing.xla_ranks import one_at_a_time
from tests.distributed.models import llama, token_batches


def step():
    import torch_xla.core.xla_model as xm

    from neuron_accel import NeuronAccelerator, NeuronAccelError

    accelerator = NeuronAccelerator(config={"backend": "xla"})
    model = nn.Linear(4, 2)
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    accelerator.backward(model(torch.ones(3, 4, device=accelerator.device)).sum())
    try:
        xm.optimizer_step(optimizer)
    except NeuronAccelError as error:
        return type(error).__name__, str(error)
    return "nothing", ""


def test_it_says_what_to_write():
    for kind, message in run_ranks(step, 2, backend="xla", timeout=110):
        assert kind == "UsageError"
        assert "call `optimizer.step()`" in message


def test_a_prepared_optimizer_is_copied_as_before():
    from neuron_accel.loop.wrappers import _State

    state = _State({"a": 1})
    assert pickle.loads(pickle.dumps(state)) == copy.deepcopy(state) == {"a": 1}


def copies_its_model():
    from neuron_accel import NeuronAccelerator

    accelerator = NeuronAccelerator(config={"backend": "xla"})
    with one_at_a_time():
        model = nn.Linear(4, 4)
    model, _ = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    average = torch.optim.swa_utils.AveragedModel(accelerator.unwrap_model(model))
    return [name for name, _ in average.named_parameters()]


def test_a_prepared_model_can_be_copied():
    assert run_ranks(copies_its_model, 2, backend="xla")[0] == ["module.weight", "module.bias"]


class ReadsLater(torch.optim.SGD):
    """Reads nothing in its first update, and a gradient in each later one."""

    updates = 0

    def step(self, closure=None):
        self.updates += 1
        if self.updates > 1:
            for group in self.param_groups:
                group["lr"] = 0.1 / (1.0 + float(group["params"][0].grad.abs().max()))
        return super().step(closure)


def trains_on_rank(kind):
    from neuron_accel import NeuronAccelerator

    accelerator = NeuronAccelerator(config={"backend": "xla"})
    with one_at_a_time():
        torch.manual_seed(0)
        model = nn.Linear(4, 2)
    model, optimizer = accelerator.prepare(model, kind(model.parameters(), lr=0.1))
    for i in range(4):
        accelerator.backward(model(torch.full((3, 4), 1.0 + i, device=accelerator.device)).square().mean())
        optimizer.step()
        optimizer.zero_grad()
    return optimizer.lazy.watches, accelerator.get_state_dict(model)


def test_an_optimizer_may_read_values_and_one_that_reads_none_is_not_watched():
    for kind, expected in ((torch.optim.SGD, False), (ReadsLater, True)):
        (watched, weights), (other, _) = run_ranks(trains_on_rank, 2, kind, backend="xla", timeout=110)
        assert watched == other == expected
        torch.manual_seed(0)
        model = nn.Linear(4, 2)
        optimizer = kind(model.parameters(), lr=0.1)
        for i in range(4):
            optimizer.zero_grad()
            model(torch.full((3, 4), 1.0 + i)).square().mean().backward()
            optimizer.step()
        for name, value in model.state_dict().items():
            torch.testing.assert_close(weights[name], value)


def shards_what_its_optimizer_needs_in_full():
    from neuron_accel import NeuronAccelerator

    accelerator = NeuronAccelerator(
        config={"backend": "xla", "plugins": [{"model_parallelism": {"tensor_parallel_size": 2}}]}
    )
    model = tiny_llama()
    accelerator.prepare(model, torch.optim.Adafactor(model.parameters()))


def test_an_optimizer_of_full_parameters_is_refused_with_tensor_parallelism():
    with pytest.raises(RanksError, match="UsageError: Adafactor needs full parameters, and some are sharded"):
        run_ranks(shards_what_its_optimizer_needs_in_full, 2, backend="xla")


def follows_a_plateau():
    """Learning rates of a scheduler whose metric the ranks have still to compute together."""
    from neuron_accel import NeuronAccelerator

    accelerator = NeuronAccelerator(config={"backend": "xla"})
    with one_at_a_time():
        model = nn.Linear(4, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0, factor=0.5)
    model, optimizer, scheduler = accelerator.prepare(model, optimizer, scheduler)
    rates = []
    for rows in range(1, 4):
        loss = model(torch.ones(rows, 4, device=accelerator.device)).mean()
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        scheduler.step(accelerator.reduce(rows + 0 * loss.detach(), "mean"))
        rates.append(optimizer.param_groups[0]["lr"])
    return rates


def test_a_metric_is_computed_by_all_ranks_together():
    assert run_ranks(follows_a_plateau, 2, backend="xla", timeout=110) == [[0.5, 0.25, 0.125]] * 2


def trains_by_closure():
    from neuron_accel import NeuronAccelerator

    accelerator = NeuronAccelerator(config={"backend": "xla"})
    with one_at_a_time():
        torch.manual_seed(0)
        model = nn.Linear(4, 2)
    model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=0.1, weight_decay=0.5))
    for i in range(3):

        def closure(i=i):
            optimizer.zero_grad()
            loss = model(torch.full((3, 4), 1.0 + i, device=accelerator.device)).square().mean()
            accelerator.backward(loss)
            return loss

        optimizer.step(closure)
    return accelerator.get_state_dict(model)


def test_weights_decay_after_the_forward_pass_of_a_closure():
    weights = run_ranks(trains_by_closure, 2, backend="xla", timeout=110)[0]
    torch.manual_seed(0)
    model = nn.Linear(4, 2)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, weight_decay=0.5)
    for i in range(3):
        optimizer.zero_grad()
        model(torch.full((3, 4), 1.0 + i)).square().mean().backward()
        optimizer.step()
    for name, value in model.state_dict().items():
        torch.testing.assert_close(weights[name], value)


def clips_shards(plugins):
    from neuron_accel import NeuronAccelerator

    accelerator = NeuronAccelerator(config={"backend": "xla", "plugins": plugins})
    with one_at_a_time():
        model = llama()
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    for batch in token_batches(2):
        accelerator.backward(model(**{name: value.to(accelerator.device) for name, value in batch.items()}).loss)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.01)
        optimizer.step()
        optimizer.zero_grad()
    accelerator.get_state_dict(model)


@pytest.mark.parametrize(("more", "ranks"), [([], 2), (["zero1"], 4)])
def test_clipping_by_the_norm_of_shards_is_an_error(more, ranks):
    with pytest.raises(RanksError) as raised:
        run_ranks(
            clips_shards, ranks, [{"tensor_parallel": {"tensor_parallel_size": 2}}, *more], backend="xla", timeout=110
        )
    assert DesyncError in {type(error) for error in raised.value.errors.values()}  # of the first group that finds it
