"""The benchmark of ZeRO-1, on a tiny model: what it counts is what its table in the documentation says."""

from __future__ import annotations

import pytest

from benchmarks.zero1 import PEERS, main


@pytest.mark.slow
@pytest.mark.timeout(150)
def test_zero1_keeps_half_of_the_state_and_sends_what_ddp_sends(capsys):
    main(["--small", "--ranks", "2", "--optimizers", "fused", "--repeat", "2", "--libraries", "gloo"])
    printed = capsys.readouterr().out
    assert "## 2 ranks on gloo, fused AdamW" in printed
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in printed.splitlines() if line.startswith("|")]
    found = {peer: (float(state), float(sent)) for peer, *_, state, sent in rows[2:]}
    assert found.keys() >= PEERS.keys()
    assert found["Zero1Plugin"] == pytest.approx((1, 1), abs=0.02)
    assert found["DDP"] == pytest.approx((2, 1), abs=0.02)
