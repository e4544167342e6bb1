"""A layout maps a full tensor to shards and back without losing or adding an element."""

from __future__ import annotations

import itertools
import json
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from neuron_accel.engine.sharding.layout import Cut, Layout
from neuron_accel.errors import LayoutError

AXES = ("tp", "pp")


@st.composite
def cuts(draw: st.DrawFn, dim: int = 0, axis: str = "tp") -> Cut:
    parts, replicas, unit = draw(st.integers(1, 4)), draw(st.integers(1, 3)), draw(st.integers(1, 3))
    padded = draw(st.booleans())
    units = draw(st.lists(st.integers(0, 5), min_size=1, max_size=3))
    blocks = tuple(n * unit * (1 if padded else parts) for n in units)
    return Cut(
        dim=dim,
        axis=axis,
        degree=parts * replicas,
        size=sum(blocks),
        blocks=blocks if len(blocks) > 1 or draw(st.booleans()) else (),
        unit=unit,
        replicas=replicas,
        padded=padded,
    )


@st.composite
def layouts(draw: st.DrawFn) -> Layout:
    rank = draw(st.integers(0, 3))
    dims = draw(st.lists(st.sampled_from(range(rank)), unique=True, max_size=2)) if rank else []
    made = [draw(cuts(dim, axis)) for dim, axis in zip(dims, AXES, strict=False)]
    shape = [draw(st.integers(0, 3)) for _ in range(rank)]
    for cut in made:
        shape[cut.dim] = cut.size
    return Layout(shape=tuple(shape), dtype="int64", cuts=tuple(made))


def everywhere(layout: Layout) -> list[dict[str, int]]:
    """Returns all coordinates along the axes of the cuts, including axes of degree 1."""
    axes = [(cut.axis, cut.degree) for cut in layout.cuts]
    return [
        dict(zip((axis for axis, _ in axes), index, strict=True))
        for index in itertools.product(*(range(degree) for _, degree in axes))
    ]


def numbered(layout: Layout) -> torch.Tensor:
    return torch.arange(1, 1 + math.prod(layout.shape), dtype=torch.int64).reshape(layout.shape)


@given(cuts())
def test_segments_of_all_parts_partition_the_dim(cut):
    held = [i for part in range(cut.parts) for s in cut.segments(part * cut.replicas) for i in range(s.start, s.stop)]
    assert sorted(held) == list(range(cut.size))
    for index in range(cut.degree):
        local = [i for s in cut.segments(index) for i in range(s.local_start, s.local_stop)]
        assert len(set(local)) == len(local)
        assert all(0 <= i < cut.local_size for i in local)
        assert cut.segments(index) == cut.segments(index - index % cut.replicas)
        assert all(s.start % cut.unit == 0 and s.size % cut.unit == 0 for s in cut.segments(index))


@given(layouts())
@settings(max_examples=150)
def test_merged_shards_equal_the_tensor(layout):
    full = numbered(layout)
    back = torch.full_like(full, -1)
    for coordinates in everywhere(layout):
        local = layout.shard(full, coordinates)
        assert tuple(local.shape) == layout.local_shape
        layout.write(local, back, coordinates)
    assert torch.equal(back, full)


@given(layouts())
def test_a_sum_over_the_axes_counts_each_element_once_per_replica(layout):
    """``axes`` and ``replicas`` belong together: norms divide by the one what they sum over the other."""
    times: dict[tuple[int, ...], torch.Tensor] = {}
    for coordinates in everywhere(layout):
        held = torch.zeros(layout.shape, dtype=torch.int64)
        for piece in layout.pieces(coordinates):
            held[piece.global_slices] = 1
        others = tuple(index for axis, index in coordinates.items() if axis not in layout.axes)
        times[others] = times.get(others, 0) + held
    for total in times.values():
        assert (total == layout.replicas).all()


@given(layouts())
def test_padding_is_zero_and_everything_else_is_held_once(layout):
    full = numbered(layout)
    for coordinates in everywhere(layout):
        local = layout.shard(full, coordinates)
        elements = local[local != 0].tolist()
        assert len(set(elements)) == len(elements)
        if not layout.padded:
            assert len(elements) == local.numel()


@given(layouts())
def test_plain_data_round_trip(layout):
    again = Layout.from_dict(json.loads(json.dumps(layout.to_dict())))
    assert again == layout
    assert hash(again) == hash(layout)


@pytest.mark.parametrize("dim", [0, 1])
def test_an_even_cut_is_a_chunk(dim):
    full = torch.randn(6, 9)
    layout = Layout(shape=(6, 9), dtype="float32", cuts=(Cut(dim=dim, axis="tp", degree=3, size=full.shape[dim]),))
    for index, chunk in enumerate(full.chunk(3, dim=dim)):
        assert torch.equal(layout.shard(full, {"tp": index, "dp": 1}), chunk)


def test_fused_blocks_are_cut_each_for_itself():
    query, key, value = torch.randn(4, 8), torch.randn(4, 4), torch.randn(4, 4)
    full = torch.cat([query, key, value], dim=1)
    cut = Cut(dim=1, axis="tp", degree=2, size=16, blocks=(8, 4, 4))
    layout = Layout(shape=(4, 16), dtype="float32", cuts=(cut,))
    for index in range(2):
        expected = torch.cat([t.chunk(2, dim=1)[index] for t in (query, key, value)], dim=1)
        assert torch.equal(layout.shard(full, {"tp": index}), expected)


def test_replicated_heads_go_to_neighbours():
    full = torch.arange(4.0)
    layout = Layout(shape=(4,), dtype="float32", cuts=(Cut(dim=0, axis="tp", degree=4, size=4, unit=2, replicas=2),))
    shards = [layout.shard(full, {"tp": index}).tolist() for index in range(4)]
    assert shards == [[0, 1], [0, 1], [2, 3], [2, 3]]


def test_padding_lies_at_the_end_of_the_last_parts():
    full = torch.arange(1.0, 6.0)
    layout = Layout(shape=(5,), dtype="float32", cuts=(Cut(dim=0, axis="tp", degree=4, size=5, padded=True),))
    shards = [layout.shard(full, {"tp": index}).tolist() for index in range(4)]
    assert shards == [[1, 2], [3, 4], [5, 0], [0, 0]]
    assert layout.padded
    assert not Layout(shape=(4,), dtype="float32").padded


def test_padded_blocks_begin_at_the_same_place_in_every_shard():
    full = torch.arange(1.0, 7.0)
    cut = Cut(dim=0, axis="tp", degree=2, size=6, blocks=(3, 3), padded=True)
    layout = Layout(shape=(6,), dtype="float32", cuts=(cut,))
    assert [layout.shard(full, {"tp": index}).tolist() for index in range(2)] == [[1, 2, 4, 5], [3, 0, 6, 0]]


@pytest.mark.parametrize(
    "cut", [None, Cut(dim=0, axis="tp", degree=2, size=4), Cut(dim=1, axis="tp", degree=2, size=4)]
)
@pytest.mark.parametrize("blocks", [(), (2, 2)])
def test_a_shard_owns_its_memory(tmp_path, cut, blocks):
    safetensors = pytest.importorskip("safetensors")
    from safetensors.torch import save_file

    full = torch.nn.Parameter(torch.randn(4, 4))
    save_file({"w": full.detach()}, tmp_path / "w.safetensors")
    if cut is not None:
        cut = Cut(dim=cut.dim, axis=cut.axis, degree=cut.degree, size=cut.size, blocks=blocks)
    layout = Layout(shape=(4, 4), dtype="float32", cuts=(cut,) if cut else ())
    with safetensors.safe_open(tmp_path / "w.safetensors", "pt") as file:
        for source in (full, full.detach().t().contiguous().t(), file.get_slice("w")):
            local = layout.shard(source, {"tp": 1})
            assert torch.equal(local, layout.shard(full.detach(), {"tp": 1}))
            assert local.is_contiguous()
            assert local.untyped_storage().nbytes() == local.numel() * 4
            assert not local.requires_grad


def test_a_scalar_is_replicated(tmp_path):
    from safetensors import safe_open
    from safetensors.torch import save_file

    layout = Layout.of(torch.tensor(3.0))
    assert layout.shard(torch.tensor(3.0), {"tp": 1}) == 3.0
    save_file({"s": torch.tensor(3.0)}, tmp_path / "s.safetensors")
    with safe_open(tmp_path / "s.safetensors", "pt") as file:
        assert layout.shard(file.get_slice("s"), {}) == 3.0


@pytest.mark.parametrize("blocks", [(), (2, 2)])
def test_a_shard_has_the_dtype_of_what_it_was_cut_from(blocks):
    cut = Cut(dim=0, axis="tp", degree=2, size=4, blocks=blocks)
    layout = Layout(shape=(4,), dtype="float32", cuts=(cut,))
    assert layout.shard(torch.ones(4, dtype=torch.bfloat16), {"tp": 0}).dtype == torch.bfloat16


def test_write_is_not_recorded_by_autograd():
    layout = Layout(shape=(4,), dtype="float32", cuts=(Cut(dim=0, axis="tp", degree=2, size=4),))
    full, local = torch.nn.Parameter(torch.zeros(4)), torch.nn.Parameter(torch.ones(2))
    layout.write(local, full, {"tp": 1})
    assert full.tolist() == [0, 0, 1, 1]
    assert full.grad_fn is None


def test_of_a_tensor():
    layout = Layout.of(torch.zeros(2, 3, dtype=torch.bfloat16))
    assert (layout.shape, layout.dtype, layout.cuts, layout.axes) == ((2, 3), "bfloat16", (), ())
    assert layout.replicas == 1


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"degree": 3}, "8 elements of dim 0 cannot be split evenly into 3 shards of axis 'tp'"),
        ({"degree": 3, "unit": 2}, "4 units of 2 of dim 0 cannot be split evenly into 3 shards"),
        ({"degree": 2, "unit": 3}, "not a multiple of the unit 3"),
        ({"degree": 2, "blocks": (4, 3)}, "do not add up to the size 8"),
        ({"degree": 2, "blocks": (12, -4)}, "do not add up to the size 8"),
        ({"degree": 4, "replicas": 3}, "3 replicas"),
        ({"degree": 0}, "over 0 ranks"),
    ],
)
def test_impossible_cuts(arguments, message):
    with pytest.raises(LayoutError, match=message):
        Cut(dim=0, axis="tp", size=8, **arguments)


def test_uneven_cut_says_what_to_do():
    with pytest.raises(LayoutError) as caught:
        Cut(dim=0, axis="tp", size=8, degree=3)
    assert "equal shapes" in caught.value.why
    assert "divides 8" in caught.value.fix


@pytest.mark.parametrize("index", [-1, 2])
def test_an_index_off_the_axis(index):
    with pytest.raises(ValueError, match="is not on axis 'tp' of degree 2"):
        Cut(dim=0, axis="tp", size=8, degree=2).segments(index)


@pytest.mark.parametrize(
    ("shape", "cuts"),
    [
        ((8, 8), [(0, "tp"), (0, "pp")]),
        ((8, 8), [(0, "tp"), (1, "tp")]),
        ((8,), [(1, "tp")]),
        ((6,), [(0, "tp")]),
        (("a",), []),
        ((-1,), []),
    ],
)
def test_impossible_layouts(shape, cuts):
    with pytest.raises(LayoutError):
        Layout(
            shape=shape, dtype="float32", cuts=tuple(Cut(dim=dim, axis=axis, degree=2, size=8) for dim, axis in cuts)
        )


@pytest.mark.parametrize(
    "data", [{}, {"shape": [2], "dtype": "float32", "cuts": [{"dim": 0}]}, {"shape": 2, "cuts": []}]
)
def test_invalid_plain_data_is_refused(data):
    with pytest.raises(LayoutError, match="is not a layout"):
        Layout.from_dict(data)
