"""Whether ranks can send to each other is tried once, at start, and said."""

from __future__ import annotations

import os
from datetime import timedelta

import pytest
import torch

from neuron_accel import NeuronAccelerator, PipelineParallelPlugin
from neuron_accel.backends import process_group, select
from neuron_accel.errors import ConfigurationError
from neuron_accel.testing import RanksError, run_ranks
from tests.distributed.backends.test_collectives import connect


def outcome() -> tuple[bool, bool, dict]:
    backend = select.connect(select.settle(os.environ))
    return backend.has_point_to_point, "point-to-point" in backend.capabilities, dict(backend.missing)


def test_it_is_found_where_it_is():
    assert run_ranks(outcome, 3, backend="native-p2p") == [(True, True, {})] * 3


def test_every_rank_says_why_where_it_is_not():
    for found, capable, missing in run_ranks(outcome, 3, backend="native"):
        assert not found
        assert not capable
        assert missing == {
            "point-to-point": "sending raised NotImplementedError: ProcessGroupNeuron does not implement send"
        }


def test_trying_can_be_left_out():
    for found, _, missing in run_ranks(outcome, 2, backend="native-p2p", env={"NEURON_ACCEL_POINT_TO_POINT": "0"}):
        assert not found
        assert missing == {"point-to-point": "whether ranks can send to each other was not tried"}
    with pytest.raises(RanksError) as caught:
        run_ranks(outcome, 2, backend="native", env={"NEURON_ACCEL_POINT_TO_POINT": "perhaps"})
    assert isinstance(caught.value.__cause__, ConfigurationError)


def silent() -> str | None:
    import torch.distributed as dist

    hosts = dist.new_group([0, 1], backend="gloo")
    if dist.get_rank() == 0:  # says what rank 1 waits for in vain
        answers = [None, None]
        dist.all_gather_object(answers, None, group=hosts)
        return answers[1]
    return process_group.probe_point_to_point(torch.device("neuron"), hosts, timedelta(seconds=4))


def test_a_receiver_waits_for_a_bounded_time():
    for answer in run_ranks(silent, 2, backend="native-p2p", timeout=60):
        assert answer == "a message from rank 0 to rank 1 was not complete on rank 1 after 2 s"


def prepare_a_pipeline() -> None:
    NeuronAccelerator(plugins=[PipelineParallelPlugin(pipeline_parallel_size=2)])


def test_a_pipeline_says_what_came_of_trying():
    with pytest.raises(RanksError) as caught:
        run_ranks(prepare_a_pipeline, 2, backend="native")
    for error in caught.value.errors.values():
        assert "sending raised NotImplementedError: ProcessGroupNeuron does not implement send" in str(error)
        assert "tensor_parallel_size" in error.fix


def rings() -> int:
    """What the ring of another plugin costs where ranks can send, and where they cannot."""
    backend, group = connect()
    tensor = torch.full((6,), float(backend.rank), device=backend.device)
    with backend.record() as traffic:
        assert backend.permute(tensor, group).tolist() == [float((backend.rank - 1) % 4)] * 6
    return traffic.sent()


def test_a_ring_sends_to_one_neighbour_where_it_can():
    assert run_ranks(rings, 4, backend="native-p2p") == [24] * 4
    assert run_ranks(rings, 4, backend="native") == [72] * 4
