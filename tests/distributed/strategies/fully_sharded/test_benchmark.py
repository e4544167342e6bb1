"""The benchmark beside FSDP runs, and notices a peer that trains something else."""

from dataclasses import replace

import pytest

from benchmarks.fully_sharded import (
    KEEPING,
    RESHARDING,
    STAGE_2,
    STAGE_3,
    Counts,
    Size,
    check_losses,
    count,
    main,
    tensors,
)
from neuron_accel.backends.select import SHARED_MEMORY_VARIABLE
from neuron_accel.testing import run_ranks

SMALL = Size(hidden=64, layers=2, vocabulary=256, tokens=16)


@pytest.mark.slow
def test_prints_a_table_of_all_that_it_measures(capsys):
    small = ["--small", "--ranks", "2", "--repeat", "2", "--libraries", "gloo"]
    main([*small, "--optimizers", "fused", "--peers", STAGE_3])
    lines = capsys.readouterr().out.strip().splitlines()
    assert lines[0].startswith("## 2 ranks on gloo, fused AdamW")
    rows = {line.split(" | ")[0].lstrip("| "): line.split(" | ") for line in lines[2:]}
    assert len({len(row) for row in rows.values()}) == 1
    assert set(rows) >= {STAGE_3, RESHARDING, "DDP"}


def test_counts_what_a_step_needs():
    ranks = run_ranks(count, 2, STAGE_3, SMALL, False, env={SHARED_MEMORY_VARIABLE: "0"})
    first = ranks[0]
    assert first.counted == pytest.approx(first.sent, rel=0.02)
    assert 0 < first.kept < first.live
    assert first.collectives > 0
    assert first.resident > 0
    assert first.losses[0] > first.losses[-1]


def peaks(size):
    """Peak of the bytes of live tensors in a step, by peer."""
    return {name: tensors(name, size, True)[1] for name in (STAGE_3, STAGE_2, RESHARDING, KEEPING)}


@pytest.mark.parametrize("ranks", [2, 4])
def test_no_more_is_alive_than_under_fsdp2(ranks):
    large_head = Size(hidden=64, layers=4, vocabulary=1 << 15, tokens=16)
    for of_rank in run_ranks(peaks, ranks, large_head):
        assert of_rank[STAGE_3] < of_rank[RESHARDING]
        assert of_rank[STAGE_2] < of_rank[KEEPING]


def test_a_peer_with_other_losses_is_an_error():
    fine = Counts(losses=[2.0, 1.5], sent=1, counted=None, collectives=1, live=1, kept=1, resident=1)
    check_losses({"DDP": [fine], "a peer": [replace(fine, losses=[2.00001, 1.5])]})
    with pytest.raises(RuntimeError, match="a peer has losses"):
        check_losses({"DDP": [fine], "a peer": [replace(fine, losses=[2.0, 1.4])]})
