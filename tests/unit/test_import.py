"""What importing costs, counted in modules beside Accelerate's."""

from __future__ import annotations

import json
import subprocess
import sys

HEAVY = ("torch", "accelerate", "transformers", "torch_xla", "datasets", "pandas")


def run(code: str):
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return json.loads(result.stdout.splitlines()[-1])


def imported(statement: str) -> list[str]:
    return run(f"import json, sys; {statement}; print(json.dumps([m for m in {HEAVY!r} if m in sys.modules]))")


def packages_beside_accelerate(statement: str) -> set[str]:
    listing = "print(json.dumps(sorted(sys.modules)))"
    known = run(f"import json, sys; import accelerate; {listing}")
    found = run(f"import json, sys; {statement}; {listing}")
    return {module.partition(".")[0] for module in {*found} - {*known}} - sys.stdlib_module_names


def test_the_package_alone_imports_nothing_heavy():
    assert imported("import neuron_accel") == []


def test_the_accelerator_and_the_plugins_import_neither_transformers_nor_torch_xla():
    names = "NeuronAccelerator, Zero1Plugin, ModelParallelismPlugin, SequenceParallelPlugin, DataParallelPlugin"
    assert imported(f"from neuron_accel import {names}") == ["torch", "accelerate"]


def test_importing_costs_accelerate_and_our_own_modules():
    assert packages_beside_accelerate("import neuron_accel") == {"neuron_accel"}
    assert packages_beside_accelerate("from neuron_accel import NeuronAccelerator") == {"neuron_accel", "xxhash"}
