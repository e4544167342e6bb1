"""Skips what this machine cannot run, with the reason.

Where torch_xla is installed Accelerate chooses it, unless neuron_accel is imported before."""

from __future__ import annotations

import importlib.util
import os

os.environ.setdefault("ACCELERATE_USE_CPU", "true")

import pytest
from neuron_accel_emulation.neuron_ranks import missing
from torch.utils import backend_registration

from neuron_accel import NeuronAccelerator

assert NeuronAccelerator


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    old = not hasattr(backend_registration, "_setup_privateuseone_for_python_backend")
    reasons = {
        "test_stand_in.py": "this torch has no devices made in Python: use 2.13 or newer" if old else None,
        "test_emulated_ranks.py": missing(),
        "test_graph_check_xla.py": None if importlib.util.find_spec("torch_xla") else "torch_xla is not installed",
    }
    for item in items:
        reason = reasons.get(item.path.name) if "neuron-accel-emulation" in item.path.as_posix() else None
        if reason:
            item.add_marker(pytest.mark.skip(reason=reason))
