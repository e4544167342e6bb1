"""What ranks execute is recorded and checked: each kind of fault has its own finding."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
import torch
from neuron_accel_emulation import check_graphs


def faulty(fault):
    """Three steps of a small model with one fault."""
    from neuron_accel import NeuronAccelerator

    accelerator = NeuronAccelerator(backend="xla")
    model = torch.nn.Linear(16, 16)
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    total = torch.zeros(4, dtype=torch.int64).to(accelerator.device)
    for step in range(3):
        x = torch.ones(8 - (fault == "size") * step, 16).to(accelerator.device)
        loss = model(x).square().mean()
        if fault == "integers":
            import torch_xla.core.xla_model as xm

            total = xm.all_reduce("sum", total + 1, pin_layout=False)
        if fault == "constant":
            loss = torch.nn.functional.threshold(loss, -1.5 - step, 0.0)
        if fault == "slice":
            loss = loss + x[step : step + 2].sum()
        if fault == "ranks":
            loss = loss + accelerator.process_index
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()


@pytest.mark.parametrize(
    ("fault", "level", "code", "what"),
    [
        ("integers", "error", "NCC_EVRF061", "all-reduce of s64"),
        ("constant", "error", "constant", "the constant -2.5 and for -1.5"),
        ("slice", "error", "constant", "one slice f32[2,16] and for another"),
        ("size", "warning", "recompile", "for f32[7,16] and for f32[8,16]"),
        ("ranks", "error", "ranks", "ranks 1 execute a different graph from rank 0"),
    ],
)
def test_a_fault_is_found_with_its_line(fault, level, code, what):
    report = check_graphs(faulty, 2, fault)
    (finding, *_) = [f for f in report.findings if f.code == code]
    assert finding.level == level
    assert what in finding.what
    if fault in ("integers", "constant", "slice"):
        assert "test_graph_check_xla.py:" in finding.source


SCRIPT = """
import argparse
import torch
from neuron_accel import NeuronAccelerator

def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--scale", type=float)
    args = parser.parse_args()
    accelerator = NeuronAccelerator()
    assert accelerator.num_processes == 2 and accelerator.is_precompiling
    model = torch.nn.Linear(8, 8)
    data = torch.utils.data.DataLoader(torch.randn(64, 8), batch_size=2)
    model, optimizer, data = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1), data)
    for step, x in enumerate(data):
        loss = torch.nn.functional.threshold(model(x).square().mean(), -1.5 - args.scale * step, 0.0)
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        print("step", step)

if __name__ == "__main__":
    main()
"""


@pytest.mark.parametrize("scale", [0.0, 1.0], ids=["good", "faulty"])
def test_the_command(tmp_path, scale):
    (tmp_path / "train.py").write_text(SCRIPT)
    launch = ["neuron-accel", "launch", "--nproc-per-node", "2", "train.py", "--scale", str(scale)]
    words = [sys.executable, "-m", "neuron_accel.cli.main", "precompile", "--check", "--steps", "3"]
    found = subprocess.run(
        [*words, "--instance", "trn1.2xlarge", "--json", "--", *launch], cwd=tmp_path, capture_output=True, text=True
    )
    assert found.returncode == (1 if scale else 0), found.stderr
    report = json.loads(found.stdout)
    assert (report["ranks"], report["instance"], report["core_bytes"]) == (2, "trn1.2xlarge", 16 << 30)
    assert found.stderr.count("step 2") == 2, "three steps"
    assert "step 3" not in found.stderr
    assert all(graph["live_bytes"] > graph["input_bytes"] > 0 for graph in report["graphs"])
    found = {(f["code"], f["source"].rpartition("/")[2]) for f in report["findings"]}
    lines = {("constant", "train.py:16"), ("constant", "train.py:17")}  # of the loss, and of its backward pass
    assert found <= lines
    assert bool(found) == bool(scale)
