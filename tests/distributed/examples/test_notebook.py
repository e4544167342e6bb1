"""The notebook: its cells run in order, and sharding changes no loss that it shows."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
NOTEBOOK = ROOT / "examples/notebook/train.ipynb"


def cells(kind):
    notebook = json.loads(NOTEBOOK.read_text())
    return ["".join(cell["source"]) for cell in notebook["cells"] if cell["cell_type"] == kind]


@pytest.mark.timeout(120)
def test_the_cells_run(tmp_path):
    program = tmp_path / "cells.py"
    program.write_text("\n".join(cells("code")))
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    with subprocess.Popen(
        [sys.executable, program],
        env=environment,
        cwd=tmp_path,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    ) as process:
        try:
            said, errors = process.communicate()
        finally:
            if process.poll() is None:  # its ranks are in its group
                os.killpg(process.pid, signal.SIGKILL)
    assert process.returncode == 0, errors
    losses = re.findall(r"ZeRO-1 ([\d.]+)  tensor parallel ([\d.]+)", said)
    assert len(losses) == 4
    assert all(float(one) == pytest.approx(float(other), abs=2e-3) for one, other in losses)
    assert float(losses[-1][0]) < float(losses[0][0]) / 1.2
    assert "123,200 parameters" in said


def test_it_is_saved_without_outputs():
    notebook = json.loads(NOTEBOOK.read_text())
    assert [cell for cell in notebook["cells"] if cell.get("outputs") or cell.get("execution_count")] == []
    assert cells("markdown")
