"""Where faults are injected (tests/injector.py), and what is read from the journal (tests/faults.py)."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

import neuron_accel
from neuron_accel.backends.events import Events
from neuron_accel.backends.group import Group
from tests.faults import Fault, History, Outcome, read_journal
from tests.injector import DONE, JOURNAL, PLAN, POINTS, FaultInjector, _observer

SOURCES = Path(neuron_accel.__file__).parent


def test_every_operation_on_files_is_a_point():
    text = "\n".join(path.read_text() for path in SOURCES.rglob("*.py"))
    operations = set(re.findall(r'\.operation\("(\w+)"', text))
    works = ("save", "consolidate")
    assert {point for point in POINTS if "." in point} == {f"{work}.{name}" for work in works for name in operations}


def test_the_product_raises_no_audit_events():
    assert not [path for path in SOURCES.rglob("*.py") if "sys.audit" in path.read_text()]


# ---- where faults are injected ---------------------------------------------------------------------------------------
@pytest.fixture
def injector(tmp_path, monkeypatch):
    """Makes an injector of a plan of faults; an action that does no harm marks the place."""

    def make(*faults, rank=0, size=2, counts=False):
        plan = {"faults": [{**FAULT, **fault} for fault in faults], "counts": counts}
        (tmp_path / PLAN).write_text(json.dumps(plan))
        monkeypatch.setenv("RANK", str(rank))
        monkeypatch.setenv("WORLD_SIZE", str(size))
        return FaultInjector(str(tmp_path))

    return make


FAULT = {"point": "step", "count": 1, "rank": None, "action": "slow", "seconds": 0.0}


def injected_at(folder):
    return [(line["number"], line["point"], line["rank"]) for line in read_journal(folder) if line["event"] == "fault"]


def test_a_fault_is_injected_at_the_nth_event_once(injector, tmp_path):
    process, events = injector({"count": 3}), Events()
    events.observe(_observer(process))
    for _ in range(6):
        with events.open("backward", "part"), events.collective("all_reduce", Group((0, 1), 0, ((0, 1),), "dp")):
            pass
        with events.open("optimizer step", "step", part="optimizer", optimizer=1):
            reached = injected_at(tmp_path)
    assert reached == [(0, "step", 0)]
    assert (tmp_path / DONE.format(0)).exists()
    assert [line["event"] for line in read_journal(tmp_path)].count("stepped") == 6


def test_a_step_that_fails_is_not_one(injector, tmp_path):
    process, events = injector({"point": "load"}), Events()
    events.observe(_observer(process))
    with pytest.raises(ValueError), events.open("optimizer step", "step", optimizer=1):
        raise ValueError
    assert "stepped" not in [line["event"] for line in read_journal(tmp_path)]


def test_files_that_a_load_opens_are_points(injector, tmp_path):
    process, events = injector({"point": "load", "count": 2}), Events()
    events.observe(_observer(process))
    checkpoint = tmp_path / "checkpoint_3"
    with events.open("load_state", "call"):
        process._audit("open", (str(tmp_path / "checkpoint_4/manifest.json"), "r", 0))  # incomplete
        process._audit("open", (str(checkpoint / "manifest.json"), "r", 0))
        process._audit("open", (b"other", "r", 0))
        assert injected_at(tmp_path) == []
        process._audit("open", (checkpoint / "model" / "a.safetensors", "rb", 0))
        assert injected_at(tmp_path) == [(0, "load", 0)]
    process._audit("open", (str(checkpoint / "manifest.json"), "r", 0))
    loaded = [line for line in read_journal(tmp_path) if line["event"] == "loaded"]
    assert [line["checkpoint"] for line in loaded] == [str(checkpoint)]


def test_a_save_has_returned_when_its_lock_is_removed(injector, tmp_path):
    process = injector({"point": "load"})
    process._audit("os.remove", (tmp_path / ".saving.json", -1))  # it has failed
    (tmp_path / "manifest.json").touch()
    process._audit("os.remove", (tmp_path / "manifest.json", -1))
    process._audit("os.remove", (tmp_path / ".saving.json", -1))
    saved = [line for line in read_journal(tmp_path) if line["event"] == "saved"]
    assert [line["checkpoint"] for line in saved] == [str(tmp_path)]


def test_a_part_of_a_name_means_all_its_points(injector, tmp_path):
    process = injector({"point": "save", "count": 2})
    for name in ("saves", "save.open", "save.write", "save.fsync"):
        process.reach(name)
    assert injected_at(tmp_path) == [(0, "save.write", 0)]


def test_faults_follow_one_another_on_whichever_rank(injector, tmp_path):
    faults = [{"count": 2, "rank": 1}, {"count": 2, "rank": 0}, {"count": 1, "rank": 5}]  # 5 of two ranks is 1
    ranks = [injector(*faults, rank=rank) for rank in range(2)]
    for _ in range(4):
        for rank in ranks:
            rank.reach("step")
    assert injected_at(tmp_path) == [(0, "step", 1), (1, "step", 0), (2, "step", 1)]


def test_of_two_ranks_that_reach_a_fault_one_has_it(injector, tmp_path):
    first, second = injector({"count": 1}, rank=0), injector({"count": 1}, rank=1)
    first.reach("load")  # both have looked
    second.reach("step")
    first.reach("step")
    assert injected_at(tmp_path) == [(0, "step", 1)]


def test_after_a_kill_no_further_fault_is_injected_into_that_start(injector, tmp_path, monkeypatch):
    monkeypatch.setattr(FaultInjector, "_inject", lambda self, fault: None)  # not this process
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "0")
    faults = [{"action": "kill", "rank": 0}, {"action": "kill", "rank": 1}]
    killed, other = (injector(*faults, rank=rank) for rank in range(2))
    killed.reach("step")
    other.reach("step")
    assert injected_at(tmp_path) == [(0, "step", 0)]
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")
    injector(*faults, rank=1).reach("step")
    assert injected_at(tmp_path) == [(0, "step", 0), (1, "step", 1)]


def test_points_are_counted_if_that_is_wanted(injector, tmp_path):
    process = injector(counts=True)
    for point in ("step", "load", "step"):
        process.reach(point)
    found = [line["point"] for line in read_journal(tmp_path) if line["event"] == "point"]
    assert found == ["step", "load", "step"]


def test_a_line_of_the_journal_that_is_not_complete_is_left_out(tmp_path):
    (tmp_path / JOURNAL).write_text('{"event": "start"}\n{"event": "sta')
    assert read_journal(tmp_path) == [{"event": "start"}]


# ---- what is read from the journal -----------------------------------------------------------------------------------
def journal(*events):
    """Lines by the time; a number begins the start of that number."""
    start, lines = 0, []
    for time, event in enumerate(events):
        if isinstance(event, int):
            start = event
            event = ("start",)
        name, *what = event if isinstance(event, tuple) else (event,)
        line = {"event": name, "start": f"{start}", "time": time, "rank": 0, "pid": start}
        if name == "fault":
            line |= {"number": what[0], "point": "step", "rank": 1}
        elif what:
            line["checkpoint"] = f"c/{what[0]}"
        lines.append(line)
    return lines


KILLED = Fault(point="step", count=1, rank=1)


def test_steps_since_the_checkpoint_that_was_resumed_are_lost():
    saved = [("saving", "a"), ("saved", "a")]
    lines = journal(0, "stepped", *saved, "stepped", "stepped", ("fault", 0), 1, ("loaded", "a"), "stepped")
    history = History([KILLED]).follow(lines)
    (fault,) = history.faults
    assert (fault.resumed, fault.steps_lost, fault.is_older, fault.started_again) == ("a", 2, False, True)
    assert (fault.at, fault.rank_hit, fault.named) == ("step", 1, None)
    assert history.position == 2


def test_the_rank_that_is_named_is_that_of_the_start_also_if_the_message_is_read_late():
    lines = journal(0, ("fault", 0), 1, ("fault", 1), 2, "stepped")
    for read_at in (1.5, 2.5, 3.5):  # before the next start, during it, and after its fault
        faults = History([KILLED] * 2, [(read_at, 1), (3.5, 0)]).follow(lines).faults
        assert [fault.named for fault in faults] == [1, 0]
    faults = History([KILLED] * 2, [(3.5, 0)]).follow(lines).faults  # one message is missing
    assert [fault.named for fault in faults] == [None, 0]


def test_a_position_is_that_of_the_moment_of_the_copy_of_a_save_in_the_background():
    lines = journal(0, "stepped", ("saving", "a"), "stepped", ("saved", "a"), ("fault", 0), 1, ("loaded", "a"))
    assert History([KILLED]).follow(lines).faults[0].steps_lost == 1


def test_resuming_an_older_checkpoint_than_the_last_is_told():
    lines = [("saving", "a"), ("saved", "a"), "stepped", ("saving", "b"), ("saved", "b"), ("fault", 0), 1]
    assert History([KILLED]).follow(journal(0, "stepped", *lines, ("loaded", "a"))).faults[0].is_older
    assert not History([KILLED]).follow(journal(0, "stepped", *lines, ("loaded", "b"))).faults[0].is_older
    nothing = History([KILLED]).follow(journal(0, "stepped", *lines, "stepped")).faults[0]
    assert (nothing.is_older, nothing.resumed, nothing.steps_lost) == (True, None, 2)


def test_a_save_that_was_killed_before_it_returned_may_be_resumed_or_not():
    lines = ["stepped", ("saving", "a"), ("saved", "a"), "stepped", ("saving", "b"), ("fault", 0), 1]
    for resumed, lost in (("a", 1), ("b", 0)):
        (fault,) = History([KILLED]).follow(journal(0, *lines, ("loaded", resumed))).faults
        assert (fault.is_older, fault.steps_lost) == (False, lost)


def test_starts_that_end_before_they_have_resumed_lose_no_further_steps():
    begin = ["stepped", ("saving", "a"), ("saved", "a"), "stepped", ("fault", 0)]
    lines = journal(0, *begin, 1, ("fault", 1), 2, ("fault", 2), 3, ("loaded", "a"), "stepped")
    history = History([KILLED] * 3, [(5.5, 0), (7.5, 1), (9.5, 2)]).follow(lines)
    assert [fault.steps_lost for fault in history.faults] == [1, 0, 0]
    assert [fault.named for fault in history.faults] == [0, 1, 2]
    assert {fault.resumed for fault in history.faults} == {"a"}


def test_a_run_that_goes_on_after_a_fault_loses_nothing():
    history = History([KILLED]).follow(journal(0, "stepped", ("fault", 0), "stepped"))
    assert history.faults[0].steps_lost == 0
    assert not history.faults[0].started_again
    assert history.position == 2


@pytest.mark.parametrize(
    "wrong",
    [{"exit_code": 1}, {"lost": ["c"]}, {"processes": ["p"]}, {"shared_memory": ["s"]}, {"timed_out": True}],
)
def test_what_is_not_good(wrong):
    good = {"faults": [KILLED], "exit_code": 0, "starts": 1}
    assert Outcome(**good).is_good
    assert not Outcome(**{**good, **wrong}).is_good
    older = Fault(point="step", count=1, rank=1, is_older=True)
    assert not Outcome(**{**good, "faults": [older]}).is_good
