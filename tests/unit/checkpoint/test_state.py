"""The state of arbitrary objects is encoded and decoded without pickle."""

from __future__ import annotations

import json
import random
from collections import Counter, OrderedDict, defaultdict, deque
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from neuron_accel.backends.randomness import DeviceGenerator
from neuron_accel.checkpoint.format.plain_state import decode, encode
from neuron_accel.checkpoint.state.training import random_state, reseed, set_random_state, state_for
from neuron_accel.engine.plan.mesh import AxisKind, AxisSpec, Mesh
from neuron_accel.errors import CheckpointError


def there_and_back(value):
    tensors = {}
    text = json.dumps(encode(value, tensors, "here"), allow_nan=False)
    return decode(json.loads(text), tensors.__getitem__, "here")


plain = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False)
    | st.text()
    | st.binary()
    | st.complex_numbers(allow_nan=False),
    lambda inner: (
        st.lists(inner)
        | st.tuples(inner, inner)
        | st.dictionaries(st.text() | st.integers() | st.just("$"), inner)
        | st.frozensets(st.integers() | st.text())
    ),
)


@given(plain)
def test_values_come_back_with_their_types(value):
    found = there_and_back(value)
    assert found == value
    assert type(found) is type(value)
    assert repr(found) == repr(value) or isinstance(value, (frozenset, dict, list, tuple))


@pytest.mark.parametrize(
    "value",
    [
        Counter({3: 1, 5: 2}),
        OrderedDict([("b", 1), ("a", 2)]),
        deque([1, 2, 3]),
        {1, 2},
        torch.Size([2, 3]),
        torch.bfloat16,
        torch.device("cpu"),
        float("-inf"),
        {("a", 1): {"$": "tuple"}},
    ],
)
def test_containers_and_names(value):
    found = there_and_back(value)
    assert found == value
    assert type(found) is type(value)


def test_nan():
    assert there_and_back(float("nan")) != there_and_back(float("nan"))


@pytest.mark.parametrize(
    "value",
    [
        np.arange(6, dtype=np.uint32).reshape(2, 3),
        np.array(2.5),
        np.float32(0.1),
        np.int64(-3),
        np.array([], dtype=np.float64),
    ],
)
def test_numpy(value):
    found = there_and_back(value)
    assert type(found) is type(value)
    assert found.dtype == value.dtype
    assert found.shape == value.shape
    assert np.array_equal(found, value)


def test_tensors():
    value = {
        "x": torch.randn(2, 3),
        "n": [torch.tensor(3)],
        "p": torch.nn.Parameter(torch.ones(2, dtype=torch.bfloat16)),
    }
    found = there_and_back(value)
    assert torch.equal(found["x"], value["x"])
    assert torch.equal(found["n"][0], value["n"][0])
    assert torch.equal(found["p"], value["p"].detach())
    assert found["p"].dtype == torch.bfloat16


def test_a_defaultdict_loses_its_factory():
    found = there_and_back(defaultdict(list, {"a": [1]}))
    assert found == {"a": [1]}
    assert isinstance(found, defaultdict)


class Odd:
    pass


@pytest.mark.parametrize("value", [Odd(), lambda: 0, np.array([Odd()]), random.Random(), Odd])
def test_what_has_no_plain_form_is_refused_by_place(value):
    with pytest.raises(CheckpointError, match=r"cannot be saved") as caught:
        encode({"a": [1, {"b": value}]}, {}, "custom object 0 (Odd)")
    assert "where: custom object 0 (Odd).a[1].b" in str(caught.value)


keys = st.text() | st.just("$") | st.just("v")
anything = st.recursive(
    st.none() | st.integers() | st.text(), lambda inner: st.lists(inner) | st.dictionaries(keys, inner)
)


@given(anything)
def test_decoding_anything_is_a_value_or_a_clear_error(value):
    found = None
    try:
        decode(value, {}.__getitem__, "here")
    except CheckpointError as error:
        found = error
    assert found is None or "here" in str(found)


@pytest.mark.parametrize("kind", ["dtype", "device", "scalar", "tensor", "size", "eval", "__class__"])
def test_decoding_runs_no_code(kind):
    with pytest.raises(CheckpointError):
        decode({"$": kind, "v": "os.system", "dtype": "object"}, {}.__getitem__, "here")


# ---- random numbers --------------------------------------------------------------------------------------------------
CPU = DeviceGenerator(torch.device("cpu"))


def draw():
    return random.random(), float(np.random.rand()), float(torch.rand(())), float(np.random.randn())


def test_random_number_generators_continue():
    np.random.randn()  # leaves half of a pair behind
    state = there_and_back(random_state(CPU))
    expected = [draw() for _ in range(3)]
    set_random_state(state, CPU)
    assert [draw() for _ in range(3)] == expected


def mesh(**degrees):
    kinds = {"dp": AxisKind.DATA, "tp": AxisKind.MODEL}
    axes = [AxisSpec(name=name, degree=degree, kind=kinds[name]) for name, degree in degrees.items()]
    return Mesh.build(axes, int(np.prod(list(degrees.values()))))


def test_ranks_of_another_mesh_restore_shared_generators():
    saved = mesh(dp=2, tp=2)
    assert [state_for(saved, saved, rank)[0] for rank in range(4)] == [0, 1, 2, 3]
    wide = mesh(dp=2, tp=4)
    assert [state_for(saved, wide, rank)[0] for rank in range(8)] == [0, 0, 0, 0, 2, 2, 2, 2]
    more = mesh(dp=4, tp=1)
    assert [state_for(saved, more, rank) for rank in range(4)] == [(0, None), (2, None), (0, 2), (2, 3)]


def test_ranks_without_saved_generators_draw_other_numbers():
    state = random_state(CPU)
    seen = set()
    for number in (2, 3):
        set_random_state(state, CPU)
        reseed(number, state, CPU)
        seen.add(draw())
    assert len(seen) == 2


def test_a_device_is_seeded_alike_whatever_other_threads_draw_meanwhile(monkeypatch):
    state, seeds, drawn = random_state(CPU), [], iter(range(100))

    def restored(state, restore=torch.set_rng_state):
        restore(state)
        torch.rand(next(drawn))  # another rank of this process draws from the generator that they share

    monkeypatch.setattr(torch, "set_rng_state", restored)
    device = SimpleNamespace(apart=True, seed=seeds.append)
    for number in (None, None, 1, 1):
        set_random_state(state, device)
        if number is not None:
            reseed(number, state, device)
    assert seeds[0] == seeds[1] == seeds[2] == seeds[4]
    assert seeds[3] == seeds[5] != seeds[0]
