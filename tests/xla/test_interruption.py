"""A request to stop ends XLA ranks after the same step, without a further graph."""

from __future__ import annotations

from neuron_accel.testing import run_ranks


def train(folder):
    import torch

    from neuron_accel import NeuronAccelerator
    from tests.xla.watching import compiled

    accelerator = NeuronAccelerator(config={"plugins": ["zero1"]})
    torch.manual_seed(0)
    model = torch.nn.Linear(4, 4)
    model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters()))
    interruption = accelerator.watch_for_interruption((), notice_file=f"{folder}/notice")
    steps = []
    for step in range(20):
        before = compiled()
        accelerator.backward(model(torch.ones(2, 4, device=accelerator.device)).sum())
        optimizer.step()
        optimizer.zero_grad()
        if step == 4 and accelerator.state.process_index == 1:
            open(f"{folder}/notice", "w").close()
        if interruption.requested():
            break
        steps.append(compiled() - before)
    accelerator.end_training()
    return steps


def test_ranks_stop_after_the_same_step(tmp_path):
    first, second = run_ranks(train, 2, str(tmp_path), backend="xla")
    assert len(first) == len(second) < 9
    assert sum(first[3:]) == sum(second[3:]) == 0
