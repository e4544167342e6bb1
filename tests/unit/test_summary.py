"""What a run of tests ends with, and that no test compares seconds."""

from __future__ import annotations

import ast
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

from tests.summary import Seconds, kind_of, seconds_so_far, shuffled, suite_of

ROOT = Path(__file__).parents[2]
CLOCKS = {"monotonic", "monotonic_ns", "perf_counter", "perf_counter_ns", "process_time", "thread_time", "time"}


def test_suites_are_folders_and_packages():
    assert suite_of("tests/unit/loop/test_step.py::test_a[1/2]") == "tests/unit"
    assert suite_of("plugins/neuron-accel-lora/tests/test_a.py::test_a") == "plugins/neuron-accel-lora"


def test_kinds_of_what_is_skipped_name_the_session_that_has_it():
    assert kind_of("torch 2.13.0+cpu is built without CUDA").endswith("nox -s cuda")
    assert kind_of("another reason") == "another reason"


def test_files_are_shuffled_and_the_cases_of_one_stay_in_order():
    names = [f"tests/unit/test_{file}.py::test_{case}" for file in range(9) for case in range(3)]
    cases = [SimpleNamespace(nodeid=name) for name in names]
    orders = [[case.nodeid for case in shuffled(cases, seed)] for seed in (1, 1, 2)]
    assert orders[0] == orders[1] != orders[2]
    assert sorted(orders[0]) == names
    assert all(order[i : i + 3] == sorted(order[i : i + 3]) for order in orders for i in range(0, 27, 3))


def test_processor_time_is_of_the_user_and_of_the_system():
    before = seconds_so_far()
    for _ in range(20):
        sorted(range(100_000), key=lambda number: -number)
    after = seconds_so_far()
    assert isinstance(after, Seconds)
    assert sum(after) > sum(before)


def differences_of_clocks(tree: ast.Module) -> list[int]:
    """Lines that subtract from what a clock says, or that from something."""
    return [
        node.lineno
        for node in ast.walk(tree)
        if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Sub)
        for side in (node.left, node.right)
        if isinstance(side, ast.Call) and isinstance(side.func, ast.Attribute) and side.func.attr in CLOCKS
    ]


def test_no_test_compares_seconds():
    """They differ between machines. What should not take long has a time limit, which a busy machine extends; what a
    thing costs is counted in calls, bytes or executions, and measured in ``benchmarks``."""
    assert differences_of_clocks(ast.parse("began = time.monotonic()\nassert time.monotonic() - began < 3")) == [2]
    files = [*ROOT.glob("tests/**/test_*.py"), *ROOT.glob("plugins/*/tests/**/test_*.py")]
    assert len(files) > 200
    found = {str(path.relative_to(ROOT)): differences_of_clocks(ast.parse(path.read_text())) for path in files}
    assert {path: lines for path, lines in found.items() if lines} == {}


def test_without_a_gpu_its_tests_are_skipped_with_the_reason():
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-rs", "-q", "tests/cuda"]
    hidden = {**os.environ, "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(command, cwd=ROOT, env=hidden, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "passed" not in done.stdout
    assert "skipped" in done.stdout
    assert "no CUDA ranks: torch" in done.stdout
