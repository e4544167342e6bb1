"""Faults are injected into ranks of a launch (tests/faults.py), and it is said what was lost."""

from __future__ import annotations

import pytest

from tests import kills
from tests.faults import Fault, run_command


@pytest.fixture
def inject(tmp_path):
    """Runs the script of the matrix of kills; returns what is said of it."""
    (tmp_path / "train.py").write_text(kills.SCRIPT)

    def run(*faults, steps=8, ranks=2, launch=()):
        words = ["launch", "--nproc-per-node", str(ranks), "--cpu", "--quiet", "--grace", "5", *launch]
        return run_command([*words, str(tmp_path / "train.py"), str(tmp_path), str(steps)], faults, timeout=240)

    return run


@pytest.mark.timeout(260)  # three starts of ranks, each of which imports torch
def test_killed_ranks_are_named_and_only_steps_are_lost(inject, tmp_path):
    """The launcher restarts once; after that the command itself is started again, as by a scheduler."""
    faults = [Fault(point="step", count=3, rank=1), Fault(point="worker", count=2, rank=1)]
    outcome = inject(*faults, launch=["--max-restarts", "1"])
    assert outcome.is_good, outcome.errors
    assert (outcome.exit_code, outcome.starts, outcome.steps) == (0, 2, 8)
    first, second = outcome.faults
    assert [f.at for f in outcome.faults] == ["step", "worker"]
    assert [f.rank_hit for f in outcome.faults] == [1, 1]
    assert [f.named for f in outcome.faults] == [1, 1]
    assert first.resumed == "checkpoint_1"  # of two steps
    assert second.resumed >= "checkpoint_1"
    assert all(f.started_again and not f.is_older for f in (first, second))
    assert outcome.steps_lost <= 3
    assert outcome.errors.count("neuron-accel: restart 1 of 1\n") == 1
    assert "DataLoader worker" in outcome.errors
    faults, repeated = kills.check_losses(tmp_path / "losses")
    assert faults == []
    assert repeated == outcome.steps_lost


@pytest.mark.timeout(260)
def test_a_rank_that_is_stopped_goes_on(inject):
    outcome = inject(Fault(point="collective", count=20, rank=0, action="stop", seconds=1.5))
    assert outcome.is_good, outcome.errors
    (stopped,) = outcome.faults
    assert (stopped.at, stopped.named, stopped.started_again) == ("collective", None, False)
    assert (outcome.starts, outcome.steps, outcome.steps_lost) == (1, 8, 0)


@pytest.mark.slow
@pytest.mark.timeout(260)
@pytest.mark.parametrize("action", ["slow", "cpu", "memory", "descriptors"])
def test_starved_ranks_lose_no_checkpoint(inject, tmp_path, action):
    """Without memory or descriptors a rank fails; the next start has both."""
    allocation = "held = torch.empty(64 << 20, dtype=torch.uint8)\n        accelerator.save_state("
    (tmp_path / "train.py").write_text(kills.SCRIPT.replace("accelerator.save_state(", allocation))
    outcome = inject(Fault(point="save.open", count=4, rank=1, action=action), launch=["--max-restarts", "1"])
    assert outcome.is_good, outcome.errors
    (starved,) = outcome.faults
    assert starved.at == "save.open"
    assert starved.started_again == (action in ("memory", "descriptors"))
    if action == "descriptors":
        assert "Too many open files" in outcome.errors
    assert outcome.steps == 8
    assert kills.check_losses(tmp_path / "losses")[0] == []


@pytest.mark.slow
def test_a_script_that_does_not_resume_is_found(inject, tmp_path):
    script = kills.SCRIPT.replace('accelerator.load_state(resume="latest")', "")
    script = script.replace("automatic_checkpoint_naming=True", "automatic_checkpoint_naming=False")
    script = script.replace("accelerator.save_iteration", "0").replace("save_state(", "save_state(folder + '/c', ")
    (tmp_path / "train.py").write_text(script)
    outcome = inject(Fault(point="step", count=3, rank=0), steps=4, ranks=1)
    assert not outcome.is_good
    (fault,) = outcome.faults
    assert (fault.named, fault.resumed, fault.is_older, fault.steps_lost) == (0, None, True, 2)


def test_a_command_that_fails_by_itself_is_not_started_again(tmp_path):
    (tmp_path / "train.py").write_text("raise SystemExit(3)")
    outcome = run_command(
        ["launch", "--cpu", "--quiet", str(tmp_path / "train.py")], [Fault(point="step", count=3, rank=0)], timeout=60
    )
    assert (outcome.is_good, outcome.exit_code, outcome.starts) == (False, 3, 1)
    assert not outcome.faults[0].was_reached
