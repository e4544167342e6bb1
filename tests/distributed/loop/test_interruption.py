"""After a signal to one rank, or a file, every rank stops after the same step, and a resumed run goes on from there."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time

import pytest
import torch

from neuron_accel.checkpoint.tools.report import verify
from neuron_accel.errors import ConfigurationError, UsageError
from neuron_accel.testing import run_ranks

STEPS = 12


def train(folder, asked_at=None, by="SIGTERM", who=1, resume=False, accumulation=1):
    """Trains until it is asked to stop: ``who`` is asked in step ``asked_at``. Returns steps done and the weights."""
    from neuron_accel import NeuronAccelerator

    before = signal.getsignal(signal.SIGTERM)
    accelerator = NeuronAccelerator(
        config={"plugins": ["zero1"]}, project_dir=folder, gradient_accumulation_steps=accumulation
    )
    torch.manual_seed(0)
    model = torch.nn.Linear(4, 4)
    data = torch.utils.data.TensorDataset(torch.randn(STEPS * accumulation * 2, 4))
    loader = torch.utils.data.DataLoader(data, batch_size=2 // accelerator.num_processes)
    model, optimizer, loader = accelerator.prepare(model, torch.optim.AdamW(model.parameters()), loader)
    notice = f"{folder}/notice"
    interruption = accelerator.watch_for_interruption(notice_file=notice)
    if resume:
        accelerator.load_state(f"{folder}/last")
    steps = 0
    for (batch,) in loader:
        with accelerator.accumulate(model):
            accelerator.backward(model(batch).square().sum())
            optimizer.step()
            optimizer.zero_grad()
        steps += accelerator.sync_gradients
        if asked_at == steps and accelerator.state.process_index == who and accelerator.sync_gradients:
            if by == "file":
                open(notice, "w").close()
            else:
                os.kill(os.getpid(), signal.Signals[by])
        if interruption.requested():
            assert interruption.requested()  # it stays
            accelerator.save_state(f"{folder}/last")
            break
    weights = accelerator.get_state_dict(model)
    accelerator.end_training()
    assert signal.getsignal(signal.SIGTERM) is before
    return steps, {name: value.tolist() for name, value in weights.items()}


@pytest.mark.parametrize(("by", "accumulation"), [("SIGTERM", 1), ("SIGTERM", 2), ("SIGINT", 1), ("file", 1)])
def test_all_ranks_stop_after_the_same_step_and_resuming_equals_one_run(tmp_path, by, accumulation):
    options = {"by": by, "accumulation": accumulation}
    stopped = run_ranks(train, 2, str(tmp_path), 5, **options)
    assert [steps for steps, _ in stopped] in ([7, 7], [8, 8])  # rank 0 may have read the board before rank 1 wrote
    (tmp_path / "notice").unlink(missing_ok=True)
    resumed = run_ranks(train, 2, str(tmp_path), resume=True, accumulation=accumulation)
    full = run_ranks(train, 2, str(tmp_path / "full"), accumulation=accumulation)
    assert stopped[0][0] + resumed[0][0] == full[0][0] == STEPS
    assert resumed[0][1] == full[0][1]


def test_one_process_stops_after_the_step_in_which_it_is_asked(tmp_path, capfd):
    assert run_ranks(train, 1, str(tmp_path), 3, who=0)[0][0] == 3
    assert "neuron_accel: stopping after this step: SIGTERM on rank 0" in "".join(capfd.readouterr())


def apart():
    """Rank 1 does not wait for rank 0 in its steps, as on a device that works asynchronously."""
    from neuron_accel import NeuronAccelerator

    accelerator = NeuronAccelerator()
    interruption = accelerator.watch_for_interruption()
    calls = []
    while not calls or not calls[-1]:
        if accelerator.state.process_index == 0:
            time.sleep(0.05)
            if len(calls) == 3:
                os.kill(os.getpid(), signal.SIGTERM)
        calls.append(interruption.requested())
    accelerator.end_training()
    return calls


def test_ranks_that_do_not_wait_for_each_other_stop_after_the_same_step():
    assert run_ranks(apart, 2) == [[False] * 5 + [True]] * 2


def joined():
    """Rank 0 runs out of data first."""
    from neuron_accel import NeuronAccelerator

    accelerator = NeuronAccelerator()
    model = torch.nn.Linear(2, 2)
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    interruption = accelerator.watch_for_interruption()

    def steps():
        with accelerator.join_uneven_inputs([model], even_batches=False):
            for _ in range(1 + accelerator.state.process_index):
                accelerator.backward(model(torch.ones(1, 2)).sum())
                optimizer.step()
                optimizer.zero_grad()
                assert not interruption.requested()

    with pytest.raises(UsageError, match="run out of data"):
        steps()
    accelerator.end_training()


def test_uneven_inputs_are_refused():
    run_ranks(joined, 2)


def bad_options():
    from neuron_accel import NeuronAccelerator

    accelerator, found = NeuronAccelerator(), []
    for options in ({"signals": ["SIGNAL"]}, {"signals": ["SIGKILL"]}):
        with pytest.raises(ConfigurationError) as error:
            accelerator.watch_for_interruption(**options)
        found.append(str(error.value))

    def elsewhere():
        with pytest.raises(UsageError) as error:
            accelerator.watch_for_interruption()
        found.append(str(error.value))

    thread = threading.Thread(target=elsewhere)
    thread.start()
    thread.join()
    return found


def test_bad_options_are_refused():
    expected = ("'SIGNAL' is not a signal", "SIGKILL cannot be handled", "main thread")
    for text, message in zip(expected, run_ranks(bad_options, 1)[0], strict=True):
        assert text in message


SCRIPT = """
import os, sys, time
import torch
from neuron_accel import NeuronAccelerator

accelerator = NeuronAccelerator(cpu=True)
model = torch.nn.Linear(4, 4)
model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
interruption = accelerator.watch_for_interruption()
for step in range(2000):
    accelerator.backward(model(torch.ones(1, 4)).sum())
    optimizer.step()
    optimizer.zero_grad()
    if step == 2 and accelerator.is_main_process:
        print("training", flush=True)
    time.sleep(0.01)
    if interruption.requested():
        time.sleep(float(sys.argv[2]))
        accelerator.save_state(sys.argv[1])
        break
accelerator.end_training()
"""


def test_an_interrupted_launch_saves_a_checkpoint(tmp_path):
    """Five seconds after an interrupt the launcher sends SIGTERM, which does not end a save."""
    script, last = tmp_path / "train.py", tmp_path / "last"
    script.write_text(SCRIPT)
    command = [sys.executable, "-m", "neuron_accel.cli.main", "launch", "--cpu", "--nproc-per-node", "2"]
    launcher = subprocess.Popen(
        [*command, str(script), str(last), "6"], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert launcher.stdout.readline() == "training\n"
    launcher.send_signal(signal.SIGINT)
    _, errors = launcher.communicate()
    assert launcher.returncode == 128 + signal.SIGINT, errors
    assert "stopping in 2 steps: SIGINT on rank" in errors
    assert verify(last) == []
