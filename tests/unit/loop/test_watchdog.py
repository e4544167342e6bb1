"""The watchdog of many ranks, without threads: one asks, each answers once, and no healthy rank is accused."""

from __future__ import annotations

import re
from types import SimpleNamespace
from typing import Any

import pytest

from benchmarks.ranks import World
from neuron_accel.backends.board import LocalBoard
from neuron_accel.engine.plan.restart import WAITING_FILE
from neuron_accel.loop import watchdog
from neuron_accel.loop.watchdog import CollectiveWatchdog


class Scene:
    """Ranks in the same call, stepped by hand."""

    def __init__(self, ranks: int, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now, board = 0.0, LocalBoard()
        monkeypatch.setattr(watchdog, "time", SimpleNamespace(monotonic=lambda: self.now))
        backends = [SimpleNamespace(rank=rank, world_size=ranks, board=lambda: board) for rank in range(ranks)]
        self.ranks = [CollectiveWatchdog(backend, "name", 10.0) for backend in backends]  # type: ignore[arg-type]
        for rank in self.ranks:
            rank.begin(SimpleNamespace(name="backward"))  # type: ignore[arg-type]

    def look(self, at: float, *ranks: int) -> None:
        self.now = at
        for rank in ranks:
            self.ranks[rank].look()


def test_a_rank_that_asks_while_another_does_accuses_none(monkeypatch, capfd):
    scene = Scene(3, monkeypatch)
    scene.look(11.0, 0)  # asks, before the others have looked
    board: Any = scene.ranks[1]._board
    with monkeypatch.context() as patch:  # asks too, since it has looked just before
        patch.setattr(board, "get", lambda key, get=board.get: None if key.endswith("question") else get(key))
        scene.look(11.2, 1)
    assert int(board.get("name/question")) == 2
    for at in (11.5, 12.0, 12.5, 13.0, 13.5, 14.0, 15.0, 16.0):
        scene.look(at, 1, 2, 0)
    assert capfd.readouterr().err == ""
    assert all(rank._call.pause == 40.0 for rank in scene.ranks)


def test_a_rank_whose_call_ends_leaves_the_question_to_another(monkeypatch, capfd):
    scene = Scene(3, monkeypatch)
    event: Any = None
    scene.ranks[2].end(event)
    scene.look(11.0, 0, 1, 2)  # the first asks
    scene.ranks[0].end(event)
    for at in (11.5, 12.5, 13.5, 14.5, 15.5, 16.5):
        scene.look(at, 0, 1, 2)
    said = capfd.readouterr().err
    assert "rank 1 of 3 has waited for other ranks for 16 s, in `backward`" in said
    assert re.search(r"  Rank 0 is at .*\n  Rank 2 is at ", said)


def test_a_report_is_left_for_the_launcher_until_the_rank_goes_on(monkeypatch, tmp_path):
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(tmp_path / "error.json"))
    scene, event = Scene(2, monkeypatch), SimpleNamespace(name="backward")
    scene.ranks[1].end(event)  # type: ignore[arg-type]
    for at in (11.0, 11.5, 12.0):
        scene.look(at, 0, 1)
    assert [path.name for path in tmp_path.iterdir()] == [WAITING_FILE]
    assert "rank 0 of 2 has waited" in (tmp_path / WAITING_FILE).read_text()
    scene.ranks[0].end(event)  # type: ignore[arg-type]
    assert (tmp_path / WAITING_FILE).read_text()  # the call may have failed because of the other rank
    scene.ranks[0].begin(event)  # type: ignore[arg-type]
    assert not (tmp_path / WAITING_FILE).read_text()


def test_ranks_that_have_made_different_numbers_of_other_calls_are_in_the_same_one(monkeypatch, capfd):
    scene = Scene(3, monkeypatch)
    other, same = SimpleNamespace(name="the forward pass of a part"), SimpleNamespace(name="save_state")
    for number, rank in enumerate(scene.ranks):  # as stages of a pipeline do
        for event in (*[other] * number, same):
            rank.end(event)  # type: ignore[arg-type]
            rank.begin(event)  # type: ignore[arg-type]
    for at in (11.0, 11.5, 12.0, 12.5, 13.0, 13.5, 14.0, 15.0, 16.0):
        scene.look(at, 1, 2, 0)
    assert capfd.readouterr().err == ""
    assert all(rank._call.pause == 40.0 for rank in scene.ranks)


def test_no_alarm_accuses_a_healthy_rank_and_a_rank_that_is_absent_is_found():
    for seed, size in ((1, 3), (2, 5), (3, 12), (4, 2000)):
        world = World(size, seed, meddling=0.3)
        slow = [world.call(16.0, apart=9.0) for _ in range(1 if size > 12 else 20)]
        assert not any(alarm.reports for alarm in slow)
        assert max(slow[0].operations.values()) < 40
        assert sum(slow[0].operations.values()) < 10 * size
        if size <= 12:
            for silent in (False, True):
                stuck = world.call(20.0, apart=0.5, absent=frozenset([0]), silent=silent)
                assert [accused for _, accused in stuck.reports] == [[0]]
                assert stuck.reports[0][0] < 15.5
