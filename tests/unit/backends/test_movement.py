"""The local work of collectives: splitting, concatenating and summing tensors, encoding objects, and lost peers."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from neuron_accel.backends import payload
from neuron_accel.backends.group import is_communication_failure, reported
from neuron_accel.backends.movement import (
    from_digits,
    join_chunks,
    normalize_dim,
    reduce_rows,
    split_chunks,
    sum_rows_into,
    to_digits,
)
from neuron_accel.backends.torch_distributed import _flat
from neuron_accel.errors import CommunicationError, LayoutError

EVERY_DTYPE = [
    torch.float32,
    torch.float64,
    torch.float16,
    torch.bfloat16,
    torch.int64,
    torch.int32,
    torch.int16,
    torch.int8,
    torch.uint8,
    torch.bool,
    torch.complex64,
    torch.float8_e4m3fn,
]


@given(
    shape=st.lists(st.integers(1, 4), min_size=1, max_size=4),
    count=st.integers(1, 4),
    data=st.data(),
)
def test_splitting_and_joining_are_inverses(shape, count, data):
    dim = data.draw(st.integers(-len(shape), len(shape) - 1))
    shape = [*shape]
    shape[dim] *= count
    tensor = torch.arange(torch.tensor(shape).prod().item()).view(shape)
    rows = split_chunks(tensor, dim, count)
    assert torch.equal(torch.cat(list(rows), dim), tensor)
    assert torch.equal(join_chunks(rows, normalize_dim(dim, tensor)), tensor)
    assert rows.untyped_storage().data_ptr() == tensor.untyped_storage().data_ptr()


def test_joining_along_the_first_dim_copies_nothing():
    rows = torch.arange(12).view(2, 3, 2)
    assert join_chunks(rows, 0).data_ptr() == rows.data_ptr()
    assert join_chunks(rows.view(2, 1, 3, 2), 1).data_ptr() == rows.data_ptr()


def test_a_dim_that_cannot_be_cut():
    with pytest.raises(LayoutError, match=r"Dim 1 .*\[2, 5\].* into 2") as caught:
        split_chunks(torch.zeros(2, 5), -1, 2)
    assert caught.value.fix


@pytest.mark.parametrize("dim", [-3, 2])
def test_a_dim_that_does_not_exist(dim):
    with pytest.raises(IndexError, match="out of range"):
        split_chunks(torch.zeros(2, 2), dim, 2)


def test_sums_go_in_the_order_of_ranks():
    rows = torch.tensor([[1.0], [2.0**24], [1.0], [-(2.0**24)]])
    assert reduce_rows(rows, "sum").item() == 0.0  # 2^24 + 1 rounds to 2^24, twice
    assert reduce_rows(rows.flip(0), "sum").item() == 2.0


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_narrow_sums_are_rounded_once(dtype):
    small = torch.finfo(dtype).eps / 4
    rows = torch.tensor([[1.0], *[[small]] * 4], dtype=torch.float32).to(dtype)  # each is lost alone, not together
    result = reduce_rows(rows, "sum")
    assert result.dtype == dtype
    assert result.float().item() == 1.0 + torch.finfo(dtype).eps


def test_sums_do_not_touch_what_they_read():
    rows = torch.ones(3, 4)
    total = reduce_rows(rows, "sum")
    assert torch.equal(rows, torch.ones(3, 4))
    assert total.untyped_storage().nbytes() == 16  # nor keep it alive


def test_max_and_min_propagate_nan_and_accept_booleans():
    rows = torch.tensor([[1.0, 2.0], [float("nan"), 1.0]])
    assert reduce_rows(rows, "max")[0].isnan()
    assert reduce_rows(rows, "min")[0].isnan()
    assert reduce_rows(rows, "max")[1] == 2.0
    bools = torch.tensor([[True, False, True], [False, False, True]])
    assert reduce_rows(bools, "sum").tolist() == [True, False, True]
    assert reduce_rows(bools, "min").tolist() == [False, False, True]


@pytest.mark.parametrize("dtype", EVERY_DTYPE)
def test_flat_buffers_share_memory_and_are_contiguous(dtype):
    tensor = torch.arange(6).view(2, 3).to(dtype)
    buffer = _flat(tensor)
    assert buffer.dim() == 1
    assert buffer.data_ptr() == tensor.data_ptr()
    strided = _flat(torch.arange(12).to(dtype)[::2])
    assert strided.is_contiguous()
    assert torch.equal(strided.view(dtype).view(torch.uint8), torch.arange(0, 12, 2).to(dtype).view(torch.uint8))


def test_impossible_payloads():
    with pytest.raises(ValueError, match="does not fit"):
        payload.pack(b"12345", 4)


@given(st.binary(max_size=300))
def test_payloads_survive(data):
    packed = payload.pack(data, 512)
    assert packed.shape == (512,)
    assert packed.dtype == torch.uint8
    assert payload.unpack(packed, len(data)) == data
    assert not packed[len(data) :].any()


def test_objects_survive():
    value = {"a": [1, 2.5, None], "t": torch.arange(3)}
    copy = payload.load(payload.dump(value))
    assert copy["a"] == value["a"]
    assert torch.equal(copy["t"], value["t"])


@pytest.mark.parametrize(
    ("message", "slow"),
    [
        ("[../gloo/transport/tcp/pair.cc:534] Connection closed by peer [127.0.0.1]:4242. This is typically", False),
        ("[../gloo/transport/tcp/pair.cc:446] writev [127.0.0.1]:5: Connection reset by peer", False),
        ("[../gloo/transport/tcp/unbound_buffer.cc:81] Timed out waiting 1000ms for recv operation to complete", True),
        ("Socket Timeout", True),
        ("NCCL error in: unhandled system error", False),
        ("Broken pipe", False),
    ],
)
def test_lost_peers_are_reported(message, slow):
    with pytest.raises(CommunicationError) as caught, reported("all_reduce", "rank 1 of 4, group 'tp' of ranks [0, 1]"):
        raise RuntimeError(message)
    text = str(caught.value)
    for word in ("'all_reduce'", "rank 1 of 4", "'tp'", "other ranks"):
        assert word in text
    assert ("in time" in text) is slow
    assert "This is typically" not in text
    assert isinstance(caught.value.__cause__, RuntimeError)


@pytest.mark.parametrize("error", [RuntimeError("Invalid scalar type"), RuntimeError("neuron: out of memory")])
def test_errors_that_are_no_lost_peer_are_raised_unchanged(error):
    assert not is_communication_failure(error)
    with pytest.raises(RuntimeError) as caught, reported("all_reduce", "rank 0"):
        raise error
    assert caught.value is error


@pytest.mark.parametrize("out_dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("count", [2, 3])
def test_sums_in_place_are_those_of_rows(count, dtype, out_dtype):
    rows = torch.randn(count, (1 << 16) + 5, generator=torch.Generator().manual_seed(0)).to(dtype)
    kept = rows.clone()
    out = torch.full((rows.shape[1],), torch.nan, dtype=out_dtype)
    assert sum_rows_into(out, list(rows), 0.25) is out
    assert torch.equal(out, reduce_rows(rows, "sum").to(out_dtype) * 0.25)
    assert torch.equal(rows, kept)


@given(
    dtype=st.sampled_from([torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8]),
    ranks=st.sampled_from([1, 2, 3, 256, 257, 4096]),
    data=st.data(),
)
def test_integers_are_exact_as_sums_of_float32_digits(dtype, ranks, data):
    limits = torch.iinfo(dtype)
    terms = min(ranks, 3)
    values = st.lists(st.integers(limits.min, limits.max), min_size=4, max_size=4)
    rows = torch.tensor([data.draw(values) for _ in range(terms)], dtype=dtype).view(terms, 2, 2)
    digits = [to_digits(row, ranks) for row in rows]
    assert all(d.dtype == torch.float32 and d.abs().max() * ranks <= 2**24 for d in digits)
    total = digits[0]
    for term in digits[1:]:
        total = total + term
    assert torch.equal(from_digits(total, dtype, ranks), rows.sum(0, dtype=dtype))


def test_the_largest_sum_of_digits_is_exact():
    largest = torch.full((3,), -1, dtype=torch.int64)  # all digits are as large as they get
    total = to_digits(largest, 256) * 256
    assert total.max() < 2**24
    assert torch.equal(from_digits(total, torch.int64, 256), largest * 256)


def test_booleans_are_one_digit():
    flags = torch.tensor([True, False])
    assert to_digits(flags, 1).tolist() == [[1.0, 0.0]]
    assert torch.equal(from_digits(to_digits(flags, 1), torch.bool, 1), flags)
