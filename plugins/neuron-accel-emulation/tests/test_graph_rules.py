"""Each rule finds its problem, and nothing in a graph without it; differences between ranks and between steps."""

from __future__ import annotations

import json

import pytest
from hlo_modules import ADD, SET, field, instruction_bytes, module
from neuron_accel_emulation.graph_report import check_recorded, show_ranks
from neuron_accel_emulation.graph_rules import check_module, partitions, source_of
from neuron_accel_emulation.hlo import Instruction, Shape
from neuron_accel_emulation.precompile_check import show

from neuron_accel import find_instance
from neuron_accel.errors import UsageError

TRN1, TRN2 = find_instance("trn1.32xlarge").hardware(), find_instance("trn2.48xlarge").hardware()
X, N = ("x", "parameter", "f32[8,8]", ""), ("n", "parameter", "s64[8,8]", "")


def codes(*rows, **more):
    called = more.pop("called", ())
    return [finding.code for finding in check_module(module(*rows, called=called), **more)]


@pytest.mark.parametrize(
    ("code", "rows"),
    [
        ("NCC_EVRF004", [("y", "convert", "c64[8,8]", "x")]),
        ("NCC_ESPP004", [("y", "convert", "f64[8,8]", "x")]),
        ("NCC_EVRF061", [("y", "all-reduce", "s64[8,8]", "n", {"called": (10,)})]),
        ("NCC_EVRF063", [("y", "reduce-scatter", "s64[4,8]", "n")]),
        ("NCC_EVRF035", [("y", "dot", "s64[8,8]", "n n")]),
        ("NCC_EVRF062", [("y", "power", "s64[8,8]", "n n")]),
        ("NCC_EVRF022", [("y", "shift-right-arithmetic", "s64[8,8]", "n n")]),
        ("NCC_EVRF060", [("y", "scatter", "s64[8,8]", "n n n", {"called": (10,)})]),
        ("NCC_EVRF013", [("y", "topk", "s64[8,2]", "n")]),
        ("NCC_EHCA005", [("y", "custom-call", "f32[8,8]", "x", {"target": "mine"})]),
        ("NCC_EVRF001", [("y", "triangular-solve", "f32[8,8]", "x x")]),
        ("NCC_EVRF001", [("y", "sort", "f32[8,8]", "x")]),
        ("NCC_EVRF006", [("y", "rng-bit-generator", "f32[8,8]", "x", {"algorithm": 2})]),
        ("NCC_EVRF010", [("y", "convolution", "f32[8,8]", "x x", {"window": ((1, 2, 2),)})]),
        ("NCC_EVRF011", [("y", "convolution", "f32[8,8]", "x x", {"window": ((2, 1, 2),)})]),
        ("NCC_EVRF017", [("y", "reduce-window", "f32[8,8]", "x x", {"window": ((1, 1, 2),)})]),
        ("NCC_EVRF018", [("y", "reduce-window", "f32[8,8]", "x x", {"window": ((1, 2, 1),)})]),
        ("NCC_EVRF019", [("y", "reduce-window", "f32[8,8]", "x x x x", {"window": ((1, 1, 1),)})]),
        ("NCC_ESFH002", [("y", "constant", "u64[]", "", {"literal": str(1 << 32)})]),
        ("constant", [("y", "constant", "f32[16384]", "")]),
        ("NCC_EVRF056", [("i", "iota", "s64[9]", ""), ("y", "gather", "f32[9,8]", "x i", {"index_dims": (0,)})]),
        ("NCC_EVRF031", [("i", "iota", "s64[9]", ""), ("y", "scatter", "f32[8,8]", "x i x", {"index_dims": (0,)})]),
    ],
)
def test_what_the_compiler_objects_to_is_found(code, rows):
    assert codes(X, N, *rows, called=[ADD]) == [code]


Q = ("q", "parameter", "bf16[8,64]", "")
KERNEL = '{"func_name": "neuronxcc.nki.kernels.attention.flash_fwd"}'
QUANTIZED = ("u", "parameter", "u32[8,16]", "")
SCALE = ("s", "parameter", "f32[8,2]", "")


def quantize(config='"dtype": "float8_e5m2", "dim": -1', shape="(u32[8,16]; f32[8,2])", given="q"):
    return ("y", "custom-call", shape, given, {"target": "QuantizeMX", "config": f"{{{config}}}"})


def product(config="", shape="bf16[8,8]", given="u u s s"):
    config = f'{{"scaled_dot_backend_config": {{{config}}}}}'
    return ("y", "custom-call", shape, given, {"target": "__op$block_scaled_dot", "config": config})


@pytest.mark.parametrize(
    ("code", "row"),
    [
        ("065", ("y", "custom-call", "f32[8,8]", "x", {"target": "AwsNeuronCustomNativeKernel", "config": KERNEL})),
        ("036", quantize("nonsense")),
        ("037", quantize(given="q q")),
        ("038", quantize('"dtype": "float8_e5m2", "dim": 2')),
        ("039", quantize('"dtype": "float8_e5m2", "dim": -1, "block_size": 16')),
        ("040", quantize('"dtype": "float8_e5m2", "dim": -1, "scale_method": "MAX"')),
        ("041", quantize(given="x")),
        ("042", quantize('"dtype": "int8", "dim": -1')),
        ("057", quantize(shape="u32[8,16]")),
        ("058", quantize(given="r")),
        ("043", product(given="u u s")),
        (
            "044",
            product(given="q u s s", config='"rhs_contracting_dimensions": [0], "lhs_contracting_dimensions": [0]'),
        ),
        ("045", product(shape="f16[8,8]")),
        ("046", product(given="v u s s")),
        ("047", product(given="u v s s")),
        ("048", product('"lhs_batch_dimensions": [0]')),
        ("049", ("y", "custom-call", "bf16[8,8]", "u u s s", {"target": "__op$block_scaled_dot", "config": "{"})),
        ("050", product('"lhs_contracting_dimensions": [0]')),
        ("053", product('"lhs_batch_dimensions": [1]')),
        ("054", product('"lhs_batch_dimensions": [3]')),
        ("055", product('"lhs_contracting_dimensions": [3]')),
        ("", quantize()),
        ("", product()),
    ],
)
def test_kernels_and_quantized_blocks(code, row):
    more = [("r", "parameter", "bf16[8,62]", ""), ("v", "parameter", "u32[16]", "")]
    assert codes(X, Q, QUANTIZED, SCALE, *more, row) == ([f"NCC_EVRF{code}"] if code else [])


def test_float8_of_trn3():
    row = ("y", "parameter", "f8e4m3fn[8,8]", "")
    assert codes(row) == ["NCC_ESPP047"]
    assert codes(row, hardware=TRN2) == ["NCC_EVRF051"]
    assert codes(row, hardware=find_instance("trn3.48xlarge").hardware()) == []


def test_what_it_does_not_object_to_is_not():
    fine = [
        ("g", "all-gather", "s64[16,8]", "n"),
        ("r", "all-reduce", "f32[8,8]", "x", {"called": (10,)}),
        ("s", "scatter", "s64[8,8]", "n n n", {"called": (20,)}),  # overwrites
        ("i", "iota", "s64[8]", ""),
        ("t", "gather", "f32[8,8]", "x i", {"index_dims": (0,)}),
        ("c", "custom-call", "f32[8,8]", "x", {"target": "AwsNeuronGelu"}),
        ("k", "topk", "f32[8,2]", "x"),
        ("u", "constant", "u64[]", "", {"literal": "7"}),
        ("z", "rng-bit-generator", "f32[8,8]", "x"),
        ("w", "convolution", "f32[8,8]", "x x", {"window": ((2, 2, 1),)}),
    ]
    assert codes(X, N, *fine, called=[ADD, SET]) == []
    dynamic = Instruction(
        name="d", opcode="reshape", shape=Shape("f32", (8,), is_dynamic=True), id=1001, operands=(1000,)
    )
    made = module(X)
    assert not check_module(made)
    computation = made.computations[0]
    object.__setattr__(computation, "instructions", (*computation.instructions, dynamic))
    assert [finding.code for finding in check_module(made)] == ["NCC_EMOD025"]


def test_float64_is_float32_where_torch_xla_makes_it_so():
    number, array = ("p", "parameter", "f64[]", ""), ("q", "parameter", "f64[4]", "")
    assert codes(number, array) == ["NCC_ESPP004"]
    assert codes(number, for_neuron=False) == []
    assert [(f.level, f.code) for f in check_module(module(number, array), for_neuron=False)] == [
        ("warning", "float64")
    ]


def test_equal_findings_are_counted_together_by_the_line_of_the_script():
    frames = (
        "/v/lib/python3.11/site-packages/torch/nn/functional.py:1",
        "/v/site-packages/transformers/x.py:7",
        "/me/train.py:3",
    )
    rows = [(f"y{i}", "all-reduce", "s64[8,8]", "n", {"frames": frames}) for i in range(3)]
    (finding,) = check_module(module(N, *rows))
    assert (finding.count, finding.op, finding.source) == (3, "y0", "/me/train.py:3")
    assert "s64" in finding.what
    assert (
        source_of(module(N, ("a", "tanh", "s64[8,8]", "n", {"frames": frames[:2]})).entry.instructions[1]) == frames[1]
    )


def collective(groups=(), pairs=(), opcode="all-reduce"):
    return ("y", "collective-permute" if pairs else opcode, "f32[8,8]", "x", {"replica_groups": groups, "pairs": pairs})


def ring(*ranks):
    return tuple(zip(ranks, (*ranks[1:], ranks[0]), strict=True))


@pytest.mark.parametrize(
    ("row", "world", "problem"),
    [
        (collective(((0, 1), (2, 3))), 4, None),
        (collective(((0, 8, 16, 24),)), 32, None),
        (collective(((0, 1, 8, 9),)), 32, None),
        (collective(((0, 32), (1, 33))), 64, None),
        (collective(), 32, None),
        (collective(((0, 1, 2), (3, 4, 5))), 6, "3 neighbouring ranks [0, 1, 2] form no group"),
        (collective(((0, 3, 5),)), 32, "not blocks of neighbours"),
        (collective(((0, 33), (1, 32))), 64, "differ between hosts of 32"),
        (collective(((0, 1), (2, 3, 4))), 8, "equal sizes"),
        (collective(pairs=ring(0, 1)), 2, None),
        (collective(pairs=ring(*range(8))), 8, None),  # chips 0 to 3, a row of the torus, which closes
        (collective(pairs=ring(*range(0, 32, 8))), 32, None),  # a column
        (collective(pairs=ring(*range(0, 16, 2))), 16, "ranks 6 and 8 are on chips without a direct link"),
        (collective(pairs=ring(0, 16)), 32, "ranks 0 and 16 are on chips"),
        (collective(pairs=((0, 1), (1, 2))), 4, "only rings"),
        (collective(pairs=ring(31, 32)), 64, "ranks 31 and 32 are on chips"),
    ],
)
def test_groups_and_rings_of_an_instance(row, world, problem):
    found = check_module(module(X, row), hardware=TRN1, world_size=world)
    if problem is None:
        assert not found
    else:
        (finding,) = found
        assert finding.code == ("ring" if row[1] == "collective-permute" else "groups")
        assert problem in finding.what
        assert "trn1.32xlarge" in finding.what


def test_where_a_switch_links_all_chips_every_ring_of_a_host_is_possible():
    far = module(X, collective(pairs=ring(0, 100)))
    assert not check_module(far, hardware=find_instance("trn3-gen1-ultraserver").hardware(), world_size=256)
    assert check_module(module(X, collective(pairs=ring(0, 40))), hardware=TRN2, world_size=64)


def test_more_partitions_than_a_graph_may_have():
    ways = [((0, i),) for i in (1, 2, 4, 8, 16)] + [(tuple(range(2**k)),) for k in range(2, 6)]
    ways += [((0, 1, 2 * k, 2 * k + 1),) for k in range(2, 6)]
    rows = [(f"y{i}", "all-reduce", "f32[8,8]", "x", {"replica_groups": way}) for i, way in enumerate(ways)]
    assert len(partitions(module(X, *rows))) == 13
    assert codes(X, *rows, hardware=TRN1, world_size=32) == ["partitions"]
    assert codes(X, *rows[:12], hardware=TRN1, world_size=32) == []


def test_memory_is_held_against_a_core():
    rows = [("w", "parameter", "f32[262144]", ""), ("a", "dot", "f32[262144]", "w w")]  # 1 MiB each
    assert codes(*rows, core_bytes=3 << 20) == []
    assert [(f.level, f.code) for f in check_module(module(*rows), core_bytes=int(2.1 * 2**20))] == [
        ("warning", "NCC_EOOM001")
    ]
    (finding,) = check_module(module(*rows), core_bytes=1 << 20)
    assert (finding.level, finding.op) == ("error", "a")
    assert find_instance("trn1.32xlarge").core_bytes() == 16 << 30
    assert find_instance("trn2.48xlarge").core_bytes(2) == 24 << 30


# ---- Graphs of several ranks and steps -------------------------------------------------------------------------------
def graph_bytes(size=4, constant=1, collective=True, slices=0, computes=True):
    x = Instruction(name="x", opcode="parameter", shape=Shape("f32", (size,)), id=1, parameter=0)
    c = Instruction(name="c", opcode="constant", shape=Shape("s64"), id=2, source="/me/train.py:9")
    y = Instruction(
        name="y", opcode="all-reduce" if collective else "tanh", shape=Shape("f32", (size,)), id=3, operands=(1,)
    )
    parts = [
        instruction_bytes(x),
        instruction_bytes(c, literal=constant),
        instruction_bytes(y, extra=field(17, field(1, slices)) if slices else b""),
    ]
    d = Instruction(name="d", opcode="dot", shape=Shape("f32", (size,)), id=4, operands=(1, 1))
    parts += [instruction_bytes(d)] if computes else []
    entry = field(1, "main") + b"".join(field(2, part) for part in parts) + field(5, 9) + field(6, 3)
    return field(1, "graph") + field(3, entry) + field(6, 9)


def record(folder, graphs, runs, ranks=(0, 1), apart=None):
    (folder / "graphs").mkdir()
    (folder / "dumps").mkdir()
    for name, data in graphs.items():
        (folder / "graphs" / f"{name}.pb").write_bytes(data)
    for rank, names in runs.items():
        lines = [{"graph": n, "ranks": ranks, "apart": (apart or [0] * len(names))[i]} for i, n in enumerate(names)]
        (folder / f"rank{rank:05d}.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))


def test_equal_graphs_have_no_findings(tmp_path):
    record(tmp_path, {"a": graph_bytes()}, {0: "aaa", 1: "aaa"})
    report = check_recorded(tmp_path)
    assert not report.findings
    (graph,) = report.graphs
    assert (graph.ranks, graph.runs, graph.instructions, graph.collectives, graph.memory.peak) == ((0, 1), 3, 4, 1, 56)
    assert json.loads(json.dumps(report.to_json()))["graphs"][0]["live_bytes"] == 56


def test_graphs_that_differ_between_ranks_are_an_error_that_says_where(tmp_path):
    record(tmp_path, {"a": graph_bytes(), "b": graph_bytes(constant=0)}, {0: "aa", 1: "ab"})
    finding = check_recorded(tmp_path).findings[0]
    assert (finding.level, finding.code, finding.ranks, finding.source) == ("error", "ranks", (1,), "/me/train.py:9")
    assert "ranks 1 execute a different graph from rank 0: the constant 0 instead of 1" in finding.what


def test_ranks_that_are_to_differ_may(tmp_path):
    record(tmp_path, {"a": graph_bytes(), "b": graph_bytes(collective=False)}, {0: "aa"}, ranks=(0,))
    record_more = [{"graph": "b", "ranks": [1], "apart": 0}] * 2
    (tmp_path / "rank00001.jsonl").write_text("".join(json.dumps(line) + "\n" for line in record_more))
    assert not check_recorded(tmp_path).findings


def test_a_constant_that_changes_is_an_error_and_a_size_a_warning(tmp_path):
    graphs = {"a": graph_bytes(), "b": graph_bytes(constant=2), "c": graph_bytes(size=3)}
    record(tmp_path, graphs, {0: "abc", 1: "abc"})
    constant, size = check_recorded(tmp_path).findings
    assert (constant.level, constant.code, constant.graph, constant.source) == (
        "error",
        "constant",
        "1, 2",
        "/me/train.py:9",
    )
    assert "the constant 2 and for 1" in constant.what
    assert (size.level, size.code, size.graph) == ("warning", "recompile", "1, 3")
    assert "f32[3] and for f32[4]" in size.what


def test_graphs_that_compute_nothing_may_differ_in_size(tmp_path):
    sizes = {name: graph_bytes(size=i + 3, computes=False) for i, name in enumerate("abc")}
    record(tmp_path, sizes, {0: "abc", 1: "abc"})
    assert not check_recorded(tmp_path).findings


def test_what_only_one_rank_computes_is_an_error_if_others_are_part_of_it(tmp_path):
    graphs = {"a": graph_bytes(), "b": graph_bytes(collective=False)}
    record(tmp_path, graphs, {0: "aba", 1: ["a", None, None]})
    (finding,) = check_recorded(tmp_path).findings
    assert (finding.code, finding.ranks, finding.graph) == ("ranks", (1,), "1")


def test_a_slice_that_moves_is_an_error(tmp_path):
    record(tmp_path, {"a": graph_bytes(slices=1), "b": graph_bytes(slices=2)}, {0: "ab", 1: "ab"})
    (finding,) = check_recorded(tmp_path).findings
    assert (finding.level, finding.code, finding.op) == ("error", "constant", "y")
    assert "one all-reduce f32[4] and for another" in finding.what


def test_values_read_between_steps_are_a_warning(tmp_path):
    record(tmp_path, {"a": graph_bytes()}, {0: "aaa", 1: "aaa"}, apart=[2, 2, 4])
    for number in range(4):
        (tmp_path / "dumps" / f"module_{number}.before_optimizations.hlo.pb").write_bytes(graph_bytes())
    (finding,) = check_recorded(tmp_path).findings
    assert (finding.level, finding.code, finding.count) == ("warning", "host-read", 2)


def test_nothing_recorded_is_an_error(tmp_path):
    with pytest.raises(UsageError, match="No graph was recorded"):
        check_recorded(tmp_path)


def test_ranks_are_shown_as_ranges():
    assert show_ranks((5, 0, 1, 2, 9, 8)) == "0-2, 5, 8-9"


# ---- what is printed -------------------------------------------------------------------------------------------------
def test_findings_are_listed_with_their_rank_graph_operation_and_line(tmp_path, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    record(tmp_path, {"a": graph_bytes(), "b": graph_bytes(constant=2)}, {0: "ab", 1: "ab"})
    text = show(check_recorded(tmp_path, instance=find_instance("trn1.2xlarge")))
    assert all(len(line) <= 80 for line in text.splitlines())
    lines = text.splitlines()
    assert lines[0] == "2 graphs of 2 ranks, checked for trn1.2xlarge"
    assert any(line.split() == ["1", "0-1", "1", "4", "1", "1", "0.0", "MiB"] for line in lines)
    assert "a core has 16 GiB" in text
    assert any(line.split()[:7] == ["1", "error", "constant", "1,", "2", "0-1", "c"] for line in lines)
    assert "/me/train.py:9" in text
    assert text.endswith("1 error, 0 warnings")


def test_without_findings_it_says_so(tmp_path):
    record(tmp_path, {"a": graph_bytes()}, {0: "aa", 1: "aa"})
    assert "no findings" in show(check_recorded(tmp_path))
