"""Notes between ranks."""

from __future__ import annotations

from datetime import timedelta

import pytest
import torch.distributed as dist

from neuron_accel.backends.board import StoreBoard
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
