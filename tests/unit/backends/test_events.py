"""The stream of events of a run: who receives what, in which order, and what a record keeps of it."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch

from neuron_accel.backends.events import CATEGORIES, UNOBSERVED, Collective, Events, Observer, Traffic
from neuron_accel.backends.group import Group

DP = Group((0, 1), 0, ((0, 1),), "dp")


class Named(Observer):
    """Writes down what it receives."""

    def __init__(self, name, found, categories=CATEGORIES):
        self.name, self.found, self.categories = name, found, frozenset(categories)

    def begin(self, event):
        self.found.append((self.name, "begin", event.name))

    def end(self, event):
        self.found.append((self.name, "end", event.name))


def test_the_first_that_is_called_at_the_beginning_is_the_last_at_the_end():
    events, found = Events(), []
    leave = events.observe(Named("a", found))
    events.observe(Named("b", found))
    with events.open("x"):
        pass
    assert found == [("a", "begin", "x"), ("b", "begin", "x"), ("b", "end", "x"), ("a", "end", "x")]
    found.clear()
    leave()
    leave()  # once more does nothing
    with events.open("y"):
        pass
    assert found == [("b", "begin", "y"), ("b", "end", "y")]


def test_an_observer_receives_its_categories_and_nothing_is_made_for_others():
    events, found = Events(), []
    events.observe(Named("a", found, ["step"]))
    assert events.open("x", "part") is events.collective("all_reduce", DP) is UNOBSERVED
    with events.open("optimizer step", "step", optimizer=1) as event:
        assert event.arguments == {"optimizer": 1}
    assert [name for _, _, name in found] == ["optimizer step"] * 2


def test_an_observer_that_raises_keeps_a_collective_from_being_sent():
    class Refuses(Observer):
        def begin(self, event):
            raise KeyError(event.name)

    events, sent = Events(), []
    events.observe(Refuses())
    with pytest.raises(KeyError, match="all_gather"), events.collective("all_gather", DP, 8, torch.float32):
        sent.append(1)
    assert not sent


@pytest.mark.parametrize(("dtype", "seen"), [(torch.float32, 1), (torch.complex64, 1), (torch.int64, 0)])
def test_sums_of_inexact_numbers_are_seen_while_the_collective_begins_and_when_they_are_there(dtype, seen):
    class Sums(Observer):
        def begin(self, event):
            assert isinstance(event, Collective)
            found.extend(event.summed)
            event.when_received(lambda tensors, scale: found.append((tensors, scale)))

    events, found, given = Events(), [], torch.ones(2, dtype=dtype)
    events.observe(Sums())
    with events.collective("all_reduce", DP, 8, dtype, summed=[given]) as event:
        pass
    assert (len(found), len(event.summed)) == (seen, 0)
    event.received([given], 0.5)
    assert found[-1] == ([given], 0.5)


def test_a_record_has_collectives_on_tensors_and_the_order_of_starts_and_waits():
    events, traffic = Events(), Traffic()
    with events.collective("all_reduce", DP, 8, torch.float32) as before:
        pass
    leave = events.observe(traffic)
    with before.waiting(), events.collective("broadcast_object", DP):
        pass
    started = []
    for op, deferred in (("all_reduce", False), ("all_gather", False), ("reduce_scatter", True)):
        with events.collective(op, DP, 4, torch.bfloat16, deferred=deferred) as event:
            started.append(event)
    for event in (started[1], started[0], started[0]):
        with event.waiting():
            pass
    leave()
    assert [(t.op, t.group, t.size, t.sent, t.dtype, t.ranks) for t in traffic.transfers] == [
        (op, "dp", 2, 4, torch.bfloat16, (0, 1)) for op in ("all_reduce", "all_gather", "reduce_scatter")
    ]
    assert traffic.order == [("start", 0), ("start", 1), ("start", 2), ("wait", 1), ("wait", 0)]


def test_observers_stay_in_their_process_and_copies_belong_to_the_same_run():
    events = Events()
    events.observe(Named("a", []))
    assert copy.deepcopy(events) is events
    assert not any(pickle.loads(pickle.dumps(events)).of.values())
