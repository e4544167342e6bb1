"""Exchanges between ranks that are threads of one process. Does not need torch_xla."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from neuron_accel.backends.xla_channel import Meeting
from neuron_accel.errors import CommunicationError

RANKS = (0, 1, 2)


def in_threads(function):
    with ThreadPoolExecutor(len(RANKS)) as pool:
        return list(pool.map(function, RANKS))


def test_every_rank_gets_the_values_of_all():
    meeting = Meeting(len(RANKS), timeout=20)
    assert in_threads(lambda rank: [meeting.exchange((rank, n), RANKS, rank) for n in range(20)]) == [
        [[(other, n) for other in RANKS] for n in range(20)] for _ in RANKS
    ]


def test_a_rank_that_fails_after_an_exchange_leaves_it_to_the_others():
    """The other ranks may not have resumed when it aborts, but the exchange was already complete."""

    def exchange_and_fail(rank):
        values = meeting.exchange(rank, RANKS, rank)
        meeting.abort()
        return values

    for _ in range(200):
        meeting = Meeting(len(RANKS), timeout=20)
        assert in_threads(exchange_and_fail) == [list(RANKS)] * len(RANKS)


def test_no_rank_waits_for_a_rank_that_has_failed():
    meeting, waiting = Meeting(len(RANKS), timeout=20), threading.Event()

    def exchange(rank):
        if rank == 0:
            waiting.wait(5)
            meeting.abort()
            return
        waiting.set()
        with pytest.raises(CommunicationError, match="did not all arrive"):
            meeting.exchange(rank, RANKS, rank)
        with pytest.raises(CommunicationError, match="did not all arrive"):
            meeting.exchange(rank, RANKS, rank)

    in_threads(exchange)


def test_a_rank_that_does_not_come_is_an_error_in_time():
    meeting = Meeting(2, timeout=0.1)
    with pytest.raises(CommunicationError, match="did not all arrive"):
        meeting.exchange("here", (0, 1), 0)
