"""What importing costs: modules, and time beside Accelerate's."""

from __future__ import annotations

import json
import subprocess
import sys

HEAVY = ("torch", "accelerate", "transformers", "torch_xla", "datasets", "pandas")


def run(code: str):
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    return json.loads(result.stdout.splitlines()[-1])


def imported(statement: str) -> list[str]:
    return run(f"import json, sys; {statement}; print(json.dumps([m for m in {HEAVY!r} if m in sys.modules]))")


def cpu_seconds(statement: str) -> float:
    return run(f"import json, time; {statement}; print(json.dumps(time.process_time()))")


def test_the_package_alone_imports_nothing_heavy():
    assert imported("import neuron_accel") == []


def test_the_accelerator_and_the_plugins_import_neither_transformers_nor_torch_xla():
    names = "NeuronAccelerator, Zero1Plugin, ModelParallelismPlugin, SequenceParallelPlugin, DataParallelPlugin"
    assert imported(f"from neuron_accel import {names}") == ["torch", "accelerate"]


def test_importing_costs_little_more_than_accelerate():
    # Processor time, the least of three: other programs on the machine make it larger, nothing makes it smaller.
    statements = ("import accelerate", "import neuron_accel", "from neuron_accel import NeuronAccelerator")
    costs = {s: min(cpu_seconds(s) for _ in range(3)) for s in statements}
    assert costs["import neuron_accel"] < 1.2 * costs["import accelerate"]
    assert costs["from neuron_accel import NeuronAccelerator"] < 1.3 * costs["import accelerate"]
