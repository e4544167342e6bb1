"""Objects between processes: a rank allocates no more than the limit, whatever another one announces."""

from __future__ import annotations

import pytest
import torch

from neuron_accel.backends import payload
from neuron_accel.errors import CommunicationError


class Done:
    def wait(self):
        return True


class Group:
    """A process group of two, whose other rank announces ``announced`` bytes and sends ``sent``."""

    def __init__(self, announced, sent=b""):
        self.announced, self.sent, self.exchanges = announced, sent, 0

    def rank(self):
        return 0

    def size(self):
        return 2

    def allgather(self, outputs, inputs):
        self.exchanges += 1
        mine, theirs = outputs[0]
        mine.copy_(inputs[0])
        self.broadcast(theirs, 1, count=0)
        return Done()

    def broadcast(self, tensor, source, count=1):
        self.exchanges += count
        if tensor.dtype == torch.int64:
            tensor.fill_(self.announced)
        else:
            tensor[: len(self.sent)] = torch.frombuffer(bytearray(self.sent), dtype=torch.uint8)
        return Done()


class Queue(Group):
    """A process group of two, in which the messages of the other rank have arrived."""

    def __init__(self, rank, *messages):
        super().__init__(0)
        self.messages, self.rank = list(messages), lambda: rank

    def send(self, tensors, target, tag):
        assert target == 0
        self.messages.append(tensors[0])
        return Done()

    def recv(self, tensors, source, tag):
        tensors[0].copy_(self.messages.pop(0))
        return Done()


@pytest.mark.parametrize("value", [None, "x" * 10**5])
def test_what_is_gathered_arrives_in_one_message_if_it_is_small(value):
    group = Queue(1)
    assert payload.gather(value, group) is None
    assert len(group.messages) == (1 if value is None else 2)
    assert payload.gather("mine", Queue(0, *group.messages)) == ["mine", value]
    joined = payload.gather(["mine"], Queue(0, *group.messages), lambda mine, theirs: [*mine, theirs])
    assert joined == ["mine", value]


def test_a_gathered_object_above_the_limit_is_refused_before_memory_is_allocated():
    announced = (payload.LARGEST_OBJECT + 1).to_bytes(8, "little")
    with pytest.raises(CommunicationError, match="Rank 1 of the group sends an object"):
        payload.gather("mine", Queue(0, payload.pack(announced, 128)))


def test_what_fits_arrives():
    data = payload.dump({"a": 1})
    group = Group(len(data), data)
    assert payload.all_gather("mine", group) == ["mine", {"a": 1}]
    assert payload.broadcast(None, 1, group) == {"a": 1}


@pytest.mark.parametrize("announced", [payload.LARGEST_OBJECT + 1, 2**62, -1, 0])
def test_more_than_the_limit_is_refused_before_memory_is_allocated(announced):
    for exchange in (lambda group: payload.all_gather("mine", group), lambda group: payload.broadcast(None, 1, group)):
        group = Group(announced)
        with pytest.raises(CommunicationError, match=f"Rank 1 of the group sends an object of {announced} bytes"):
            exchange(group)
        assert group.exchanges == 1


@pytest.mark.parametrize("join", [None, lambda one, other: one])
def test_who_sends_more_than_the_limit_refuses_it_too_and_sends_no_more(join, monkeypatch):
    monkeypatch.setattr(payload, "LARGEST_OBJECT", 1000)
    group = Queue(1)
    with pytest.raises(CommunicationError, match="Rank 1 of the group sends an object"):
        payload.gather("x" * 2000, group, join)
    assert len(group.messages) == 1  # which says how much it would be
    with pytest.raises(CommunicationError, match="Rank 1 of the group sends an object"):
        payload.gather("mine", Queue(0, *group.messages), join)
