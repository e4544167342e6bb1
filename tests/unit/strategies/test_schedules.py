"""Properties of every pipeline schedule: order, matching transfers, and freedom from deadlock."""

from __future__ import annotations

import ast
from collections import Counter
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from neuron_accel.errors import ConfigurationError
from neuron_accel.strategies.pipeline.schedules import (
    SCHEDULES,
    Action,
    Kind,
    Schedule,
    in_rounds,
    make_schedule,
    needs,
    transfers_after,
    with_transfers,
)

few = settings(deadline=None, max_examples=50)
BACKWARD = {Kind.BACKWARD, Kind.BACKWARD_INPUT, Kind.BACKWARD_WEIGHT}


@st.composite
def schedules(draw, names=SCHEDULES):
    name = draw(st.sampled_from(names))
    stages = draw(st.integers(2 if name == "interleaved" else 1, 8))
    if name == "interleaved":
        microbatches, virtual = stages * draw(st.integers(1, 4)), draw(st.integers(2, 3))
    else:
        microbatches, virtual = draw(st.integers(1, 33)), 1
    return make_schedule(name, stages=stages, microbatches=microbatches, virtual_stages=virtual)


class Places:
    """The indices of actions in the list of a rank."""

    def __init__(self, actions) -> None:
        self.of = {action: place for place, action in enumerate(actions)}

    def ordered(self, first: Action, second: Action) -> bool:
        return self.of[first] < self.of[second]


@few
@given(schedules())
def test_every_stage_computes_every_micro_batch_once(schedule):
    kinds = {Kind.FORWARD, Kind.BACKWARD}
    if schedule.name == "zero-bubble":
        kinds = {Kind.FORWARD, Kind.BACKWARD_INPUT, Kind.BACKWARD_WEIGHT}
    wanted = {
        Action(kind, stage, m)
        for kind in kinds
        for stage in range(schedule.stages)
        for m in range(schedule.microbatches)
    }
    found = Counter(action for rank in range(schedule.ranks) for action in schedule.compute(rank))
    assert set(found) == wanted
    assert set(found.values()) == {1}
    for rank in range(schedule.ranks):
        assert {schedule.rank_of(action.stage) for action in schedule.actions[rank]} <= {rank}


@few
@given(schedules())
def test_every_forward_comes_before_its_backward(schedule):
    for rank in range(schedule.ranks):
        actions = schedule.compute(rank)
        is_before = Places(actions).ordered
        for action in actions:
            if action.kind in BACKWARD:
                assert is_before(Action(Kind.FORWARD, action.stage, action.microbatch), action)
            if action.kind is Kind.BACKWARD_WEIGHT:
                assert is_before(Action(Kind.BACKWARD_INPUT, action.stage, action.microbatch), action)


@few
@given(schedules())
def test_what_is_used_was_received_and_what_is_sent_was_computed(schedule):
    for rank in range(schedule.ranks):
        actions = schedule.actions[rank]
        is_before = Places(actions).ordered
        for action in actions:
            stage, m = action.stage, action.microbatch
            if action.kind is Kind.FORWARD and stage and schedule.rank_of(stage - 1) != rank:
                assert is_before(Action(Kind.RECEIVE_ACTIVATION, stage, m), action)
            if action.kind in (Kind.BACKWARD, Kind.BACKWARD_INPUT):
                if stage < schedule.stages - 1 and schedule.rank_of(stage + 1) != rank:
                    assert is_before(Action(Kind.RECEIVE_GRADIENT, stage, m), action)
                if stage and schedule.rank_of(stage - 1) != rank:
                    assert is_before(action, Action(Kind.SEND_GRADIENT, stage, m))
            if action.kind is Kind.FORWARD and stage < schedule.stages - 1 and schedule.rank_of(stage + 1) != rank:
                assert is_before(action, Action(Kind.SEND_ACTIVATION, stage, m))


def message(schedule: Schedule, action: Action) -> tuple:
    """Returns a key that identifies a transfer and is the same for its sender and its receiver."""
    what = action.kind.value.split()[1]
    offset = (0 if action.kind.is_send else -1) if what == "activation" else (0 if action.kind.is_send else 1)
    return what, action.stage + offset, action.microbatch


@few
@given(schedules())
def test_two_ranks_name_their_messages_in_the_same_order(schedule):
    for a in range(schedule.ranks):
        for b in range(a + 1, schedule.ranks):
            of_a = [x for x in schedule.actions[a] if not x.kind.is_compute and schedule.peer(x) == b]
            of_b = [x for x in schedule.actions[b] if not x.kind.is_compute and schedule.peer(x) == a]
            assert [message(schedule, x) for x in of_a] == [message(schedule, x) for x in of_b]
            assert all(x.kind.is_send != y.kind.is_send for x, y in zip(of_a, of_b, strict=True))


def plays_through_with_blocking_transfers(schedule: Schedule) -> bool:
    """Returns whether every rank finishes if each rank executes its actions one by one and every transfer blocks until
    both its sender and its receiver have reached it."""
    position = [0] * schedule.ranks

    def current(rank):
        actions = schedule.actions[rank]
        return actions[position[rank]] if position[rank] < len(actions) else None

    moved = True
    while moved:
        moved = False
        for rank in range(schedule.ranks):
            action = current(rank)
            if action is None:
                continue
            if action.kind.is_compute:
                position[rank] += 1
                moved = True
                continue
            peer = schedule.peer(action)
            other = current(peer)
            if other is None or other.kind.is_compute or schedule.peer(other) != rank:
                continue
            if message(schedule, action) == message(schedule, other) and action.kind.is_send != other.kind.is_send:
                position[rank] += 1
                position[peer] += 1
                moved = True
    return all(current(rank) is None for rank in range(schedule.ranks))


@few
@given(schedules(names=(*SCHEDULES, "forward")))
def test_no_deadlock_even_if_every_transfer_blocks(schedule):
    assert plays_through_with_blocking_transfers(schedule)


def test_a_deadlock_would_be_seen():
    schedule = make_schedule("1f1b", stages=2, microbatches=2)
    wrong = [list(actions) for actions in schedule.actions]
    sends = [i for i, action in enumerate(wrong[0]) if not action.kind.is_compute]
    wrong[0][sends[0]], wrong[0][sends[1]] = wrong[0][sends[1]], wrong[0][sends[0]]
    assert not plays_through_with_blocking_transfers(
        Schedule("wrong", 2, 2, 1, tuple(tuple(actions) for actions in wrong))
    )


def test_computations_that_wait_for_each_other_are_refused():
    forward, backward = Action(Kind.FORWARD, 0, 0), Action(Kind.BACKWARD, 0, 0)
    with pytest.raises(ValueError, match="wait for each other: B0@0"):
        with_transfers([[backward, forward]], 1)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"name": "1f1d"}, "Did you mean '1f1b'"),
        ({"stages": 0}, "stages is 0"),
        ({"microbatches": 0}, "microbatches is 0"),
        ({"microbatches": 2.0}, "microbatches is 2.0"),
        ({"virtual_stages": 2}, "runs one stage on each rank"),
        ({"name": "interleaved"}, "is 1F1B"),
        ({"name": "interleaved", "virtual_stages": 2, "microbatches": 6}, "use 4 or 8 micro-batches"),
        ({"name": "interleaved", "virtual_stages": 2, "stages": 1}, "at least 2 ranks"),
    ],
)
def test_impossible_numbers_are_refused(options, message):
    with pytest.raises(ConfigurationError, match=message):
        make_schedule(**{"name": "1f1b", "stages": 4, "microbatches": 8, **options})


def test_the_known_pictures():
    """The drawings of small schedules."""

    def rows(name, **options):
        schedule = make_schedule(name, **options)
        return [" ".join(f"{a.kind.value}{a.microbatch}" for a in schedule.compute(r)) for r in range(schedule.ranks)]

    assert rows("gpipe", stages=2, microbatches=2) == ["F0 F1 B0 B1"] * 2
    assert rows("1f1b", stages=2, microbatches=3) == ["F0 F1 B0 F2 B1 B2", "F0 B0 F1 B1 F2 B2"]
    assert rows("zero-bubble", stages=2, microbatches=3) == ["F0 F1 I0 W0 F2 I1 W1 I2 W2", "F0 I0 F1 I1 W0 F2 I2 W1 W2"]
    schedule = make_schedule("interleaved", stages=2, microbatches=2, virtual_stages=2)
    assert [str(a) for a in schedule.compute(1)] == ["F0@1", "F1@1", "F0@3", "B0@3", "F1@3", "B1@3", "B0@1", "B1@1"]


def test_schedules_know_nothing_of_torch():
    package = Path(__file__).parents[3] / "neuron_accel"
    for name in ("strategies/pipeline/schedules",):
        for node in ast.walk(ast.parse((package / f"{name}.py").read_text(encoding="utf-8"))):
            modules = [a.name for a in node.names] if isinstance(node, ast.Import) else []
            modules += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            assert not [m for m in modules if m.split(".")[0] in ("torch", "transformers")]


@few
@given(schedules(names=(*SCHEDULES, "forward")))
def test_in_a_round_a_rank_computes_one_thing_and_hands_on_one(schedule):
    compute = [schedule.compute(rank) for rank in range(schedule.ranks)]
    rounds = list(in_rounds(compute, schedule.stages))
    for rank, mine in enumerate(compute):
        assert tuple(actions[rank] for actions in rounds if rank in actions) == mine
    done = set()
    for actions in rounds:
        assert all(done.issuperset(needs(action, schedule.stages)) for action in actions.values())
        done.update(actions.values())
        receivers = Counter(
            (receive.kind, schedule.rank_of(receive.stage))
            for action in actions.values()
            for _, receive in transfers_after(action, schedule.stages)
        )
        assert set(receivers.values()) <= {1}, "a turn brings a rank one thing of a kind"
