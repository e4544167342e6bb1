"""``launch --check-memory``: the script runs dry first, and the launcher says whether it will fit."""

from __future__ import annotations

from neuron_accel_plan.plan_command import fits

from neuron_accel import find_instance
from neuron_accel.commands import main

SCRIPT = """
import sys
import torch
from neuron_accel import NeuronAccelerator

accelerator = NeuronAccelerator()
model = torch.nn.Linear(1024, 1024)
model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters()))
print(accelerator.world_size, "ranks", sys.argv[1:])
if "--fail" in sys.argv:
    sys.exit("no such option: --fail")
while True:
    accelerator.backward(model(torch.ones(4, 1024, device=accelerator.device)).sum())
    optimizer.step()
"""


def test_the_launcher_runs_the_script_dry_and_warns_only(tmp_path, capfd):
    path = tmp_path / "train.py"
    path.write_text(SCRIPT)
    words = ["launch", "--dry-run", "--check-memory", "--instance", "trn1.32xlarge", "--nproc-per-node", "8"]
    assert main([*words, str(path), "--epochs", "3"]) == 0
    output = capfd.readouterr()
    assert "memory: 0.02" in output.err  # weights, gradients, two moments, and a bucket or temporary memory: 20 MiB
    assert "0% of the 16 GiB of a core of trn1.32xlarge" in output.err
    assert "8 ranks of" in output.out
    assert main([*words, str(path), "--fail"]) == 0
    output = capfd.readouterr()
    assert "is not known" in output.err
    assert "8 ranks ['--fail']" in output.err
    assert "no such option: --fail" in output.err


def test_what_does_not_fit_is_named():
    parts, step = {"weights": 6 << 30, "saved activations": 20 << 30}, "the second step of rank 0"
    text = fits(parts, step, find_instance("trn2.48xlarge"), 1)
    assert text.startswith("WARNING: this run does NOT fit: 26 GiB")
    assert "more than the 12 GiB of a core of trn2.48xlarge" in text
    assert "saved activations, becomes smaller with recomputation" in text
    parts["weights"] = 0
    assert fits(parts, step, find_instance("trn2.48xlarge"), 2).startswith("memory: 20 GiB at the peak of the second")


def test_an_unknown_instance_is_refused(tmp_path, capsys):
    path = tmp_path / "train.py"
    path.write_text(SCRIPT)
    assert main(["launch", "--dry-run", "--check-memory", str(path)]) == 2
    assert "add --instance" in capsys.readouterr().err
