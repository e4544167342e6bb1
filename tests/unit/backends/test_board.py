"""Notes between ranks."""

from __future__ import annotations

from datetime import timedelta

import pytest
import torch.distributed as dist

from neuron_accel.backends.board import StoreBoard
from neuron_accel.backends.process_group import connect_on_demand
from neuron_accel.errors import CommunicationError


def test_a_board_whose_rank_has_ended_says_so():
    kept = dist.TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
    board = StoreBoard(dist.TCPStore("localhost", kept.port, is_master=False, timeout=timedelta(seconds=2)))
    board.put("step", b"3")
    assert board.get("step") == b"3"
    assert board.get("other") is None
    assert [board.add("number", 2), board.add("number", 1), board.get("number")] == [2, 3, b"3"]
    assert board.get_all(["step", "number"]) == [b"3", b"3"]
    assert board.get_all(["step", "other", "number", "another"]) == [b"3", None, b"3", None]
    del kept
    with pytest.raises(CommunicationError, match="a note between ranks") as caught:
        board.get("step")
    assert caught.value.where == "note 'step'"
    with pytest.raises(CommunicationError):
        board.put("step", b"4")


def test_ranks_connect_when_they_send_if_there_are_many():
    for ranks, expected in ((64, None), (65, "1")):
        environ = {"WORLD_SIZE": str(ranks)}
        connect_on_demand(environ)
        assert environ.get("TORCH_GLOO_LAZY_INIT") == expected
    environ = {"WORLD_SIZE": "65", "TORCH_GLOO_LAZY_INIT": "0"}
    connect_on_demand(environ)
    assert environ["TORCH_GLOO_LAZY_INIT"] == "0"
