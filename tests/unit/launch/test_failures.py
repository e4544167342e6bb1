"""The rank that is reported as the first failure, and the text of the report."""

from __future__ import annotations

import itertools
import signal
import time

import pytest

from neuron_accel.engine.plan.restart import WAITING_FILE
from neuron_accel.launch.agent import RankLogs, SilentExits
from neuron_accel.launch.failures import LINES_SHOWN, RankFailure, RankSuccess, describe, first_failure


def failure(rank, exit_code, noticed=100.0, raised=None, summary=None, stderr=None):
    return RankFailure(rank=rank, exit_code=exit_code, noticed=noticed, raised=raised, summary=summary, stderr=stderr)


RAISED_FIRST = failure(2, 1, raised=99.90, summary="ValueError: boom")
RAISED_LATER = failure(0, 1, raised=99.95, summary="RuntimeError: Connection closed by peer")
ENDED = failure(1, -signal.SIGTERM)
KILLED = failure(3, -signal.SIGKILL)
EXITED = failure(3, 7)


@pytest.mark.parametrize(
    ("failures", "rank"),
    [
        ([RAISED_LATER, RAISED_FIRST, ENDED], 2),  # the earlier exception
        ([RAISED_LATER, KILLED, ENDED], 3),  # who was killed said nothing; its peers did
        ([RAISED_LATER, EXITED, ENDED], 3),  # nor did who left through os._exit
        ([ENDED, RAISED_LATER], 0),  # SIGTERM is how the launcher ends the rest
    ],
)
def test_the_cause_is_told_from_its_consequences(failures, rank):
    for order in itertools.permutations(failures):
        assert first_failure(order).rank == rank


def test_ranks_killed_after_the_grace_are_consequences():
    stubborn = failure(0, -signal.SIGKILL, noticed=130.0)
    assert first_failure([RAISED_FIRST, stubborn]).rank == 2


def test_if_all_were_ended_the_one_noticed_first_was_first():
    assert first_failure([failure(1, -signal.SIGTERM), failure(0, -signal.SIGTERM)]).rank == 1


@pytest.mark.parametrize(("exit_code", "shell"), [(1, 1), (3, 3), (-9, 137), (-11, 139)])
def test_the_exit_code_is_that_of_a_shell(exit_code, shell):
    assert failure(0, exit_code).shell_code == shell


def test_the_report_shows_how_where_and_what_followed(tmp_path):
    log = tmp_path / "rank_2" / "stderr.log"
    log.parent.mkdir()
    log.write_text("\n".join(f"line {number}" for number in range(1000)))
    report = describe([RAISED_LATER, failure(2, 1, raised=99.9, summary="ValueError: boom", stderr=log), ENDED])
    lines = report.splitlines()
    assert lines[0] == "rank 2 failed first: exit code 1, ValueError: boom"
    assert str(log.parent) in lines[1]
    assert "  | line 999" in lines
    assert sum(line.startswith("  | ") for line in lines) == LINES_SHOWN
    assert "  then rank 0: exit code 1, RuntimeError: Connection closed by peer" in lines
    assert lines[-1] == "  ended as a consequence: rank 1"


def test_a_rank_that_ended_early_is_reported_before_the_one_that_failed():
    left = RankSuccess(rank=1, host="a", ended=99.0, left_at="train.py, line 7")
    done = RankSuccess(rank=2, host="a", ended=99.5)
    later = RankSuccess(rank=3, host="a", ended=99.97, left_at="train.py, line 7")
    silent = RankSuccess(rank=4, host="a")
    lines = describe([RAISED_LATER], [later, done, left, silent]).splitlines()
    assert lines[0].startswith("rank 4 on a ended before the others: exit code 0 without reaching the end")
    assert lines[1] == "rank 1 on a ended before the others: sys.exit at train.py, line 7 (exit code 0)"
    assert lines[2].startswith("rank 0 failed first: exit code 1, RuntimeError")
    assert lines[3] == "  ranks that had reached the end of the script before, with exit code 0: 2"
    assert "rank 3" not in "\n".join(lines)


def test_a_kill_comes_with_its_usual_reason():
    report = describe([KILLED])
    assert "ended by SIGKILL" in report
    assert "memory" in report


def test_a_missing_log_is_no_reason_to_fail_again(tmp_path):
    assert "no error output" in describe([failure(1, 1, stderr=tmp_path / "gone")])


def test_the_error_is_shown_though_the_disk_of_the_logs_was_full(tmp_path):
    (tmp_path / "stderr.log").touch()
    failed = RankFailure(rank=1, exit_code=1, noticed=1.0, stderr=tmp_path / "stderr.log", stack="Traceback\nboom\n")
    assert describe([failed]).splitlines()[-2:] == ["  | Traceback", "  | boom"]


def test_what_any_rank_says_of_ranks_that_it_waits_for_is_shown_and_repeated_at_the_end(tmp_path, capfd):
    logs = RankLogs(tmp_path, tmp_path, tee=False, keep_first=False)
    logs.notes, logs.shown = {0: tmp_path / "rank_0", 1: tmp_path / "rank_1"}, {0}
    for rank, folder in logs.notes.items():
        folder.mkdir()
        (folder / WAITING_FILE).write_text(f"rank {rank} waits\n  for rank 2\n")
    said, until = "", time.monotonic() + 60
    with SilentExits(logs):
        while "for rank 2" not in said and time.monotonic() < until:
            time.sleep(0.05)
            said += capfd.readouterr().err
    assert said == "rank 1 waits\n  for rank 2\n"
    report = describe([KILLED], reports=[logs.reports()[1]])
    assert report.splitlines()[-2:] == ["  before: rank 1 waits", "  before:   for rank 2"]
