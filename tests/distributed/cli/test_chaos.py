"""``neuron-accel chaos`` injects faults into ranks of a script that does not know of it, and says what was lost."""

from __future__ import annotations

import json
import re
import time

import pytest

from tests import kills


@pytest.fixture
def inject(start, tmp_path):
    """Runs the script of the matrix of kills; returns the exit code, what is said of it and the messages."""
    (tmp_path / "train.py").write_text(kills.SCRIPT)

    def run(*options, steps=8, launch=(), timeout=250):
        words = ["--json", "--timeout", "240", *options, "--", "launch", "--nproc-per-node", "2", "--cpu", "--quiet"]
        words += ["--grace", "5", *launch, str(tmp_path / "train.py"), str(tmp_path), str(steps)]
        code, out, err = start(*words, command="chaos").finish(timeout=timeout)
        return code, json.loads(out), err

    return run


@pytest.mark.timeout(260)  # three starts of ranks, each of which imports torch
def test_killed_ranks_are_named_and_only_steps_are_lost(inject, tmp_path):
    """The launcher restarts once; after that the command itself is started again, as by a scheduler."""
    points = ["--point", "step:3", "--rank", "1", "--point", "worker:2"]
    code, outcome, err = inject(*points, launch=["--max-restarts", "1"])
    assert code == 0, err
    assert outcome["is_good"]
    assert (outcome["exit_code"], outcome["starts"], outcome["steps"]) == (0, 2, 8)
    first, second = outcome["faults"]
    assert [f["at"] for f in outcome["faults"]] == ["step", "worker"]
    assert [f["rank_hit"] for f in outcome["faults"]] == [1, 1]
    assert [f["named"] for f in outcome["faults"]] == [1, 1]
    assert first["resumed"] == "checkpoint_1"  # of two steps
    assert second["resumed"] >= "checkpoint_1"
    assert all(f["started_again"] and not f["is_older"] for f in (first, second))
    assert outcome["steps_lost"] <= 3
    assert err.count("neuron-accel: restart 1 of 1\n") == 1
    assert "DataLoader worker" in err
    faults, repeated = kills.check_losses(tmp_path / "losses")
    assert faults == []
    assert repeated == outcome["steps_lost"]


@pytest.mark.timeout(260)
def test_a_rank_that_is_stopped_goes_on(inject):
    """A rank that is stopped stays stopped for the given time."""
    actions = ["--point", "collective:20", "--action", "stop", "--seconds", "1.5"]
    began = time.monotonic()
    code, outcome, err = inject(*actions)
    assert code == 0, err
    (stopped,) = outcome["faults"]
    assert (stopped["at"], stopped["named"], stopped["started_again"]) == ("collective", None, False)
    assert (outcome["starts"], outcome["steps"], outcome["steps_lost"]) == (1, 8, 0)
    assert time.monotonic() - began > 1.5


@pytest.mark.slow
@pytest.mark.timeout(260)
@pytest.mark.parametrize("action", ["slow", "cpu", "memory", "descriptors"])
def test_starved_ranks_lose_no_checkpoint(inject, tmp_path, action):
    """Without memory or descriptors a rank fails; the next start has both."""
    allocation = "held = torch.empty(64 << 20, dtype=torch.uint8)\n        accelerator.save_state("
    (tmp_path / "train.py").write_text(kills.SCRIPT.replace("accelerator.save_state(", allocation))
    code, outcome, err = inject("--point", "save.open:4", "--action", action, launch=["--max-restarts", "1"])
    assert code == 0, err
    (starved,) = outcome["faults"]
    assert starved["at"] == "save.open"
    assert starved["started_again"] == (action in ("memory", "descriptors"))
    if action == "descriptors":
        assert "Too many open files" in err
    assert outcome["steps"] == 8
    assert kills.check_losses(tmp_path / "losses")[0] == []


@pytest.mark.slow
def test_a_script_that_does_not_resume_is_found(start, tmp_path):
    script = kills.SCRIPT.replace('accelerator.load_state(resume="latest")', "")
    script = script.replace("automatic_checkpoint_naming=True", "automatic_checkpoint_naming=False")
    script = script.replace("accelerator.save_iteration", "0").replace("save_state(", "save_state(folder + '/c', ")
    (tmp_path / "train.py").write_text(script)
    words = ["--point", "step:3", "--", "launch", "--nproc-per-node", "1", "--cpu", "--quiet"]
    code, out, err = start(*words, str(tmp_path / "train.py"), str(tmp_path), "4", command="chaos").finish(timeout=100)
    assert code == 1, err
    assert re.search(r"step:3 +0 +kill +rank 0 +nothing, which is older than the last one saved +2", out)
    assert "1 resumed that are older than the last one saved" in out


def test_a_command_that_fails_by_itself_is_not_started_again(start, tmp_path):
    (tmp_path / "train.py").write_text("raise SystemExit(3)")
    words = ["--point", "step:3", "--seed", "5", "--", "launch", "--cpu", "--quiet", str(tmp_path / "train.py")]
    code, out, err = start(*words, command="chaos").finish(timeout=60)
    assert code == 1, err
    assert "0 of 1 reached, seed 5" in out
    assert "exit code 3, started 1 time\n" in out
