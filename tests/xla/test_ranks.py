"""Functions on XLA ranks, and their errors."""

from __future__ import annotations

import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from neuron_accel.testing import RanksError, run_ranks


def fail_alike():
    raise ValueError("as all do")


def test_a_failure_of_all_ranks_is_said_once():
    with pytest.raises(RanksError) as caught:
        run_ranks(fail_alike, 2, backend="xla", timeout=60)
    text = str(caught.value)
    assert text.count("Traceback (most recent call last)") == 1
    assert "_xla_process.py" not in text
    assert len(text.splitlines()) < 10


SCRIPT = """
from neuron_accel.testing import run_ranks

def mine(x):
    return x + 1

if __name__ == "__main__":
    print(run_ranks(mine, 2, 1, backend="xla"))
"""


def test_a_function_of_a_script(tmp_path):
    (tmp_path / "script.py").write_text(SCRIPT)
    result = subprocess.run([sys.executable, tmp_path / "script.py"], capture_output=True, text=True, check=False)
    assert result.stdout.strip().endswith("[2, 2]"), result.stderr


def reads_before() -> int | None:
    import torch_xla.debug.metrics as metrics

    return metrics.counter_value("aten::_local_scalar_dense")


def test_reading_a_value_is_safe_from_the_first_time_on():
    """torch_xla's map of operators that run on the CPU has no lock: the entry for item() is there before the ranks,
    which are threads, could both create it."""
    assert run_ranks(reads_before, 2, backend="xla") == [1, 1]


def rank_and(value: int) -> tuple[int, int]:
    import torch_xla.runtime as xr

    return xr.global_ordinal(), value


def test_threads_of_a_test_each_have_ranks_of_their_own():
    with ThreadPoolExecutor(2) as pool:
        found = list(pool.map(lambda value: run_ranks(rank_and, 2, value, backend="xla"), range(4)))
    assert found == [[(0, value), (1, value)] for value in range(4)]


def names_of_threads():
    return {path.read_text().strip() for path in Path("/proc/self/task").glob("*/comm")}


def test_autograds_threads_run_before_ranks_can_start_them_twice():
    """After a fork each thread with a first backward pass creates autograd's engine anew, without a lock."""
    for names in run_ranks(names_of_threads, 2, backend="xla", timeout=60):
        assert any(name.startswith("pt_autograd") for name in names), names
