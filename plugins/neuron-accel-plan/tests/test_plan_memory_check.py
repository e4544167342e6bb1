"""``launch --check-memory``: the script runs dry first, and the launcher says whether it will fit."""

from __future__ import annotations

from neuron_accel_plan.plan_text import brief

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


def test_what_does_not_fit_or_is_tight_is_named():
    from neuron_accel_plan.layout import LayoutCount
    from neuron_accel_plan.memory import Moment, Peak
    from neuron_accel_plan.step import StepCount

    def counted(**parts: int) -> LayoutCount:
        step = StepCount(peaks=(Peak(Moment("backward"), parts),), flows=(), operations=0, weights=0)
        return LayoutCount(
            model="Llama",
            parameters=1,
            mesh="dp 2",
            plugins=(),
            rank=0,
            micro_batch=1,
            accumulation=1,
            sequence=8,
            layers=1,
            extrapolated=False,
            step=step,
            slowest=step,
            instance="trn2.48xlarge",
            core_bytes=24 << 30,
            reserve=2 << 30,
        )

    step = "the second step of rank 0"
    text = brief(counted(weights=6 << 30, activations=20 << 30), step)
    assert text.startswith("WARNING: this run does NOT fit: 26 GiB at the peak of the second step of rank 0")
    assert "more than the 24 GiB of a core of trn2.48xlarge; most of it is activations, 20 GiB" in text
    text = brief(counted(weights=3 << 30, activations=20 << 30), step)
    assert text.startswith("WARNING: this run is tight: 23 GiB")
    assert "96% of the 24 GiB of a core of trn2.48xlarge, which does not leave 2 GiB" in text
    assert brief(counted(activations=20 << 30), step).startswith("memory: 20 GiB at the peak of the second")


def test_an_unknown_instance_is_refused(tmp_path, capsys):
    path = tmp_path / "train.py"
    path.write_text(SCRIPT)
    assert main(["launch", "--dry-run", "--check-memory", str(path)]) == 2
    assert "add --instance" in capsys.readouterr().err
