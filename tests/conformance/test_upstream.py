"""Accelerate's own scripts, unmodified, on two ranks with the class swapped."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

RUNNER = Path(__file__).parent / "run_upstream.py"
SCRIPTS = [
    "test_script.py",
    "test_sync.py",
    "test_ops.py",
    "test_distributed_data_loop.py",
    "external_deps/test_metrics.py",
]


def run_script(script, plugins):
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    return subprocess.run(
        [*command, str(RUNNER), script, "--plugins", plugins],
        env={**os.environ, "ACCELERATE_USE_CPU": "true", "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.mark.parametrize("plugins", ["", "zero1"], ids=["plain", "zero1"])
@pytest.mark.parametrize("script", SCRIPTS)
def test_upstream_script(script, plugins):
    if script == "test_distributed_data_loop.py":
        pytest.importorskip("torchdata", reason="the script needs torchdata's StatefulDataLoader")
    result = run_script(script, plugins)
    assert result.returncode == 0, f"{result.stdout[-3000:]}\n{result.stderr[-6000:]}"
    # Two processes, not two worlds of one.
    expected = {"test_sync.py": "**Test Distributed `no_sync` context manager**", "test_ops.py": "Num processes: 2"}
    assert expected.get(script, "") in result.stdout
