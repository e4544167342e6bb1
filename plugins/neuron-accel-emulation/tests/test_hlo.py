"""Reading serialized modules, and the bytes that are live at once, against small graphs computed by hand."""

from __future__ import annotations

import pytest
from hlo_modules import computation, field, instruction_bytes, module, packed, shape
from neuron_accel_emulation import hlo
from neuron_accel_emulation.hlo import Instruction, Shape, parse_module, read_module
from neuron_accel_emulation.hlo_memory import live_bytes

from neuron_accel.errors import UsageError


def serialized():
    constant = Instruction(
        name="c", opcode="constant", shape=Shape("s64"), id=7, source="/home/me/train.py:12", op_name="aten__mul"
    )
    tuple_ = Shape("tuple", elements=(Shape("f32", (2, 3)), Shape("pred", (4,))))
    reduce = Instruction(
        name="all-reduce.1",
        opcode="all-reduce",
        shape=tuple_,
        id=8,
        operands=(7, 7),
        called=(3,),
        replica_groups=((0, 2), (1, 3)),
    )
    permute = Instruction(
        name="p", opcode="collective-permute", shape=Shape("bf16", (5,), True), id=9, pairs=((0, 1), (1, 0))
    )
    parts = [
        instruction_bytes(constant, literal=-5),
        instruction_bytes(reduce),
        instruction_bytes(permute, extra=field(70, 2)),
    ]
    entry = field(1, "main") + b"".join(field(2, part) for part in parts) + field(5, 1 << 40) + field(6, 8)
    frames = field(1, "/x/torch/nn.py") + field(1, "/home/me/train.py")
    frames += field(3, field(1, 1) + field(3, 99)) + field(3, field(1, 2) + field(3, 12))
    frames += field(4, field(1, 1) + field(2, 2)) + field(4, field(1, 2))
    aliases = field(1, packed(1, [0]) + field(2, 4))
    donors = field(1, field(1, 6))
    return (
        field(1, "graph")
        + field(3, entry)
        + field(6, 1 << 40)
        + field(8, aliases)
        + field(17, frames)
        + field(18, donors)
    )


@pytest.mark.parametrize("wrap", [lambda data: data, lambda data: field(1, data)], ids=["module", "in an HloProto"])
def test_a_module_is_read(wrap, tmp_path):
    path = tmp_path / "module.pb"
    path.write_bytes(wrap(serialized()))
    found = read_module(path)
    constant, reduce, permute = found.entry.instructions
    assert (found.name, found.entry.root, found.aliases, found.donors) == ("graph", 8, {4: (0,)}, {6})
    assert (constant.literal, constant.literal_bytes, constant.source) == ("-5", 8, "/home/me/train.py:12")
    assert constant.frames == ("/x/torch/nn.py:99", "/home/me/train.py:12")
    assert (reduce.operands, reduce.called, reduce.replica_groups) == ((7, 7), (3,), ((0, 2), (1, 3)))
    assert (str(reduce.shape), reduce.shape.bytes) == ("(f32[2,3], pred[4])", 28)
    assert (permute.pairs, permute.shape.is_dynamic, permute.algorithm) == (((0, 1), (1, 0)), True, 2)


def test_groups_given_as_a_transposed_range_are_read():
    iota = field(1, 4) + field(2, 2) + packed(3, [2, 4]) + packed(4, [1, 0])
    one = Instruction(name="g", opcode="all-gather", shape=Shape("f32", (2,)), id=1)
    data = field(2, instruction_bytes(one, extra=field(87, field(2, iota)))) + field(5, 9) + field(6, 1)
    found = parse_module(field(3, data) + field(6, 9)).entry.instructions[0]
    assert found.replica_groups == ((0, 4), (1, 5), (2, 6), (3, 7))


@pytest.mark.parametrize(
    "data", [b"", b"no module", serialized()[:-3], b"\xff" * 40], ids=["empty", "text", "cut", "bits"]
)
def test_other_bytes_are_refused(data):
    with pytest.raises(UsageError, match="not a serialized HLO module"):
        parse_module(data)


def test_the_form_ignores_numbers_and_sees_constants():
    rows = [
        ("x", "parameter", "f32[4]", ""),
        ("c", "constant", "f32[]", "", {"literal": "1.0"}),
        ("y", "add", "f32[4]", "x c"),
    ]
    other = [*rows[:1], ("c", "constant", "f32[]", "", {"literal": "2.0"}), rows[2]]
    assert (
        module(*rows).form
        == module(*[(f"n{r[0]}", *r[1:3], " ".join(f"n{o}" for o in r[3].split()), *r[4:]) for r in rows]).form
    )
    assert module(*rows).form != module(*other).form


# ---- Live bytes, by hand ---------------------------------------------------------------------------------------------
K = 1024


def peak(*rows, **more):
    return live_bytes(module(*rows, **more))


def test_two_matrix_products_in_a_row():
    """x and w (4 KiB each) are live all the time, a and b at the same time while b is computed."""
    found = peak(
        ("x", "parameter", "f32[32,32]", ""),
        ("w", "parameter", "f32[32,32]", ""),
        ("a", "dot", "f32[32,32]", "x w"),
        ("b", "dot", "f32[32,32]", "a w"),
    )
    assert (found.peak, found.at.name, found.inputs, found.outputs) == (16 * K, "b", 8 * K, 4 * K)


def test_an_element_wise_operation_takes_the_memory_of_what_it_reads_last():
    rows = [("x", "parameter", "f32[1024]", ""), ("a", "dot", "f32[1024]", "x x"), ("b", "tanh", "f32[1024]", "a")]
    assert peak(*rows).peak == 8 * K
    assert peak(*rows, ("c", "add", "f32[1024]", "a b")).peak == 12 * K, "a is read again"


def test_activations_that_backward_reads_stay():
    """Three layers; their activations a, b and c wait for the backward pass, which ends with two gradients."""
    found = peak(
        ("x", "parameter", "f32[256]", ""),
        ("a", "dot", "f32[256]", "x x"),
        ("b", "dot", "f32[256]", "a a"),
        ("c", "dot", "f32[256]", "b b"),
        ("dc", "dot", "f32[256]", "c c"),
        ("db", "dot", "f32[256]", "dc b"),
        ("da", "dot", "f32[256]", "db a"),
    )
    assert found.peak == 5 * K  # x, a, b, c and dc
    assert found.at.name == "dc"


def test_views_hold_what_they_look_at_and_tuples_their_elements_alone():
    found = peak(
        ("x", "parameter", "f32[256]", ""),
        ("a", "dot", "f32[256]", "x x"),
        ("b", "dot", "f32[512]", "x x"),
        ("t", "tuple", "(f32[256]; f32[512])", "a b"),
        ("barrier", "opt-barrier", "(f32[256]; f32[512])", "t"),
        ("e", "get-tuple-element", "f32[256]", "barrier", {"index": 0}),
        ("r", "reshape", "f32[16,16]", "e"),
        ("wide", "broadcast", "f32[16,16,1000]", "r"),
        ("s", "reduce", "f32[]", "wide"),
        ("late", "dot", "f32[1024]", "r r"),
    )
    assert found.peak == K + K + 4 * K, "b is not read by anything after the tuple, and broadcasts are made where read"
    assert found.at.name == "late"


def test_what_the_caller_gives_up_is_free_after_its_last_use():
    rows = [
        ("w", "parameter", "f32[1024]", ""),
        ("g", "dot", "f32[1024]", "w w"),
        ("new", "subtract", "f32[1024]", "w g"),
        ("out", "tuple", "(f32[1024])", "new"),
    ]
    assert peak(*rows).peak == 8 * K  # in place of the gradient
    assert peak(*rows, aliases={0: (0,)}).outputs == 0
    more = [*rows[:3], ("big", "dot", "f32[2048]", "new new")]
    assert peak(*more).peak == 4 * K + 4 * K + 8 * K
    assert peak(*more, donors={0}).peak == 4 * K + 8 * K


def test_constants_count_and_what_loops_need_inside():
    body = computation(
        "body",
        [("p", "parameter", "f32[256]", ""), ("q", "dot", "f32[512]", "p p"), ("r", "dot", "f32[256]", "q q")],
        50,
    )
    found = peak(
        ("x", "parameter", "f32[256]", ""),
        ("c", "constant", "f32[256]", ""),
        ("loop", "while", "f32[256]", "x", {"called": (50,)}),
        called=[body],
    )
    assert found.peak == K + K + K + 3 * K


def test_shapes_have_sizes():
    assert [shape(text).bytes for text in ("f32[]", "bf16[3,5]", "pred[7]", "s64[2]", "(f32[2]; c64[2])")] == [
        4,
        30,
        7,
        16,
        24,
    ]


@pytest.mark.parametrize(("written", "read"), [("eyJhIjogMX0=", '{"a": 1}'), ('{"a": 1}', '{"a": 1}'), ("", "")])
def test_the_configuration_of_a_custom_call(written, read):
    assert hlo._config(written.encode()) == read
