"""The matrix of kills (tests/kills.py) with some of its kills, and that it finds what is lost."""

from __future__ import annotations

import os
import shutil

import pytest

from neuron_accel.checkpoint.tools.output import Output
from neuron_accel.testing import run_ranks
from tests import kills
from tests.distributed.checkpoint.checkpoint_support import train_and_save
from tests.faults import Fault


@pytest.mark.timeout(300)
@pytest.mark.parametrize("name", ["zero1", "tp2 x dp2", "pp2"])
def test_ranks_that_are_killed_anywhere_lose_no_checkpoint(tmp_path, name):
    report = kills.kill_training(tmp_path / "run", name, 6, seed=0)
    assert report.problems == []
    assert sum(report.kills.values()) == sum(report.named.values()) == 6
    assert report.resumed >= 2


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    folder = tmp_path_factory.mktemp("checkpoint")
    run_ranks(train_and_save, 2, str(folder / "c"), "llama", ["zero1"])
    return folder / "c"


def test_consolidate_that_is_killed_is_run_again(checkpoint, tmp_path):
    report = kills.kill_tool(checkpoint, tmp_path / "run", every=9)
    assert report.problems == []
    assert sum(report.kills.values()) >= 6


def test_what_a_killed_tool_has_left_would_be_found(checkpoint, tmp_path, monkeypatch):
    monkeypatch.setattr(Output, "_remove_unfinished", lambda self: None)
    report = kills.kill_tool(checkpoint, tmp_path / "run", every=20)
    assert any("the next run ended with 1" in problem for problem in report.problems)


def test_a_checkpoint_that_is_lost_is_found(tmp_path):
    chaos, folder = tmp_path / "chaos", tmp_path / "run"
    kills.make_plan(chaos, [])
    ended = kills.Training(folder, 1, ["zero1"]).start(chaos, 3)
    assert ended.exit_code == 0, ended.output
    assert kills._checkpoints(folder, chaos) == []
    newest = folder / "checkpoints" / "checkpoint_2"
    damaged = next((newest / "optimizer").iterdir()) if (newest / "optimizer").is_dir() else newest / "manifest.json"
    with open(damaged, "r+b") as file:
        file.seek(-1, os.SEEK_END)
        file.write(b"\xff")
    assert "checkpoint_2 is damaged" in kills._checkpoints(folder, chaos)[0]
    shutil.rmtree(newest)
    assert kills._checkpoints(folder, chaos) == [f"the newest is checkpoint_1, and {newest} had been saved"]


def test_losses_of_repeated_steps_are_compared(tmp_path):
    (tmp_path / "losses").write_text("1 0.5\n2 0.25\n2 0.25\n1 0.6\n")
    assert kills.check_losses(tmp_path / "losses") == (["step 1 had loss 0.5, and 0.6 when it was repeated"], 2)


def test_every_point_and_rank_is_chosen_before_one_is_chosen_twice():
    found = [Fault(point=p, rank=r, count=n) for p in "abc" for r in (0, 1) for n in range(1, 50)]
    chosen = kills.choose(found, 9, seed=1)
    assert {(f.point, f.rank) for f in chosen} == {(p, r) for p in "abc" for r in (0, 1)}
    assert kills.choose(found, 9, seed=1) == chosen != kills.choose(found, 9, seed=2)
