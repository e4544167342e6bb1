"""Order and number of collectives while others compute, as far as the stand-in for the native device can show it: it
has no streams, so that it does not show that the device computes meanwhile."""

from __future__ import annotations

import pytest
import torch
from neuron_accel_emulation import native_ranks

from neuron_accel.testing import run_ranks

LAYERS = 4


def train(plugin, kind):
    """Collectives of a kind that are issued when the backward pass comes to each layer, from the last to the first; how
    many at its end; and how many when the rank first waits for one."""
    from neuron_accel import NeuronAccelerator
    from neuron_accel.testing.devices import Work

    accelerator = NeuronAccelerator(config={"plugins": [plugin]})
    torch.manual_seed(0)
    model = torch.nn.Sequential(*(torch.nn.Linear(64, 64) for _ in range(LAYERS)))
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    model, optimizer = accelerator.prepare(model, optimizer)
    original, waits, seen = Work.wait, [], []

    def wait(work, *args):
        waits.append(total() - before)
        return original(work, *args)

    def total():
        return native_ranks.counts().collectives.get(kind, 0)

    Work.wait = wait
    try:
        before = total()
        out = torch.randn(2, 64, device=accelerator.device)
        for layer in model:
            out = layer(out)
            out.register_hook(lambda _: seen.append(total() - before))
        waits.clear()
        accelerator.backward(out.sum())
    finally:
        Work.wait = original
    return seen, total() - before, waits[0]


@pytest.mark.parametrize(("plugin", "kind"), [("data_parallel", "all_reduce"), ("zero1", "reduce_scatter")])
def test_gradients_are_sent_while_the_backward_pass_goes_on(plugin, kind):
    """What AWS's guide does by hand with collectives on a second stream: issue, compute, and wait at the end."""
    for seen, total, waited in run_ranks(train, 2, {plugin: {"bucket_cap_mb": 0.02}}, kind, backend="native"):
        assert total == LAYERS
        assert seen == sorted(seen)
        assert seen[-1] >= LAYERS - 2, "when the pass comes to the first layer, buckets of later ones are under way"
        assert waited >= 2, "no rank waits for a bucket before the next one is under way"
