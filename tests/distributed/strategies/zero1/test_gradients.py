"""Under ZeRO-1 a loop sees gradients, changes them, keeps and drops them, as it would under plain data parallelism."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from neuron_accel.testing import RanksError, run_ranks


def net():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 11), nn.Tanh(), nn.Linear(11, 5), nn.Tanh(), nn.Linear(5, 3))


def batches(count):
    generator = torch.Generator().manual_seed(5)
    return [torch.randn(8, 6, generator=generator) for _ in range(count)]


def read_only(model, optimizer, step):
    return [None if p.grad is None else p.grad.clone() for p in model.parameters()]


def clip_by_hand(model, optimizer, step):
    norm = nn.utils.clip_grad_norm_(model.parameters(), 0.05)
    nn.utils.clip_grad_value_(model.parameters(), 0.01)
    return [norm]


@torch.no_grad()
def add_decay(model, optimizer, step):
    for p in model.parameters():
        p.grad.add_(p, alpha=0.1)
    return []


@torch.no_grad()
def write_views(model, optimizer, step):
    for p in model.parameters():
        p.grad.data[..., 0] *= 2
        p.grad.view(-1)[:2] = 0
    return []


def replace(model, optimizer, step):
    model[0].weight.grad = model[0].weight.grad.sign()
    model[0].bias.grad = None
    for p in model[4].parameters():
        p.requires_grad_(True)
        p.grad.zero_()
    return read_only(model, optimizer, step)


def drop_all(model, optimizer, step):
    if step % 2:
        model.zero_grad()
    return []


LOOPS = {f.__name__: f for f in (read_only, clip_by_hand, add_decay, write_views, replace, drop_all)}


def train(name, plugins, zero, accumulation=1):
    """Weights and what the loop saw; without plugins, plain data parallelism."""
    from neuron_accel import NeuronAccelerator

    accelerator = NeuronAccelerator(config={"plugins": plugins}, gradient_accumulation_steps=accumulation)
    model = net()
    model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=0.05, eps=1e-3))
    size, rank = accelerator.data_parallel_size, accelerator.data_parallel_rank
    seen = []
    for step, x in enumerate(batches(4 * accumulation)):
        with accelerator.accumulate(model):
            accelerator.backward(model(x.chunk(size)[rank]).square().mean())
            if accelerator.sync_gradients:
                seen += LOOPS[name](model, optimizer, step)
            optimizer.step()
            if zero == "optimizer":
                optimizer.zero_grad()
            elif zero == "model" and accelerator.sync_gradients:
                model.zero_grad()
            elif zero == "values" and accelerator.sync_gradients:
                model.zero_grad(set_to_none=False)
            elif zero == "some" and accelerator.sync_gradients:
                model[0].weight.grad = model[4].bias.grad = None
    left = [None if p.grad is None else p.grad.clone() for p in model.parameters()]
    return seen, left, [p.detach().clone() for p in model.parameters()]


SMALL = {"zero1": {"bucket_cap_mb": 2e-4}}  # a few buckets
CASES = [
    ("read_only", "optimizer", 1, {}),
    ("read_only", "never", 2, {}),
    ("read_only", "never", 2, {"use_grad_acc_hook": True}),
    ("read_only", "some", 1, {}),
    ("clip_by_hand", "model", 1, {}),
    ("add_decay", "values", 2, {}),
    ("write_views", "values", 2, {"use_grad_acc_hook": True}),
    ("replace", "never", 1, {}),
    ("replace", "optimizer", 2, {"partition": "parameters"}),
    ("drop_all", "optimizer", 1, {}),
]


@pytest.mark.parametrize(("name", "zero", "accumulation", "options"), CASES, ids=str)
def test_gradients_are_those_of_plain_data_parallelism(name, zero, accumulation, options):
    expected = run_ranks(train, 2, name, [], zero, accumulation)[0]
    plugins = [{"zero1": {**SMALL["zero1"], **options}}]
    for found in run_ranks(train, 2, name, plugins, zero, accumulation):
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-7)


def freezes_and_keeps_zeros(plugins):
    from neuron_accel import NeuronAccelerator

    accelerator = NeuronAccelerator(config={"plugins": plugins})
    model = net()
    model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=0.05, eps=1e-3))
    size, rank = accelerator.data_parallel_size, accelerator.data_parallel_rank
    for step, x in enumerate(batches(4)):
        accelerator.backward(model(x.chunk(size)[rank]).square().mean())
        optimizer.step()
        optimizer.zero_grad(set_to_none=False)
        if step == 0:
            model[0].requires_grad_(False)
            model[0].bias.grad = None
    grads = [None if p.grad is None else p.grad.clone() for p in model.parameters()]
    return grads, [p.detach().clone() for p in model.parameters()]


@pytest.mark.parametrize("options", [{}, {"partition": "parameters"}, {"use_grad_acc_hook": True}], ids=str)
def test_parameters_whose_gradients_were_set_to_zero_go_on_by_their_momentum(options):
    expected = run_ranks(freezes_and_keeps_zeros, 2, [])[0]
    for found in run_ranks(freezes_and_keeps_zeros, 2, [{"zero1": {**SMALL["zero1"], **options}}]):
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-7)


def count_messages():
    """Messages and bytes of a step in which nobody reads gradients, of a read, and of a second one."""
    from neuron_accel import NeuronAccelerator, Zero1Plugin

    accelerator = NeuronAccelerator(plugins=[Zero1Plugin()])
    model = net()
    model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters()))
    with accelerator.run.backend.record() as step:
        accelerator.backward(model(batches(1)[0]).sum())
        assert all(p.grad is not None and p.grad.shape == p.shape for p in model.parameters())
        optimizer.step()
    with accelerator.run.backend.record() as read:
        first = [p.grad.norm() for p in model.parameters()]
    with accelerator.run.backend.record() as again:
        second = [p.grad.norm() for p in model.parameters()]
    accelerator.clip_grad_norm_(model.parameters(), 1e-3)
    with accelerator.run.backend.record() as clipped:
        third = nn.utils.get_total_norm([p.grad for p in model.parameters()])
    return step.count(), read.count(), again.count(), clipped.count(), first == second, float(third)


def test_gradients_that_are_not_read_are_not_gathered():
    for step, read, again, clipped, same, norm in run_ranks(count_messages, 2):
        assert (step, again) == (3, 0)  # a reduce-scatter, who has gradients, an all-gather of weights
        assert read == clipped == 1
        assert same
        assert norm == pytest.approx(1e-3, rel=1e-3)


def misuse(kind):
    from neuron_accel import NeuronAccelerator, Zero1Plugin

    accelerator = NeuronAccelerator(plugins=[Zero1Plugin()])
    model = net()
    model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters()))
    accelerator.backward(model(batches(1)[0]).sum())
    kept = model[0].weight.grad
    if kind == "dropped":
        optimizer.zero_grad()
        kept.norm()
    elif kind == "gone":
        accelerator.free_memory()
        kept.norm()
    elif kind == "different":
        model[2 * accelerator.process_index].weight.grad.norm()


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        ("dropped", "'0.weight' has been dropped"),
        ("gone", "has been dropped|is no longer available"),
        ("different", "different gradients.*0.weight.*2.weight"),
    ],
)
def test_gradients_that_cannot_be_read_raise(kind, words):
    with pytest.raises(RanksError, match=words) as caught:
        run_ranks(misuse, 2, kind)
    assert len(caught.value.errors) == 2


def alone_with_given_gradients():
    """The wrapper sums what is in `parameter.grad`, whoever has put it there."""
    from neuron_accel import ZeroRedundancyOptimizer

    weight = nn.Parameter(torch.zeros(5))
    optimizer = ZeroRedundancyOptimizer([weight], torch.optim.SGD, lr=1.0, grad_clipping=False)
    weight.grad = torch.full((5,), 1.0 + torch.distributed.get_rank())
    optimizer.step()
    return weight.detach().tolist(), weight.grad.tolist()


def test_the_wrapper_reduces_gradients_that_no_backward_pass_made():
    assert run_ranks(alone_with_given_gradients, 2) == [([-1.5] * 5, [1.5] * 5)] * 2


def count_clipping():
    from neuron_accel import NeuronAccelerator, Zero1Plugin

    accelerator = NeuronAccelerator(plugins=[Zero1Plugin()])
    model = net()
    model, _ = accelerator.prepare(model, torch.optim.AdamW(model.parameters()))
    accelerator.backward(model(batches(1)[0]).sum())
    with accelerator.run.backend.record() as clipping:
        accelerator.clip_grad_norm_(model.parameters(), 1.0)
    return clipping.count(), clipping.sent()


def test_clipping_sends_one_number():
    assert run_ranks(count_clipping, 2) == [(1, 4)] * 2


def train_scaled(plugins):
    """With a gradient scaler, as for fp16; in the second step one rank's gradients overflow."""
    from neuron_accel import NeuronAccelerator

    accelerator = NeuronAccelerator(config={"plugins": plugins})
    accelerator.scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=1000)
    model = net()
    model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=0.05, eps=1e-3))
    size, rank = accelerator.data_parallel_size, accelerator.data_parallel_rank
    norms, skipped = [], []
    for step, x in enumerate(batches(4)):
        loss = model(x.chunk(size)[rank]).square().mean()
        accelerator.backward(loss * 1e38 if (step, rank) == (1, 1) else loss)
        norms.append(float(accelerator.clip_grad_norm_(model.parameters(), 0.1)))
        optimizer.step()
        optimizer.zero_grad()
        skipped.append(optimizer.step_was_skipped)
    return norms, skipped, accelerator.scaler.get_scale(), [p.detach().clone() for p in model.parameters()]


def test_a_gradient_scaler_skips_a_step_on_every_rank():
    (norms, skipped, scale, weights), _ = run_ranks(train_scaled, 2, [])
    assert (skipped, scale) == ([False, True, False, False], 512.0)
    for found in run_ranks(train_scaled, 2, [SMALL]):
        assert found[1:3] == (skipped, scale)
        assert found[0] == pytest.approx(norms, rel=1e-5, nan_ok=True)
        torch.testing.assert_close(found[3], weights, rtol=1e-5, atol=1e-7)


def accumulate_small_gradients(options):
    from neuron_accel import NeuronAccelerator, Zero1Plugin

    accelerator = NeuronAccelerator(plugins=[Zero1Plugin(**options)], gradient_accumulation_steps=16)
    model = nn.Linear(1, 2, bias=False).to(torch.bfloat16)
    model, _ = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    for x in [1.0, *[2**-9] * 15]:
        with accelerator.accumulate(model):
            accelerator.backward(model(torch.tensor([[x]], dtype=torch.bfloat16)).sum())
    return accelerator.get_gradients(model)["weight"].float().flatten().tolist()


def test_gradients_accumulate_in_fp32_where_that_is_asked_for():
    exact = (1 + 15 * 2**-9) / 16
    assert run_ranks(accumulate_small_gradients, 2, {"use_grad_acc_hook": True}) == [[exact] * 2] * 2
    # in bf16, which has eight bits, what is added to one rounds away
    assert run_ranks(accumulate_small_gradients, 2, {}) == [[1 / 16] * 2] * 2


def peak_of_a_step():
    """Memory that forward, backward and a step take above the prepared model, in units of its parameters."""
    from neuron_accel import NeuronAccelerator, Zero1Plugin
    from neuron_accel.testing.resources import PeakMemory

    accelerator = NeuronAccelerator(plugins=[Zero1Plugin()])
    model = nn.Sequential(*(nn.Linear(1024, 1024, bias=False) for _ in range(64)))
    size = sum(p.numel() * p.element_size() for p in model.parameters())
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    memory = PeakMemory()
    accelerator.backward(model(torch.ones(2, 1024)).sum())
    optimizer.step()
    return memory.bytes() / size


def test_full_gradients_of_all_parameters_are_never_held_at_once():
    # a share of a half, a few buckets on their way, and what libraries load at a first step; whole they are 1 more
    assert max(run_ranks(peak_of_a_step, 2)) < 1.1
