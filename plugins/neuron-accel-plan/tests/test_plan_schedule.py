"""When the computations of a pipeline happen, what a rank keeps meanwhile, and the chart of it."""

from __future__ import annotations

import itertools
import math
import re
from xml.etree import ElementTree

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from neuron_accel_plan.schedule_chart import text
from neuron_accel_plan.timeline import Kind, in_flight, make_timeline, needs, schedule_of

from neuron_accel import PipelineParallelPlugin
from neuron_accel.commands import main
from neuron_accel.errors import ConfigurationError

few = settings(deadline=None, max_examples=50)


def make_schedule(name, *, stages, microbatches, virtual_stages=1):
    return schedule_of(
        PipelineParallelPlugin(
            pipeline_parallel_size=stages, num_microbatches=microbatches, schedule=name, virtual_stages=virtual_stages
        )
    )


@st.composite
def schedules(draw):
    name = draw(st.sampled_from(["1f1b", "gpipe", "interleaved", "zero-bubble"]))
    stages = draw(st.integers(2, 8))
    if name == "interleaved":
        microbatches, virtual = stages * draw(st.integers(1, 4)), draw(st.integers(2, 3))
    else:
        microbatches, virtual = draw(st.integers(1, 33)), 1
    return make_schedule(name, stages=stages, microbatches=microbatches, virtual_stages=virtual)


@few
@given(schedules())
def test_activations_stay_within_the_bound(schedule):
    ranks, microbatches, virtual = schedule.ranks, schedule.microbatches, schedule.virtual_stages
    for rank in range(ranks):
        bound = {
            "gpipe": microbatches,
            "1f1b": min(ranks - rank, microbatches),
            "interleaved": min(2 * (ranks - rank - 1) + (virtual - 1) * ranks + 1, virtual * microbatches),
            "zero-bubble": min(ranks, microbatches),
        }[schedule.name]
        assert in_flight(schedule, rank) == bound or (
            schedule.name == "zero-bubble" and in_flight(schedule, rank) < bound
        )


@few
@given(schedules(), st.floats(0.5, 4), st.floats(0.5, 4), st.floats(0.1, 1))
def test_the_bubble_is_that_of_the_formula(schedule, forward, inputs, weight_share):
    weight = min(forward, inputs) * weight_share  # zero bubble's formula is for weight gradients that fit into the gaps
    costs = {
        Kind.FORWARD: forward,
        Kind.BACKWARD: inputs + weight,
        Kind.BACKWARD_INPUT: inputs,
        Kind.BACKWARD_WEIGHT: weight,
    }
    timeline = make_timeline(schedule, costs)
    ramp = schedule.ranks - 1
    if schedule.name == "zero-bubble":
        if schedule.microbatches < schedule.ranks:
            return  # fewer weight gradients than gaps
        expected = ramp * (forward + inputs - weight)
    else:  # a stage takes 1 / virtual of a rank's time, and `forward` is a stage's here
        expected = ramp * (forward + inputs + weight)
    assert timeline.bubble == pytest.approx(expected, abs=1e-6)
    per_rank = schedule.microbatches * schedule.virtual_stages * (forward + inputs + weight)
    assert timeline.busy(0) == pytest.approx(per_rank)
    assert timeline.bubble_share == pytest.approx(expected / (expected + per_rank))


@few
@given(schedules())
def test_a_timeline_keeps_the_order_and_waits_for_what_it_needs(schedule):
    timeline = make_timeline(schedule)
    ends = {span.action: span.end for span in timeline.spans}
    for span in timeline.spans:
        assert all(ends[needed] <= span.start for needed in needs(span.action, schedule.stages))
    for rank in range(schedule.ranks):
        mine = [span for span in timeline.spans if span.rank == rank]
        assert all(a.end <= b.start for a, b in itertools.pairwise(mine))
        assert tuple(span.action for span in mine) == schedule.actions[rank]


def test_the_command_line_draws(capsys, tmp_path):
    path = tmp_path / "picture.svg"
    arguments = [
        "schedule",
        "--pipeline-parallel-size",
        "2",
        "--num-microbatches",
        "3",
        "--schedule",
        "1f1b",
        "--svg",
        str(path),
    ]
    assert main(arguments) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[:3] == [
        "1f1b: 2 stages, 3 micro-batches, bubble 25.0%, at most 2 micro-batches in flight",
        "rank 0  F0 F1 .  .  B0 -- F2 B1 -- .  B2 --",
        "rank 1  .  F0 B0 -- F1 B1 -- F2 B2 -- .  .",
    ]
    picture = ElementTree.parse(path).getroot()
    namespace = "{http://www.w3.org/2000/svg}"
    boxes = picture.findall(f"{namespace}g")
    assert len(boxes) == 12
    titles = [box.find(f"{namespace}title").text for box in boxes]
    assert "backward of micro-batch 2, stage 0, 10 to 12" in titles


COSTS = st.sampled_from([0.1, 0.25, 1 / 3, 0.5, 0.7, 1.0, 1.5, 1.9, 2.0, 2.5, 3.0, 7.3])


@few
@given(schedules(), COSTS, st.integers(40, 300))
def test_a_chart_has_every_computation_and_fits(schedule, cost, width):
    halves = {Kind.BACKWARD: cost, Kind.BACKWARD_INPUT: cost / 2, Kind.BACKWARD_WEIGHT: cost / 2}
    drawn = text(make_timeline(schedule, halves), width)
    assert max(map(len, drawn.splitlines())) <= width
    if "too many to draw" in drawn:
        return
    rows = ["".join(re.findall(rf"^rank {rank} +(.*)$", drawn, re.MULTILINE)) for rank in range(schedule.ranks)]
    for rank, row in enumerate(rows):
        computations = schedule.actions[rank]
        labels = [f"{a.kind.value}{a.microbatch}" for a in computations]
        if "--svg" in drawn:
            assert re.findall("[FBIW]", row) == [a.kind.value for a in computations]
        elif schedule.virtual_stages == 1:
            assert re.findall(r"[FBIW]\d+", row) == labels


@pytest.mark.parametrize("cost", [0.0, -1.0, math.nan, math.inf])
def test_costs_are_above_nothing(cost):
    schedule = make_schedule("1f1b", stages=2, microbatches=2)
    with pytest.raises(ConfigurationError, match="cannot take"):
        make_timeline(schedule, {Kind.BACKWARD: cost})


def test_a_chart_with_a_fraction_is_drawn_to_scale(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    assert main(["schedule", "--pipeline-parallel-size", "2", "--num-microbatches", "2", "--backward-cost", "1.5"]) == 0
    assert capsys.readouterr().out.splitlines()[1:] == [
        "rank 0  F0 F1 .  . B0- .  B1--",
        "rank 1  .  F0 B0-- F1 B1- .  .",
    ]


def test_the_command_line_draws_stages_of_one_rank_apart(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "120")
    arguments = "schedule --pipeline-parallel-size 2 --num-microbatches 2 --schedule interleaved --virtual-stages 2"
    assert main(arguments.split()) == 0
    assert "rank 0  F0.0 F1.0 F0.1 F1.1 " in capsys.readouterr().out


def test_the_command_line_says_what_is_impossible(capsys):
    assert main(["schedule", "--schedule", "interleaved"]) == 2
    assert "is 1F1B" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("command", "what", "where"),
    [
        ("schedule --svg /nope/x.svg", "/nope/x.svg cannot be written: No such file or directory.", "--svg"),
        ("schedule --backward-cost 0", "cannot take 0 forward passes", "--backward-cost"),
        ("schedule --backward-cost -1", "cannot take -1 forward passes", "--backward-cost"),
        ("schedule --backward-cost inf", "cannot take inf forward passes", "--backward-cost"),
        ("schedule --stages 99999 --microbatches 99999", "are too many to draw", "--pipeline-parallel-size"),
        ("schedule --schedule interleaved", "with --virtual-stages 1 is 1F1B", "--virtual-stages"),
        ("schedule --virtual-stages 3", "runs one stage on each rank", "--virtual-stages"),
        ("schedule --pipeline-parallel-size 0", "--pipeline-parallel-size is 0", None),
        ("schedule --pipeline-parallel-size 1", "fix: pass at least 2", None),
        (
            "schedule --schedule interleaved --virtual-stages 2 --num-microbatches 6",
            "cannot run 6",
            "--num-microbatches",
        ),
    ],
)
def test_what_cannot_be_drawn_is_said_in_words_of_the_command_line(command, what, where, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert main(command.split()) == 2
    error = capsys.readouterr().err
    assert what in error
    assert where is None or f"where: {where}" in error
    assert not re.search(r"virtual_stages|schedule=|num_microbatches|Traceback", error)
    assert list(tmp_path.iterdir()) == []


def test_former_names_of_options_are_understood_and_not_shown(capsys):
    assert main(["schedule", "--stages", "3", "--microbatches", "5"]) == 0
    assert "1f1b: 3 stages, 5 micro-batches" in capsys.readouterr().out
    with pytest.raises(SystemExit):
        main(["schedule", "--help"])
    assert not re.search(r"--stages|--microbatches", capsys.readouterr().out)
