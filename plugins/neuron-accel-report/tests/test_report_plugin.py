"""The plugin of run reports: what it shows, its options, and how time is divided over ranges."""

from __future__ import annotations

import contextlib
import io
import json
import re
import sys
import threading
import time
from itertools import count
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from neuron_accel_report import RunReportPlugin
from neuron_accel_report.live import Dashboard, Lines, make_display, render
from neuron_accel_report.plugin import ReportFile, figures
from neuron_accel_report.recorder import Recorder, ResidentMemory
from neuron_accel_report.records import Collectives, Memory, Step, Straggler, read_run

from neuron_accel import NeuronAccelerator
from neuron_accel.contract import Group
from neuron_accel.contract.events import Events
from neuron_accel.errors import ConfigurationError

RANGE_CALLS, STEP_CALLS = 18, 80
"""Calls of functions that a range, and a step without events, take at most."""
STEP = Step(
    step=120,
    begin=0,
    end=400_000_000,
    samples=8,
    tokens=4096,
    parts={"loader": 0.01, "forward": 0.1, "backward": 0.2, "communication": 0.05, "optimizer": 0.03, "other": 0.01},
    collectives=(
        Collectives(op="all_reduce", group="dp", count=1, bytes=5),
        Collectives(op="broadcast", group="dp", count=1, bytes=6),
    ),
    memory=Memory(host=2 << 30),
    loss=2.3,
    grad_norm=0.8,
    lr=(3e-4,),
    mfu=0.41,
    compilations=2,
)
LATE = [Straggler(step=99, rank=3, seconds=0.052, part="loader")]


# ---- on the terminal -------------------------------------------------------------------------------------------------
class Terminal(io.StringIO):
    def isatty(self):
        return True


def test_a_terminal_gets_a_dashboard_and_a_log_gets_lines():
    pytest.importorskip("rich")
    assert isinstance(make_display("auto", 1.0, Terminal()), Dashboard)
    assert isinstance(make_display("auto", 1.0, io.StringIO()), Lines)
    assert isinstance(make_display("lines", 1.0, Terminal()), Lines)
    assert make_display("nothing", 1.0, Terminal()) is None


def test_without_rich_there_are_lines_and_a_dashboard_is_an_error(monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert isinstance(make_display("auto", 1.0, Terminal()), Lines)
    with pytest.raises(ConfigurationError, match="needs rich"):
        make_display("dashboard", 1.0, Terminal())


def test_lines_are_seldom_and_say_what_is_known():
    stream = io.StringIO()
    lines = Lines(60.0, stream)
    for _ in range(3):
        lines.show(STEP, LATE, 4)
    first, late, compiled = stream.getvalue().splitlines()
    for fact in (
        "step 120",
        "loss 2.3000",
        "grad norm 0.8",
        "40,960 tokens/s",
        "MFU 41.0%",
        "2.00 GiB",
        "backward 50%",
    ):
        assert fact in first
    assert "rank 3 is 52 ms late (loader)" in late
    assert "2 graphs were compiled" in compiled


@pytest.mark.parametrize("columns", [60, 80, 120])
def test_the_dashboard_fits_the_terminal(columns):
    pytest.importorskip("rich")
    from rich.console import Console

    console = Console(file=io.StringIO(), width=columns, force_terminal=True, color_system=None)
    console.print(render(STEP, LATE, 4, columns))
    lines = console.file.getvalue().splitlines()
    assert all(len(line) <= columns for line in lines)
    text = "\n".join(lines)
    for fact in ("loss 2.3000", "40,960 tokens/s", "host memory 2.00 GiB", "backward 50%", "rank 3 is 52 ms late"):
        assert fact in text


def test_the_dashboard_is_redrawn_seldom_and_shows_the_last_step():
    pytest.importorskip("rich")
    stream = Terminal()
    dashboard = Dashboard(stream)
    for number in range(50):
        dashboard.show(Step(step=number, begin=0, end=10**9, parts={"other": 1.0}), [], 1)
    dashboard.close()
    shown = re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", stream.getvalue())
    assert "step 49" in shown
    assert "step 20" not in shown


def test_figures_for_trackers_are_those_that_are_known():
    found = figures(STEP)
    assert found["run_report/sent/dp"] == 11.0
    assert found["run_report/tokens_per_second"] == pytest.approx(10240)
    assert found["run_report/memory/host"] == float(2 << 30)
    assert "run_report/memory/device" not in found
    assert "run_report/waiting" not in found


# ---- options ---------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("options", [{"compare_every": -1}, {"show_seconds": -1.0}, {"show": "all"}, {"folder": 3}])
def test_options_are_checked(options):
    with pytest.raises(ConfigurationError):
        RunReportPlugin(**options)


@pytest.mark.parametrize("text", [None, "", "[]", '{"rank": 0}', '{"rank": 0, "traffic": [{}], "operations": 1}'])
def test_a_file_without_a_prediction_is_an_error(text, tmp_path):
    path = tmp_path / "plan.json"
    if text is not None:
        path.write_text(text)
    plugin = RunReportPlugin(folder=tmp_path / "report", predicted=path, show="nothing")
    with pytest.raises(ConfigurationError, match="has no prediction"):
        NeuronAccelerator(cpu=True, plugins=[plugin])


# ---- one rank --------------------------------------------------------------------------------------------------------
def train(accelerator, *, steps=2, evaluate=False):
    model = torch.nn.Linear(4, 4)
    model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=0.1))
    for _ in range(steps):
        accelerator.backward(model(torch.ones(3, 4)).sum())
        if evaluate:
            model.eval()
            with torch.no_grad():
                model(torch.ones(300, 4))
            model.train()
        optimizer.step()
        optimizer.zero_grad()
    accelerator.end_training()


def test_utilization_is_that_of_the_instance(tmp_path, monkeypatch):
    monkeypatch.setenv("NEURON_ACCEL_INSTANCE", "trn1.2xlarge")
    prediction = {"rank": 0, "traffic": [], "operations": 10**12}
    (tmp_path / "plan.json").write_text(json.dumps(prediction))
    plugin = RunReportPlugin(folder=tmp_path / "report", predicted=tmp_path / "plan.json", show="nothing")
    train(NeuronAccelerator(cpu=True, plugins=[plugin]))
    (rank,) = read_run(tmp_path / "report").ranks
    assert rank.header.instance.startswith("trn1.2xlarge")
    assert rank.header.peak_flops > 1e13
    assert rank.header.parameters == 20
    for step in rank.steps:
        assert step.flops == 1e12
        assert step.mfu == pytest.approx(1e12 / step.training_seconds / rank.header.peak_flops)
        assert step.memory.parameters == step.memory.gradients == 20 * 4
        assert step.memory.optimizer >= 2 * 20 * 4
        assert step.samples == 3
        assert step.tokens is None
    assert "run_report" in (tmp_path / "report" / "plan.txt").read_text()


def test_forward_passes_without_gradients_are_evaluation(tmp_path):
    plugin = RunReportPlugin(folder=tmp_path, show="nothing")
    train(NeuronAccelerator(cpu=True, plugins=[plugin]), evaluate=True)
    for step in read_run(tmp_path).ranks[0].steps:
        assert step.parts["evaluation"] > 0
        assert step.samples == 3
        assert step.training_seconds < step.seconds


def test_a_run_that_goes_on_after_its_objects_were_released_has_another_report(tmp_path):
    accelerator = NeuronAccelerator(cpu=True, plugins=[RunReportPlugin(folder=tmp_path, show="nothing")])
    model = torch.nn.Linear(4, 4)
    for steps in (1, 2):
        prepared, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters()))
        for _ in range(steps):
            accelerator.backward(prepared(torch.ones(3, 4)).sum())
            optimizer.step()
        accelerator.free_memory()
    found = read_run(tmp_path).ranks[0].steps
    assert [step.step for step in found] == [0, 1]
    assert found[1].parts["forward"] > 0
    (earlier,) = tmp_path.glob("earlier-*")
    assert len(read_run(earlier).ranks[0].steps) == 1
    assert (earlier / "plan.txt").exists()


def test_nothing_is_left_when_the_run_ends(tmp_path):
    accelerator = NeuronAccelerator(cpu=True, plugins=[RunReportPlugin(folder=tmp_path, show="nothing")])
    run = accelerator.run
    assert run.events.of["step"]
    train(accelerator)
    assert not run.events.of["step"]


# ---- ranges ----------------------------------------------------------------------------------------------------------
DP = Group(ranks=(0, 1), index=0, partition=((0, 1),), name="dp")


class Backend:
    compilations, is_lazy, device_memory = None, False, None


def record(body):
    """Steps that a recorder sees while ``body(events)`` runs."""
    events, found = Events(), []
    recorder = Recorder(Backend(), origin=0, traced=frozenset({0, 1}), finished=found.append)
    remove = events.observe(recorder)
    body(events)
    remove()
    recorder.close()
    return found


def step_in(events):
    return events.open("optimizer step", "step", part="optimizer", optimizer=1)


class Clock:
    """Time that passes only when it is told to."""

    now = 100 * 10**9

    def perf_counter_ns(self):
        return self.now

    def pass_by(self, seconds):
        self.now += seconds * 10**9


def test_time_belongs_to_the_innermost_range(monkeypatch):
    clock = Clock()
    monkeypatch.setattr("neuron_accel_report.recorder.time", clock)

    def body(events):
        clock.pass_by(50)  # before the first step
        with events.open("forward", "part", part="forward"):
            clock.pass_by(2)
            with events.open("a hook", "hook"):
                clock.pass_by(1)
            with events.collective("all_reduce", DP, 8, torch.float32) as outer:
                clock.pass_by(3)
                with outer.waiting():
                    clock.pass_by(4)
        clock.pass_by(5)
        with events.open("my own", part="unknown"):
            clock.pass_by(6)
        with step_in(events):
            clock.pass_by(7)

    (measured,) = record(body)
    step = measured.step
    expected = {"forward": 3, "communication": 7, "other": 11, "optimizer": 7}
    assert {part: seconds for part, seconds in step.parts.items() if seconds} == expected
    assert (step.begin, step.end, step.seconds, step.waiting) == (150 * 10**9, 178 * 10**9, 28, 4)
    spans = {span.name: (span.begin / 1e9, span.end / 1e9) for span in measured.ranges}
    assert spans["forward"] == (150, 160)
    assert spans["wait for all_reduce"] == (156, 160)


def test_the_time_of_a_range_around_several_steps_belongs_to_each_of_them(monkeypatch):
    clock = Clock()
    monkeypatch.setattr("neuron_accel_report.recorder.time", clock)

    def body(events):
        with events.open("forward", "part", part="forward"):
            pass
        with events.open("my loop", part="evaluation"):
            for seconds in (1, 2):
                clock.pass_by(seconds)
                with step_in(events):
                    clock.pass_by(10)

    for seconds, measured in zip((1, 2), record(body), strict=True):
        assert (measured.step.parts["evaluation"], measured.step.parts["optimizer"]) == (seconds, 10)
        assert measured.step.seconds == sum(measured.step.parts.values()) == seconds + 10


def fail(events):
    with contextlib.suppress(ValueError), events.open("forward", "part", part="forward"):
        events.open("never closed").__enter__()
        raise ValueError


def test_an_error_in_a_range_closes_it():
    def body(events):
        for _ in range(2):
            fail(events)
            with step_in(events):
                pass

    first, second = record(body)
    assert (first.step.step, second.step.step) == (0, 1)
    assert {span.name for span in second.ranges} == {"forward", "never closed", "optimizer step"}


def test_steps_are_those_of_the_first_optimizer():
    def body(events):
        for _ in range(3):
            with step_in(events):
                pass
            with events.open("optimizer step", "step", part="optimizer", optimizer=2):
                pass

    assert [each.step.step for each in record(body)] == [0, 1, 2]


def test_ranges_of_other_threads_count_in_backward_only():
    def elsewhere(events):
        def work():
            with events.collective("broadcast", DP, 8, torch.float32):
                time.sleep(0.01)

        thread = threading.Thread(target=work)
        thread.start()
        thread.join()

    def body(events):
        with events.open("forward", "part", part="forward"):
            elsewhere(events)
        with step_in(events):
            pass
        with events.open("backward", "part", part="backward"):
            elsewhere(events)
        with step_in(events):
            pass

    first, second = record(body)
    assert first.step.parts["communication"] == 0
    assert second.step.parts["communication"] > 0.005


def test_ranges_without_an_observer_do_nothing():
    events = Events()
    assert events.open("a") is events.open("b") is events.collective("all_gather", DP)
    with events.open("a", "part"), events.collective("all_gather", DP).waiting():
        pass


def test_the_folder_can_be_text():
    assert RunReportPlugin(folder="there").folder == Path("there")


# ---- what fails does not end a training ------------------------------------------------------------------------------
class Closed(io.StringIO):
    def write(self, text):
        raise BrokenPipeError


def test_a_closed_output_does_not_end_the_training(tmp_path, monkeypatch):
    monkeypatch.setattr("sys.stdout", Closed())
    plugin = RunReportPlugin(folder=tmp_path, show="lines", show_seconds=0.0)
    train(NeuronAccelerator(cpu=True, plugins=[plugin]))
    assert len(read_run(tmp_path).ranks[0].steps) == 2


# ---- what it costs ---------------------------------------------------------------------------------------------------
@contextlib.contextmanager
def measured_ranges(folder):
    """A function that makes a step of so many collectives, which a recorder measures and a file gets."""
    backend = SimpleNamespace(compilations=None, device_memory=None, is_lazy=False)
    file, events = ReportFile(folder, 0), Events()
    recorder = Recorder(backend, origin=0, traced=frozenset(), finished=lambda measured: file.write([measured.step]))
    remove = events.observe(recorder)

    def step(count):
        for _ in range(count):
            with events.collective("all_gather", DP, 64, torch.float32):
                pass
        with step_in(events):
            pass

    try:
        yield step
    finally:
        remove()
        recorder.close()
        file.close()


def calls(body):
    """Number of functions, of Python and of C, that ``body()`` calls."""
    found = []
    before = sys.getprofile()
    sys.setprofile(lambda frame, event, argument: found.append(event) if event in ("call", "c_call") else None)
    try:
        body()
    finally:
        sys.setprofile(before)
    return len(found)


def test_a_range_costs_few_calls_of_functions(tmp_path):
    """What a range costs, counted so that it does not depend on the machine."""
    with measured_ranges(tmp_path) as step:
        step(1)
        few, many = calls(lambda: step(10)), calls(lambda: step(110))
    assert many - few <= 100 * RANGE_CALLS, (many - few) / 100
    assert few - 10 * RANGE_CALLS <= STEP_CALLS, few - 10 * RANGE_CALLS


def test_the_time_of_the_report_grows_with_the_number_of_ranges(monkeypatch):
    monkeypatch.setattr("neuron_accel_report.recorder.time", SimpleNamespace(perf_counter_ns=count().__next__))

    def body(events):
        for ranges in (1, 400):
            for _ in range(ranges):
                with events.open("mine"):
                    pass
            with step_in(events):
                pass

    few, many = [each.step.own_seconds for each in record(body)]
    assert many / few == pytest.approx(
        401 / 2, rel=0.01
    )  # each with the range of the step itself, and the time to write it


def test_resident_memory_is_that_of_this_process():
    import psutil

    resident = ResidentMemory()
    try:
        assert resident() == pytest.approx(psutil.Process().memory_info().rss, rel=0.05)
    finally:
        resident.close()
    assert resident() > 0  # where the system has no such file
