"""What a report says of a run: numbers that are known beforehand, in bounded memory, and errors for bad files."""

from __future__ import annotations

import json
import math
import re
import sys
from dataclasses import replace

import pytest
from neuron_accel_report.page import facts, page
from neuron_accel_report.records import Collectives, Prediction, rank_file, stragglers
from neuron_accel_report.records import read_run as read_all
from neuron_accel_report.summary import COLUMNS, POINTS, Series, several, summarise
from report_made_up import MIB, TRAFFIC, late, write_run
from report_support import main

from neuron_accel.errors import ConfigurationError


def data(text: str) -> dict:
    """What the program of a page draws."""
    (found,) = re.findall(r'<script type="application/json" id="data">(.*?)</script>', text)
    return json.loads(found)


def chart(text: str, title: str) -> dict:
    (found,) = [each for each in data(text)["charts"] if each["title"] == title]
    return found


# ---- numbers ---------------------------------------------------------------------------------------------------------
def test_numbers_are_those_of_the_files(tmp_path):
    folder = write_run(tmp_path / "run", steps=40)
    run, whole = summarise(folder), read_all(folder)
    steps = [list(ranks.values()) for ranks in whole.by_step.values()]
    assert run.steps == 40
    assert run.ended
    assert run.notes == []
    for number, mean, low, high in run.series["loss"].points:
        assert mean == low == high == pytest.approx(sum(each.loss for each in steps[number]) / 4)
    assert run.mean("seconds") == pytest.approx(sum(each.seconds for step in steps for each in step) / 160)
    assert run.mean("tokens") == pytest.approx(sum(4096 / each.seconds for step in steps for each in step) / 160)
    for part, seconds in run.part_seconds.items():
        assert seconds == pytest.approx(sum(each.parts[part] for step in steps for each in step) / 4)
    assert run.seconds == pytest.approx(40 * run.mean("seconds"))
    assert (run.memory[0], run.memory[2].device_peak) == (1, 630 * MIB)
    assert (run.first_loss, run.last_loss) == (run.series["loss"].points[0][1], run.series["loss"].points[-1][1])


def test_a_late_rank_is_named_by_rank_step_and_part(tmp_path):
    folder = write_run(tmp_path / "run", change=late(2, 37, seconds=0.05))
    run = summarise(folder)
    (found,) = run.late
    assert (found.rank, found.steps, found.worst.step, found.worst.part) == (2, 1, 37, "loader")
    assert found.seconds == pytest.approx(0.05, abs=0.002)
    assert [found.worst] == stragglers(read_all(folder))
    values = chart(page([run]), "Ranks by step: run")
    assert values["late"] == [2]
    assert values["values"][2][37] == pytest.approx(found.seconds, rel=1e-3)
    assert max(value for row in values["values"] for value in row) == values["values"][2][37]
    assert summarise(write_run(tmp_path / "even")).late == []


def test_predicted_traffic_is_beside_that_which_is_seen(tmp_path, capsys):
    fewer = (replace(TRAFFIC[0], bytes=1), *TRAFFIC[1:])
    folder = write_run(tmp_path / "run", ranks=2, predicted=Prediction(traffic=fewer))
    assert main(["report", str(folder), "--text"]) == 0
    lines = [re.split(r"  +", line) for line in capsys.readouterr().out.splitlines()]
    assert ["tp", "all_reduce", "24", "24", "1 B", "6.00 MiB", "differs"] in lines
    assert ["dp", "all_gather", "2", "2", "3.00 MiB", "3.00 MiB", "equal"] in lines
    text = page([summarise(folder)])
    assert "<td>1 B</td><td>6.00 MiB</td><td>differs</td>" in text
    assert "tp, predicted</div>" in text
    without = page([summarise(write_run(tmp_path / "other", predicted=None))])
    assert "tp, measured</div>" in without
    assert "tp, predicted</div>" not in without


def test_two_runs_are_laid_over_each_other(tmp_path):
    folders = [write_run(tmp_path / name / "run", speed=speed) for name, speed in (("a", 1), ("b", 2))]
    runs = several(folders)
    assert [run.name for run in runs] == [str(folder) for folder in folders]
    text = page(runs)
    for title in ("Loss", "Throughput", "Time of a step"):
        assert [(each["run"], len(each["points"])) for each in chart(text, title)["series"]] == [(0, 60), (1, 60)]
    for run, series in zip(runs, chart(text, "Loss")["series"], strict=True):  # what it is drawn by besides steps
        seconds, tokens = series["at"]["time"], series["at"]["tokens of a rank"]
        assert seconds == sorted(seconds)
        assert seconds[-1] == pytest.approx(sum(run.series["seconds"].totals(1).values()), rel=1e-3)
        assert tokens == [pytest.approx(8 * 512 * number, rel=1e-3) for number in range(1, 61)]
    assert text.count("<button") == 2 * text.count('<ul class="legend"><li><button')
    again = several([folders[0], folders[0]])
    assert len({run.name for run in again}) == 2


def test_a_colour_means_one_thing_on_a_page(tmp_path):
    text = page(several([write_run(tmp_path / name) for name in ("a", "b")]))
    swatches = re.findall(r'<span class="swatch" style="background:([^"]+)"></span>([^<]+)', text)
    bars = re.findall(r'background:([^"]+)" title="([^"]+)"', text)
    areas = chart(text, "Parts of a step: a")
    colours = {name: colour for colour, name in [*swatches, *bars]}
    assert {"loader", "parameters", "reduce_scatter"} <= set(colours)
    assert len(set(colours.values())) == len(set(swatches)) == len({*swatches, *bars})
    assert not {"var(--c0)", "var(--c1)"} & set(colours.values())  # those of the two runs
    assert areas["colours"] == [colours[name] for name in areas["names"]]


# ---- size ------------------------------------------------------------------------------------------------------------
def test_a_thinned_series_keeps_the_lowest_and_the_highest():
    series = Series(10)
    for step in range(1000):
        series.add(step, 100.0 if step == 777 else -5.0 if step == 3 else float(step % 2))
    assert len(series) <= 20
    assert series.width == 64
    points = {step: (mean, low, high) for step, mean, low, high in series.points}
    assert points[0][1] == -5.0
    assert points[768][2] == 100.0
    assert sum(series.counts.values()) == 1000
    assert sum(mean * series.counts[step] for step, (mean, *_) in points.items()) == pytest.approx(500 + 100 - 5 - 2)


def test_of_a_long_run_as_little_is_kept_as_of_a_short_one(tmp_path):
    folder = write_run(tmp_path / "long", ranks=2, steps=1700, change=late(1, 613))
    run = summarise(folder)
    assert run.steps == 1700
    assert [(each.rank, each.worst.step) for each in run.late] == [(1, 613)]
    kept = [*run.series.values(), *run.parts.values()]
    assert {POINTS < len(series) <= 2 * POINTS for series in kept} == {True}
    assert {COLUMNS < len(series) <= 2 * COLUMNS for series in run.step_times.values()} == {True}
    text = page([run])
    assert len(text) < 500_000
    shown = chart(text, "Ranks by step: long")
    column = shown["columns"].index(613 // shown["width"] * shown["width"])
    assert shown["values"][1][column] == pytest.approx(0.05, abs=0.002)
    assert "a point is the mean of up to 4 steps" in text


def test_of_many_ranks_those_that_were_late_are_shown(tmp_path):
    run = summarise(write_run(tmp_path / "run", ranks=80, steps=5, change=late(77, 3)))
    shown = chart(page([run]), "Ranks by step: run")
    assert len(shown["ranks"]) == 64
    assert shown["ranks"][-1] == 77
    assert "64 of 80 ranks are shown" in page([run])


# ---- files that are not as they should be ----------------------------------------------------------------------------
def test_the_head_says_what_was_run(tmp_path, capsys):
    more = {
        "command": "train.py --lr 1",
        "options": {"zero1": {"overlap": False}},
        "versions": {"transformers": "5.24"},
        "commit": "c0ffee",
        "optimizer": "AdamW",
        "hyperparameters": {"lr": "0.001", "weight_decay": "0.1 / 0.0"},
        "global_batch": 1024,
        "gradient_accumulation_steps": 4,
        "mixed_precision": "bf16",
    }
    found = dict(facts([summarise(write_run(tmp_path / "run", model="LlamaForCausalLM", **more))]))
    assert (found["model"], found["command"]) == ("LlamaForCausalLM", "train.py --lr 1")
    assert found["options"] == "zero1: overlap False"
    assert "transformers 5.24" in found["versions"]
    assert found["optimizer"] == "AdamW: lr 0.001, weight_decay 0.1 / 0.0"
    names = ("commit", "samples of a step", "gradient accumulation", "mixed precision")
    assert [found[name] for name in names] == ["c0ffee", "1,024", "4", "bf16"]
    assert "<td>AdamW: lr 0.001, weight_decay 0.1 / 0.0</td>" in page([summarise(tmp_path / "run")])
    assert main(["report", str(tmp_path / "run"), "--text"]) == 0
    assert "AdamW: lr 0.001" in capsys.readouterr().out


def test_what_is_missing_is_said(tmp_path):
    folder = write_run(tmp_path / "run", steps=9, ended=False)
    (folder / rank_file(2)).unlink()
    with (folder / rank_file(3)).open("a") as file:
        file.write('{"kind":"step","step":9,"ti')
    lines = (folder / rank_file(0)).read_text().splitlines(keepends=True)
    (folder / rank_file(0)).write_text("".join(lines[:-1]))
    run = summarise(folder)
    assert run.notes == [
        "There is no file of rank 2; the run had 4 ranks.",
        "The files of ranks 0, 1, 3 have no last line: the run continues, or was interrupted.",
        "Steps end with 7 on rank 0, with 8 on others.",
        "The last line of rank 3 is incomplete and left out.",
    ]
    assert run.steps == 9
    text = page([run])
    assert all(note in text for note in run.notes)


def test_losses_that_are_not_finite_are_counted_and_not_drawn(tmp_path):
    def change(rank, step, record):
        return replace(record, loss=math.nan) if step >= 4 and rank == 1 else replace(record, grad_norm=math.inf)

    run = summarise(write_run(tmp_path / "run", steps=20, change=change))
    assert run.notes == ["The loss of 16 steps is not finite: 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, ...."]
    assert len(run.series["loss"]) == 4
    text = page([run])
    assert "NaN" not in json.dumps(data(text))
    assert [each["title"] for each in data(text)["charts"]].count("Gradient norm") == 0 or "Infinity" not in text


def test_a_training_that_went_back_is_read_in_its_order(tmp_path):
    folder = write_run(tmp_path / "run", ranks=2, steps=6, ended=False)
    for rank in range(2):
        lines = (folder / rank_file(rank)).read_text().splitlines(keepends=True)
        again = lines[1 + 4 :]  # from a checkpoint of step 4
        (folder / rank_file(rank)).write_text("".join(lines + again))
    run = summarise(folder)
    assert run.steps == 8
    assert run.last == {0: 5, 1: 5}
    assert run.series["seconds"].counts == {0: 1, 1: 1, 2: 1, 3: 1, 4: 2, 5: 2}


@pytest.mark.parametrize(
    ("break_it", "words"),
    [
        (lambda folder: [path.unlink() for path in folder.iterdir()], "it has no file rank-*.jsonl"),
        (lambda folder: (folder / rank_file(1)).write_text("{}\n"), "whose 'kind' is one of run, step, range, end"),
        (lambda folder: edit(folder, 1, '"version":2', '"version":7'), "version 7 of the format, and this reads"),
        (lambda folder: edit(folder, 1, '"run":"a-run"', '"run":"b"'), "are of different runs"),
        (lambda folder: edit(folder, 1, '"rank":1', '"rank":0'), "Rank 0 has two files"),
        (lambda folder: edit(folder, 1, '"begin":0', '"begin":"long"'), "line 2"),
        (lambda folder: edit(folder, 1, '"kind":"step"', '"kind":"run"'), "it lacks run, rank"),
        (lambda folder: edit(folder, 0, "", "x"), "it is not JSON"),
        (lambda folder: [path.write_text("") for path in folder.iterdir()], "no rank has completed its first line"),
    ],
)
def test_bad_files_are_errors_in_words(break_it, words, tmp_path, capsys):
    folder = write_run(tmp_path / "run", steps=3)
    break_it(folder)
    with pytest.raises(ConfigurationError, match=re.escape(words)):
        summarise(folder)
    assert main(["report", str(folder), "-o", str(tmp_path / "report.html")]) == 2
    assert "Traceback" not in capsys.readouterr().err
    assert not (tmp_path / "report.html").exists()


def edit(folder, rank, old, new):
    path = folder / rank_file(rank)
    path.write_text(path.read_text().replace(old, new, 1))


def test_a_folder_that_does_not_exist_is_named(capsys):
    assert main(["report", "nowhere"]) == 2
    error = capsys.readouterr().err
    assert "There is no run report in 'nowhere'" in error
    assert "there is no such folder" in error


def test_a_page_that_cannot_be_written_is_an_error(tmp_path, capsys):
    folder = write_run(tmp_path / "run", steps=2)
    assert main(["report", str(folder), "-o", str(tmp_path / "no/report.html")]) == 2
    assert "cannot be written" in capsys.readouterr().err


# ---- text of others --------------------------------------------------------------------------------------------------
EVIL = "</script><script>document.title='taken'</script><img src=x onerror=alert(1)>"


def test_text_of_a_file_stays_text(tmp_path):
    host = f'" onmouseover="alert(1){EVIL}'
    folder = write_run(tmp_path / "run", plugins=("zero1", EVIL), host=host, change=late(1, 5))

    def change(text):
        return text.replace('"op":"all_gather","group":"dp"', json.dumps({"op": EVIL, "group": EVIL})[1:-1])

    for path in folder.iterdir():
        path.write_text(change(path.read_text()))
    text = page(several([folder]))
    assert text.count("<script") == 2  # the data and the program
    assert "<img" not in text
    assert 'onmouseover="' not in text


def test_text_of_a_file_does_not_steer_the_terminal(tmp_path, capsys):
    folder = write_run(tmp_path / "run", plugins=("zero1", "\x1b]0;title\x07\x1b[2J"))
    assert main(["report", str(folder), "--text"]) == 0
    shown = capsys.readouterr().out
    assert "\x1b" not in shown
    assert "zero1, ?]0;title??[2J" in shown


# ---- a terminal ------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("columns", [60, 80, 120])
def test_what_is_printed_fits_the_terminal(columns, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", str(columns))
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    for name in ("before", "after"):
        write_run(tmp_path / name, steps=20, change=late(3, 7), ended=False)
    assert main(["report", "before", "after"]) == 0
    lines = capsys.readouterr().out.split("\n")
    assert [line for line in lines if len(line) > columns] == []
    assert lines[-2] == "written: report.html"
    assert (tmp_path / "report.html").stat().st_size > 10_000
    assert sorted(path.name for path in tmp_path.iterdir()) == ["after", "before", "report.html"]


def test_a_run_without_optional_values_has_a_page(tmp_path):
    def change(rank, step, record):
        names = ("samples", "tokens", "waiting", "loss", "grad_norm")
        bare = replace(record, **dict.fromkeys(names), lr=(), collectives=(), memory=type(record.memory)())
        return replace(bare, collectives=(Collectives(op="all_reduce", group="dp", count=1, bytes=0),))

    run = summarise(write_run(tmp_path / "run", ranks=1, steps=1, change=change, predicted=None))
    titles = [each["title"] for each in data(page([run]))["charts"]]
    assert titles == ["Time of a step", "Parts of a step: run"]
    empty = summarise(write_run(tmp_path / "empty", steps=0, ended=False))
    assert "No optimizer step is complete yet." in page([empty])
