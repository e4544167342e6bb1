"""Files of a run report: written and read, checked line by line; stragglers, traffic, and traces made of them."""

from __future__ import annotations

import json
import math
from itertools import pairwise

import pytest
from neuron_accel_report.records import (
    Collectives,
    End,
    Header,
    Memory,
    Prediction,
    Range,
    Step,
    from_line,
    rank_file,
    read_run,
    stragglers,
    to_line,
    traffic_table,
)
from neuron_accel_report.summary import summarise
from neuron_accel_report.trace import trace
from neuron_accel_report.trace_command import numbers
from report_support import bound, main

from neuron_accel.errors import ConfigurationError

BUSY = {"loader": 0.01, "forward": 0.03, "backward": 0.05, "optimizer": 0.005, "other": 0.005}


def header(rank, world_size=2, **changes):
    return Header(
        **{
            "run": "abc",
            "rank": rank,
            "world_size": world_size,
            "mesh": {"dp": world_size},
            "coordinates": {"dp": rank},
            "plugins": ("run_report",),
            "host": "here",
            "device": "cpu",
            "backend": "torch",
            "started": 100.0,
            **changes,
        }
    )


def step(number, start, communication=0.0, **changes):
    parts = {**BUSY, **changes.pop("parts", {}), "communication": communication}
    begin = round(start * 1e9)
    return Step(step=number, begin=begin, end=begin + round(sum(parts.values()) * 1e9), parts=parts, **changes)


def span(name, category, start, seconds, number=0, **arguments):
    begin = round(start * 1e9)
    end = begin + round(seconds * 1e9)
    return Range(step=number, name=name, category=category, begin=begin, end=end, arguments=arguments)


def write(folder, *ranks, end=True):
    folder.mkdir(exist_ok=True, parents=True)
    for records in ranks:
        lines = [to_line(record) for record in records]
        (folder / rank_file(records[0].rank)).write_text("".join(f"{line}\n" for line in lines))
    return folder


def test_a_run_is_read_as_it_was_written(tmp_path):
    full = Step(
        step=3,
        begin=1_500_000_001,
        end=1_750_000_001,
        samples=8,
        tokens=4096,
        micro_batches=2,
        parts={"forward": 0.1, "other": 0.15},
        waiting=0.01,
        collectives=(Collectives(op="all_reduce", group="dp", count=3, bytes=1024, seconds=0.01),),
        memory=Memory(device_peak=1, device=2, host=3, parameters=4, gradients=5, optimizer=6),
        flops=1e12,
        mfu=0.25,
        compilations=1,
        loss=float("nan"),
        grad_norm=float("inf"),
        lr=(0.1, 0.2),
        skipped=True,
        own_seconds=0.001,
    )
    first = header(0, predicted=Prediction(traffic=(Collectives(op="send", group="pp", count=1, bytes=2),)))
    forward = span("forward", "part", 1.6, 0.1, 3, bytes=3)
    write(tmp_path, [first, full, forward, End(time=1_800_000_000, steps=1)], [header(1), full])
    run = read_run(tmp_path)
    assert run.header == first
    assert run.ranks[0].ranges == (forward,)
    assert run.ranks[0].end == End(time=1_800_000_000, steps=1)
    assert run.ranks[1].end is None
    (found,) = run.ranks[0].steps
    assert math.isnan(found.loss)
    assert found.grad_norm == float("inf")
    assert to_line(found) == to_line(full)
    assert (found.begin, found.seconds) == (1_500_000_001, 0.25)
    assert not run.missing_ranks
    assert list(run.by_step) == [3]
    json.loads(to_line(full), parse_constant=lambda name: pytest.fail(f"{name} is not JSON"))


def test_a_line_that_was_cut_off_is_left_out(tmp_path):
    write(tmp_path, [header(0), step(0, 100.0)])
    path = tmp_path / rank_file(0)
    path.write_text(path.read_text() + to_line(step(1, 101.0))[:50])
    run = read_run(tmp_path)
    assert [each.step for each in run.ranks[0].steps] == [0]
    assert run.missing_ranks == (1,)


@pytest.mark.parametrize(
    ("line", "why"),
    [
        ("{", "not JSON"),
        ("[]", "'kind'"),
        ('{"kind": "stop"}', "'kind'"),
        ('{"kind": "step", "step": 1}', "lacks begin, end"),
        ('{"kind": "step", "step": true, "begin": 1, "end": 1}', "field 'step': True is not an integer"),
        ('{"kind": "step", "step": 1, "begin": 1.5, "end": 1}', "field 'begin': 1.5 is not an integer"),
        ('{"kind": "step", "step": 1, "begin": 1, "end": 1, "loss": "1"}', "field 'loss': '1' is not a number"),
        ('{"kind": "step", "step": 1, "begin": 1, "end": 1, "lr": 1}', "field 'lr': 1 is not a list"),
        ('{"kind": "step", "step": 1, "begin": 1, "end": 1, "memory": 1}', "field 'memory': 1 is not an object"),
        ('{"kind": "step", "step": 1, "begin": 1, "end": 1, "parts": {"a": null}}', "None is not a number"),
        ('{"kind": "step", "step": 1, "begin": 1, "end": 1, "collectives": [{"op": "a"}]}', "lacks group"),
        ('{"kind": "range", "step": 1, "name": "a", "category": "b", "begin": 1, "end": 1}', "'b' is not one of"),
        ('{"kind": "end", "time": 1, "steps": 1.0}', "1.0 is not an integer"),
    ],
)
def test_a_line_that_is_wrong_is_an_error_with_its_place(line, why, tmp_path):
    write(tmp_path, [header(0)])
    path = tmp_path / rank_file(0)
    path.write_text(f"{path.read_text()}{line}\n")
    with pytest.raises(ConfigurationError, match="cannot be read") as error:
        read_run(tmp_path)
    assert error.value.where == f"{path}, line 2"
    assert why in error.value.why


def test_fields_of_later_versions_are_ignored_and_other_formats_are_refused(tmp_path):
    data = json.loads(to_line(step(0, 1.0)))
    assert from_line(json.dumps({**data, "temperature": 3}), "here") == step(0, 1.0)
    for version in (1, 3):
        write(tmp_path, [header(0, version=version)])
        for read in (read_run, summarise):
            with pytest.raises(ConfigurationError, match=f"version {version} of the format, and this reads version 2"):
                read(tmp_path)


def test_what_is_no_run_is_an_error(tmp_path):
    for folder, why in ((tmp_path, "no file rank"), (tmp_path / "nowhere", "no such folder")):
        with pytest.raises(ConfigurationError) as error:
            read_run(folder)
        assert why in error.value.why
    (tmp_path / rank_file(0)).write_text("")
    with pytest.raises(ConfigurationError, match="is empty"):
        read_run(tmp_path)
    write(tmp_path, [header(0)], [header(1, run="other")])
    with pytest.raises(ConfigurationError, match="of different runs"):
        read_run(tmp_path)
    for lines in ([to_line(step(0, 1.0))], [to_line(header(0))] * 2, ["\udce4"]):
        write(tmp_path / "bad", [header(1, world_size=1)])
        path = tmp_path / "bad" / rank_file(1)
        path.write_bytes("".join(f"{line}\n" for line in lines).encode(errors="surrogateescape"))
        with pytest.raises(ConfigurationError, match="cannot be read"):
            read_run(tmp_path / "bad")


def test_the_rank_that_others_wait_for_is_named(tmp_path):
    def rank(index):
        late = {"parts": {"loader": 0.06}} if index == 1 else {}
        return [
            header(index, world_size=3),
            step(0, 100.0, 0.01),
            step(1, 101.0, 0.0 if late else 0.05, **late),  # the others have waited in their collectives
            step(2, 102.0, 0.01),
        ]

    run = read_run(write(tmp_path, *map(rank, range(3))))
    (found,) = stragglers(run)
    assert (found.step, found.rank, found.part) == (1, 1, "loader")
    assert found.seconds == pytest.approx(0.05)
    assert stragglers(run, seconds=0.06) == []
    assert stragglers(run, share=0.6) == []
    assert stragglers(read_run(write(tmp_path / "alone", rank(1)))) == []


def test_traffic_is_compared_with_a_prediction(tmp_path):
    def rows(*bytes_sent):
        return tuple(Collectives(op="send", group=f"g{i}", count=1, bytes=n) for i, n in enumerate(bytes_sent))

    prediction = Prediction(traffic=rows(10, 20, 30))
    first = [header(0, predicted=prediction), step(0, 1.0), step(1, 2.0, collectives=rows(10, 21))]
    run = read_run(write(tmp_path, first, [header(1), step(1, 2.0, collectives=rows(5))]))
    table = traffic_table(run.ranks[0])
    assert [(row.group, row.predicted_bytes, row.bytes, row.is_equal) for row in table] == [
        ("g0", 10, 10, True),
        ("g1", 20, 21, False),
        ("g2", 30, 0, False),
    ]
    assert [row.bytes for row in traffic_table(run.ranks[0], step=0)] == [0, 0, 0]
    (row,) = traffic_table(run.ranks[1])
    assert (row.predicted_bytes, row.bytes, row.is_equal) == (None, 5, None)


# ---- traces ----------------------------------------------------------------------------------------------------------
def traced(folder):
    def rank(index):
        start = 1.0 + index * 0.001
        return [
            header(index),
            *(step(number, start + number * 0.1) for number in range(6)),
            *(
                each
                for number in (3, 4)
                for begin in (start + number * 0.1,)
                for each in (
                    span("forward", "part", begin, 0.05, number),
                    span("all_reduce", "collective", begin + 0.01, 0.02, number, group="dp", ranks=[0, 1]),
                )
            ),
        ]

    return write(folder, rank(0), rank(1))


def check_trace(found, ranks):
    """Every event has what the format requires, each rank is a process, and ranges of a thread nest."""
    open_ends: dict[tuple[int, int], list[float]] = {}
    for event in found["traceEvents"]:
        assert {"ph", "ts", "pid", "tid", "name"} <= set(event)
        assert event["ph"] in ("X", "M", "C", "s", "f")
    spans = [event for event in found["traceEvents"] if event["ph"] == "X"]
    assert {event["pid"] for event in spans} == set(ranks)
    names = {event["pid"] for event in found["traceEvents"] if event["name"] == "process_name"}
    assert names == set(ranks)
    for event in sorted(spans, key=lambda each: (each["ts"], -each["dur"])):
        assert event["ts"] >= 0
        assert event["dur"] >= 0
        ends = open_ends.setdefault((event["pid"], event["tid"]), [])
        while ends and ends[-1] <= event["ts"] + 1e-6:
            ends.pop()
        assert not ends or event["ts"] + event["dur"] <= ends[-1] + 1e-6
        ends.append(event["ts"] + event["dur"])
    return spans


@pytest.mark.parametrize(
    ("options", "steps", "ranges"),
    [
        ([], {3, 4}, 8),
        (["--steps", "3:4"], {3}, 4),
        (["--steps", "4"], {4}, 4),
        (["--steps", "1:"], {1, 2, 3, 4, 5}, 8),
    ],
)
def test_a_trace_has_the_steps_of_every_rank_in_one_time(options, steps, ranges, tmp_path, capsys):
    output = tmp_path / "out.json"
    assert main(["trace", str(traced(tmp_path / "run")), *options, "-o", str(output)]) == 0
    spans = check_trace(json.loads(output.read_text()), range(2))
    assert {event["name"] for event in spans if event["cat"] == "step"} == {f"step {number}" for number in steps}
    inner = [event for event in spans if event["cat"] != "step"]
    assert len(inner) == ranges
    first, second = (min(e["ts"] for e in spans if e["pid"] == pid) for pid in (0, 1))
    assert first == 1e6 + min(steps) * 1e5  # since the run began, whichever steps are chosen
    assert second == first + 1000  # rank 1 began a millisecond later
    captured = capsys.readouterr()
    assert "ui.perfetto.dev" in captured.out
    assert not captured.err


def test_no_event_of_a_track_overlaps_another(tmp_path):
    """Each nanosecond is read as it was written: a step ends where the next one begins, a range where its neighbour
    does."""

    def rank(index):
        begin, records = index, [header(index)]
        for number in range(1500):
            end = begin + 1001 + 17 * number
            half = (begin + end) // 2
            records += [
                Step(step=number, begin=begin, end=end),
                Range(step=number, name="forward", category="part", begin=begin, end=half),
                Range(step=number, name="inner", category="user", begin=begin, end=half),
                Range(step=number, name="backward", category="part", begin=half, end=end),
            ]
            begin = end
        return records

    found = trace(read_run(write(tmp_path / "run", rank(0), rank(1))))["traceEvents"]
    assert bound(found) == []  # and every range is inside of that around it
    for pid in (0, 1):
        steps = [event for event in found if (event["ph"], event["pid"], event["tid"]) == ("X", pid, 0)]
        times = [(int(event["ts"] * 1000.0), int(event["dur"] * 1000.0)) for event in steps]
        assert len(steps) == 1500
        assert all(begin + taken == following for (begin, taken), (following, _) in pairwise(times))


def test_a_trace_has_counters_and_arrows(tmp_path):
    """Memory and loss at the end of steps, and from the rank that called a collective last to those that waited."""

    def rank(index, late):
        memory = Memory(host=100 + index)
        records = [header(index), step(0, 0.0, loss=1.5, memory=memory), step(1, 0.1, loss=float("nan"))]
        for number, name in enumerate(("all_reduce", "all_gather", "all_reduce")):
            start = number * 0.01 + (0.002 if late == number else 0.0)
            ranks = [0, 1] if number < 2 else [index]
            records.append(span(name, "collective", start, 0.005, ranks=ranks, op=name, call=number))
        return records

    found = trace(read_run(write(tmp_path / "run", rank(0, 0), rank(1, 1))), steps=[0, 1])["traceEvents"]
    assert json.loads(json.dumps(found, allow_nan=False)) == found
    counters = [(e["pid"], e["name"], e["args"]) for e in found if e["ph"] == "C"]
    assert counters == [
        (0, "memory in bytes", {"host": 100}),
        (0, "loss", {"loss": 1.5}),
        (1, "memory in bytes", {"host": 101}),
        (1, "loss", {"loss": 1.5}),
    ]
    steps = [event["args"].get("loss") for event in found if event.get("cat") == "step" and event["pid"] == 0]
    assert steps == [1.5, "nan"]
    arrows = [(e["name"], e["ph"], e["id"], e["pid"], e["ts"]) for e in found if e["ph"] in "sf"]
    assert arrows == [
        ("all_reduce", "s", 1, 0, 2000),
        ("all_reduce", "f", 1, 1, 4999.999),
        ("all_gather", "s", 2, 1, 12000),
        ("all_gather", "f", 2, 0, 14999.999),
    ]
    assert all(type(e["id"]) is int for e in found if e["ph"] in "sf")  # which Perfetto reads, or hexadecimal text
    assert [(name, first["pid"], last["pid"]) for name, first, last in bound(found)] == [
        ("all_reduce", 0, 1),
        ("all_gather", 1, 0),
    ]


def test_an_arrow_ends_in_the_wait_for_its_collective(tmp_path):
    """Collectives that were started before are waited for later, while others are called and waited for."""

    def rank(index, *ranges):
        names = {"a": "reduce_scatter", "b": "all_gather"}
        given = {"ranks": [0, 1]}
        return [
            header(index),
            Step(step=0, begin=0, end=1000),
            *(
                Range(
                    step=0,
                    name=names[which],
                    category="collective",
                    begin=begin,
                    end=end,
                    arguments=given | {"call": which},
                )
                if kind == "call"
                else Range(
                    step=0,
                    name=f"wait for {names[which]}",
                    category="wait",
                    begin=begin,
                    end=end,
                    arguments={"call": which},
                )
                for kind, which, begin, end in ranges
            ),
        ]

    early = rank(0, ("call", "a", 10, 20), ("call", "b", 20, 30), ("wait", "b", 40, 200), ("wait", "a", 200, 300))
    late = rank(1, ("call", "a", 60, 70), ("call", "b", 100, 110), ("wait", "a", 110, 250), ("wait", "b", 260, 270))
    events = trace(read_run(write(tmp_path / "run", early, late)))["traceEvents"]
    found = [(name, first["pid"], first["name"], last["pid"], last["name"]) for name, first, last in bound(events)]
    assert sorted(found) == [
        ("all_gather", 1, "all_gather", 0, "wait for all_gather"),
        ("reduce_scatter", 1, "reduce_scatter", 0, "wait for reduce_scatter"),
    ]
    # a rank that has waited in a step that is not there has no range to which an arrow could lead
    events = trace(read_run(write(tmp_path / "other", early[:4], late)))["traceEvents"]
    assert not [event for event in events if event["ph"] in "sf"]


def test_steps_that_were_not_traced_are_in_the_trace_and_named(tmp_path, capsys):
    output = tmp_path / "out.json"
    assert main(["trace", str(traced(tmp_path / "run")), "--steps", "0:2", "-o", str(output)]) == 0
    assert len(check_trace(json.loads(output.read_text()), range(2))) == 4
    assert "trace_steps" in capsys.readouterr().err


@pytest.mark.parametrize("options", [["--steps", "9"], ["--steps", "x"], ["--steps", "5:3"], ["-o", "/nowhere/x"]])
def test_a_trace_that_cannot_be_made_is_an_error(options, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert main(["trace", str(traced(tmp_path / "run")), *options]) == 2
    assert "error:" in capsys.readouterr().err
    assert not (tmp_path / "trace.json").exists()


def test_numbers_of_steps():
    assert [list(numbers(text, 6)) for text in ("3:5", "3", "4:", ":2", ":")] == [
        [3, 4],
        [3],
        [4, 5],
        [0, 1],
        [0, 1, 2, 3, 4, 5],
    ]
