"""The torch backend with a world size of one: every collective returns its input and sends nothing."""

from __future__ import annotations

import pytest
import torch

from neuron_accel.backends import autograd
from neuron_accel.backends.dry_run import DryRunBackend
from neuron_accel.backends.group import Group
from neuron_accel.backends.torch_distributed import TorchBackend
from neuron_accel.errors import UsageError


@pytest.fixture
def alone(monkeypatch):
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    backend = TorchBackend.connect()
    yield backend
    backend.shutdown()


def test_rank_size_and_device_of_a_single_process(alone):
    assert (alone.rank, alone.world_size, alone.device) == (0, 1, torch.device("cpu"))
    assert alone.reads_are_free
    group = alone.new_group([[0]], "tp")
    assert (group.size, group.index, group.ranks, group.name, group.handle) == (1, 0, (0,), "tp", None)


def test_a_partition_names_every_rank_once():
    group = Group.of(2, [[3, 2], [1, 0]], "tp", 4)
    assert (group.ranks, group.index, group.partition) == ((2, 3), 0, ((0, 1), (2, 3)))
    for partition in ([[0, 1], [2]], [[0, 1], [1, 2, 3]], [[0, 1], [2, 3, 4]], []):
        with pytest.raises(ValueError, match="does not partition the ranks 0 to 3"):
            Group.of(2, partition, "tp", 4)


def test_a_backend_whose_shapes_are_known_before_the_values_sends_equal_numbers_of_rows():
    backend = DryRunBackend(world_size=2)
    assert "uneven-all-to-all" not in backend.capabilities
    with pytest.raises(UsageError, match="a different number of rows") as caught:
        backend.all_to_all_uneven(torch.zeros(3, 1), backend.new_group([[0, 1]], "ep"), [1, 2], [1, 2])
    assert "all_to_all" in caught.value.fix


def test_collectives_of_one_rank_return_their_input(alone):
    group = alone.new_group([[0]], "tp")
    x = torch.arange(6.0).view(2, 3)
    with alone.record() as traffic:
        for result in (
            alone.all_reduce(x, group),
            alone.all_reduce(x.bool(), group, "max"),
            alone.all_gather(x, group, 1),
            alone.reduce_scatter(x, group, 1),
            alone.all_to_all(x, group, 0, 1),
            alone.all_to_all_uneven(x, group, [2], [2]),
            alone.permute(x, group, 3),
            alone.broadcast(x, group),
            alone.chunk(x, group, 1),
        ):
            assert torch.equal(result, x.to(result.dtype))
        assert alone.all_gather_object({"a": 1}, group) == [{"a": 1}]
        assert alone.broadcast_object("v", group) == "v"
        alone.barrier()
    assert traffic.transfers == []


@pytest.mark.parametrize(
    "collective",
    [
        autograd.copy_to_group,
        autograd.reduce_from_group,
        lambda x, b, g: autograd.gather_from_group(x, b, g, 0),
        lambda x, b, g: autograd.chunk_to_group(x, b, g, 0),
        lambda x, b, g: autograd.reduce_scatter_to_group(x, b, g, 0),
        lambda x, b, g: autograd.all_to_all(x, b, g, 0, 1),
        lambda x, b, g: autograd.all_to_all_uneven(x, b, g, [2], [2]),
    ],
)
def test_a_group_of_one_leaves_no_trace_in_the_graph(alone, collective):
    x = torch.ones(2, 2, requires_grad=True)
    assert collective(x, alone, alone.new_group([[0]], "tp")) is x


def test_an_unknown_gradient_of_a_gather_is_refused(alone):
    with pytest.raises(ValueError, match="reduce_scatter"):
        autograd.gather_from_group(torch.ones(2), alone, alone.new_group([[0]], "tp"), 0, grad="sum")


@pytest.mark.parametrize("partition", [[], [[0], [0]], [[1]], [[0, 1]]])
def test_groups_partition_the_ranks(alone, partition):
    with pytest.raises(ValueError, match="partition"):
        alone.new_group(partition, "tp")


def test_unknown_reductions_are_refused(alone):
    with pytest.raises(ValueError, match="mean"):
        alone.all_reduce(torch.ones(2), alone.new_group([[0]], "tp"), "mean")


def test_devices_that_are_unknown_or_absent_are_refused():
    with pytest.raises(UsageError, match="does not support device 'meta'"):
        TorchBackend.connect("meta")
    with pytest.raises(UsageError, match="finds no device 'neuron'"):
        TorchBackend.connect("neuron:0")


def test_shutdown_is_final_and_idempotent(alone):
    alone.shutdown()
    alone.shutdown()
    with pytest.raises(UsageError, match="shut down"):
        alone.new_group([[0]], "tp")


def send(backend, op, group, size):
    with backend.events.collective(op, backend.new_group([[0]], group), size, torch.float32):
        pass


def test_recordings_nest(alone):
    with alone.record() as outer:
        send(alone, "all_reduce", "tp", 3)
        with alone.record() as inner:
            send(alone, "all_gather", "dp", 4)
    assert [t.op for t in outer.transfers] == ["all_reduce", "all_gather"]
    assert [t.op for t in inner.transfers] == ["all_gather"]
    assert outer.sent(op="all_reduce") == 3
    assert outer.sent() == 7
    assert outer.count(group="dp") == 1
