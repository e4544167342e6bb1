"""The counts of a step on XLA in docs/xla.md."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.xla import OURS, PEERS, count, counts_table
from neuron_accel.testing import run_ranks

PAGE = Path(__file__).parents[2] / "docs" / "xla.md"


def rows(table, names):
    """Of each row, the number of instructions, which changes with transformers, and the other cells."""
    found = {}
    for line in table.splitlines():
        name, *cells = [cell.strip().replace(",", "") for cell in line.strip("|").split("|")]
        if name in (short := {each.replace(",", ""): each for each in names}):
            found[short[name]] = int(cells.pop(2)), cells
    return found


def check(names, folder):
    found = run_ranks(count, 2, names, str(folder), backend="xla", timeout=280)[0]
    counted, documented = rows(counts_table(found), names), rows(PAGE.read_text(), names)
    assert {name: cells for name, (_, cells) in counted.items()} == {n: cells for n, (_, cells) in documented.items()}
    assert list(counted) == names
    for name, (instructions, _) in counted.items():
        assert instructions == pytest.approx(documented[name][0], rel=0.02)


@pytest.mark.timeout(300)
def test_the_table_is_what_is_counted(tmp_path):
    """In one process, in the order of the table: an evaluation is compiled once for all who have the same graph."""
    assert len(OURS) == 6
    check(OURS, tmp_path)


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_the_rows_of_peers(tmp_path):
    check(list(PEERS), tmp_path)
