"""What ranks write of a run: parts that add up, collectives, stragglers, and figures for trackers."""

from __future__ import annotations

import os
import platform
import re
import shlex
import shutil
import subprocess
import sys
import time
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from neuron_accel_report.page import facts
from neuron_accel_report.plugin import commit_of
from neuron_accel_report.records import PARTS, read_run, stragglers
from neuron_accel_report.summary import summarise
from neuron_accel_report.trace import trace
from report_support import bound, llama, token_batches

from neuron_accel.testing import run_ranks

PIPELINE = {"pipeline_parallel": {"pipeline_parallel_size": 2, "num_microbatches": 2}}
TP2 = {"model_parallelism": {"tensor_parallel_size": 2}}
MAX_NORM = 1.0


class Texts(torch.utils.data.Dataset):
    def __init__(self, count):
        self.rows = token_batches(count, size=1)

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, index):
        return {name: value[0] for name, value in self.rows[index].items()}


def train(plugins, *, batches=6, accumulation=1, options=None, slow=(), skip=0, save=None, user=False, trackers=None):
    """Trains a small model; returns the wall time of its steps, by a clock of this function's own, losses and norms.

    Args:
        slow: rank, step and seconds of a sleep.
    """
    from neuron_accel import NeuronAccelerator

    named = [{"run_report": {"show": "nothing", **(options or {})}}]
    accelerator = NeuronAccelerator(
        config={"plugins": [*plugins, *named], "gradient_accumulation_steps": accumulation}, **(trackers or {})
    )
    if trackers:
        accelerator.init_trackers("run")
    torch.manual_seed(0)
    model = llama()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, eps=1e-6)
    replicas = accelerator.data_parallel_size
    loader = torch.utils.data.DataLoader(Texts((batches + skip) * 2 * replicas), batch_size=2)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    loader = accelerator.skip_first_batches(loader, skip) if skip else loader
    losses, norms, sent = [], [], []
    accelerator.wait_for_everyone()
    with accelerator.run.backend.record() as traffic:
        began = time.perf_counter()
        ended, steps = began, 0
        for batch in loader:
            with accelerator.accumulate(model):
                loss = model(**batch).loss
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    norms.append(float(accelerator.clip_grad_norm_(model.parameters(), MAX_NORM)))
                optimizer.step()
                if accelerator.sync_gradients:
                    ended, steps = time.perf_counter(), steps + 1
                    sent.append(traffic.sent())
                optimizer.zero_grad()
            losses.append(float(loss))
            if slow and (accelerator.run.backend.rank, steps) == slow[:2]:
                time.sleep(slow[2])
            if save is not None and steps == 1:
                accelerator.save_state(save)
            if user:
                with accelerator.run.events.open("my own"):
                    time.sleep(0.001)
    accelerator.end_training()
    return {"wall": ended - began, "losses": losses, "norms": norms, "sent": sent}


def run(folder, plugins, ranks, **arguments):
    options = {"folder": str(folder), **arguments.pop("options", {})}
    results = run_ranks(train, ranks, plugins, options=options, **arguments)
    return results, read_run(folder)


COMPOSITIONS = {
    "dp2": ([], 2, 1),
    "zero1-accumulating": (["zero1"], 2, 2),
    "fsdp": (["fully_sharded"], 2, 1),
    "tp2-dp2": ([TP2], 4, 1),
    "pp2": ([PIPELINE], 2, 1),
}


@pytest.mark.parametrize("name", COMPOSITIONS)
def test_parts_add_up_to_the_wall_time_of_the_steps(name, tmp_path):
    plugins, ranks, accumulation = COMPOSITIONS[name]
    results, report = run(tmp_path, plugins, ranks, accumulation=accumulation, options={"trace_steps": [1, 2]})
    assert [each.rank for each in report.ranks] == list(range(ranks))
    assert not report.missing_ranks
    for each, result in zip(report.ranks, results, strict=True):
        steps = each.steps
        assert [step.step for step in steps] == list(range(6 // accumulation))
        for step in steps:
            assert set(step.parts) == set(PARTS)
            assert sum(step.parts.values()) == pytest.approx(step.seconds, abs=1e-9)
            assert min(step.parts.values()) >= 0
            assert step.micro_batches == accumulation
            assert step.parts["loader"] > 0
            assert step.parts["forward"] > 0
            assert step.parts["backward"] > 0
            assert step.parts["optimizer"] > 0
            assert 0 < step.waiting <= step.parts["communication"]
            assert step.samples == 2 * accumulation
            assert step.tokens == step.samples * token_batches(1, size=1)[0]["input_ids"].shape[1]
            assert not step.skipped
        for step, following in pairwise(steps):
            assert step.end == following.begin
        total = sum(step.seconds for step in steps)
        assert total < result["wall"]  # the clock of the loop is read before and after
        assert [step.grad_norm for step in steps] == pytest.approx(result["norms"])
        means = [sum(result["losses"][i : i + accumulation]) / accumulation for i in range(0, 6, accumulation)]
        assert [step.loss for step in steps] == pytest.approx(means)
        assert steps[-1].lr == (1e-2,)
        assert steps[-1].memory.parameters > 0
        assert steps[-1].memory.optimizer > 0
        assert steps[-1].memory.host > 1e6
        assert steps[-1].mfu is None
        assert steps[-1].flops > 0
        # bytes are those of an independent recording
        sent = [sum(row.bytes for row in step.collectives) for step in steps]
        assert sum(sent[1:]) == result["sent"][-1] - result["sent"][0]
        assert all(row.seconds is not None for step in steps for row in step.collectives)
        assert each.end.steps == len(steps)
        assert steps[0].begin > 0
        assert steps[-1].end < each.end.time
    # each end of an arrow is in its own collective, or in the wait for it
    arrows = bound(trace(report)["traceEvents"])
    assert arrows
    for name, *ends in arrows:
        assert all(end["name"] in (name, f"wait for {name}") for end in ends), (name, ends)
        assert ends[0]["pid"] != ends[1]["pid"]


def test_a_rank_that_sleeps_is_named_with_its_step(tmp_path, capfd):
    shown = {"show": "lines", "show_seconds": 0.0, "compare_every": 1}
    for attempt in range(3):  # other work on this machine may delay another rank as much, in the same step
        _, report = run(tmp_path / str(attempt), [], 3, batches=8, slow=(1, 4, 0.05), options=shown)
        captured = capfd.readouterr()
        found = [late for late in stragglers(report, seconds=0.03) if late.step == 4]
        if [(late.rank, late.part) for late in found] == [(1, "other")]:
            break
    else:
        pytest.fail(f"{found}")
    # the others were waiting for it
    ranks = report.by_step[4]
    assert all(ranks[rank].waiting > 0.02 for rank in (0, 2))
    # and it was named while the run went on
    assert re.search(r"step 4: rank 1 is \d+ ms late \(other\)", captured.out)


def test_ranges_of_traced_steps_nest(tmp_path):
    _, report = run(tmp_path, [PIPELINE], 2, options={"trace_steps": [2, 3]}, user=True)
    head = dict(facts([summarise(tmp_path)]))
    assert head["model"] == "LlamaForCausalLM"
    assert head["command"] == shlex.join(sys.argv)
    versions = {"neuron_accel", "torch", "python", "accelerate", "transformers"}
    assert {entry.split()[0] for entry in head["versions"].split(", ")} == versions
    assert f"torch {torch.__version__}, python {platform.python_version()}" in head["versions"]
    assert "pipeline_parallel: pipeline_parallel_size 2, num_microbatches 2" in head["options"]
    assert "trace_steps (2, 3)" in head["options"]
    names = ("samples of a step", "gradient accumulation", "mixed precision", "seed")
    assert [head[name] for name in names] == ["2", "1", "no", "0"]
    assert head["optimizer"].startswith("AdamW: betas (0.9, 0.999), ")
    assert "eps 1e-06, lr 0.01, weight_decay 0.01" in head["optimizer"]
    for each in report.ranks:
        names = {r.name for r in each.ranges}
        assert {r.step for r in each.ranges} == {2, 3}
        assert {"loader", "forward", "backward", "optimizer step", "my own"} <= names
        stage = each.header.coordinates["pp"]
        assert {f"{kind}, stage {stage}, micro-batch {m}" for kind in ("forward", "backward") for m in (0, 1)} <= names
        assert {r.category for r in each.ranges} == {
            "part",
            "step",
            "call",
            "collective",
            "wait",
            "pipeline",
            "hook",
            "user",
        }
        assert any(r.name == "data_parallel.backward_pass" for r in each.ranges)
        # by its ranks a trace finds a collective on the others
        assert [0, 1] in [r.arguments.get("ranks") for r in each.ranges if r.category == "collective"]
        open_ends: list[int] = []
        for begin, end in sorted(((r.begin, r.end) for r in each.ranges), key=lambda times: (times[0], -times[1])):
            while open_ends and open_ends[-1] <= begin:
                open_ends.pop()
            assert not open_ends or end <= open_ends[-1]
            open_ends.append(end)


def test_loaders_without_their_first_batches_and_checkpoints_count(tmp_path):
    _, report = run(tmp_path / "report", [], 2, skip=1, batches=4, save=str(tmp_path / "checkpoint"))
    steps = report.ranks[0].steps
    assert all(step.parts["loader"] > 0 for step in steps)
    assert steps[0].parts["checkpoint"] == 0 < steps[1].parts["checkpoint"]
    assert steps[1].training_seconds < steps[1].seconds


def test_an_earlier_report_is_kept(tmp_path):
    _, first = run(tmp_path, [], 2, batches=2)
    _, second = run(tmp_path, [], 2, batches=3)
    assert first.header.run != second.header.run
    assert len(second.ranks[0].steps) == 3
    (earlier,) = tmp_path.glob("earlier-*")
    assert read_run(earlier).header.run == first.header.run


def test_a_full_disk_ends_the_report_and_not_the_training(tmp_path, capfd):
    (tmp_path / "file").write_text("not a folder")
    results = run_ranks(train, 2, [], options={"folder": str(tmp_path / "file" / "report")}, batches=3)
    assert len(results[0]["losses"]) == 3
    captured = capfd.readouterr()
    assert (captured.out + captured.err).count("The report of this run ends here") == 2  # one on each rank


def write_to_a_full_device():
    """As on a full disk: /dev/full accepts to be opened."""
    import warnings

    from neuron_accel_report.plugin import ReportFile
    from neuron_accel_report.records import End, rank_file

    folder = Path("full")
    folder.mkdir()
    (folder / rank_file(0)).symlink_to("/dev/full")
    file = ReportFile(folder, 0)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(3):
            file.write([End(time=0, steps=1)])
        file.close()
    return [str(each.message) for each in caught]


def test_a_write_that_fails_warns_once(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (message,) = write_to_a_full_device()
    assert "No space left" in message


# ---- how a run ends --------------------------------------------------------------------------------------------------
KEPT: list = []


def train_and_leave(folder, *, keep=True, fails=False):
    """A loop without ``end_training``."""
    from neuron_accel import NeuronAccelerator

    accelerator = NeuronAccelerator(config={"plugins": [{"run_report": {"folder": folder, "show": "nothing"}}]})
    model = torch.nn.Linear(4, 4)
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    for _ in range(2):
        accelerator.backward(model(torch.ones(2, 4)).sum())
        optimizer.step()
        optimizer.zero_grad()
    accelerator.wait_for_everyone()
    if keep:
        KEPT.append((accelerator, model, optimizer))
    if fails:
        sys.last_value = ValueError()  # as the interpreter does after an exception that nothing has caught
    return read_run(folder).ranks[0].end


@pytest.mark.parametrize(("case", "ended"), [({}, True), ({"keep": False}, True), ({"fails": True}, False)])
def test_a_run_ends_when_the_interpreter_exits_without_an_exception(case, ended, tmp_path):
    assert run_ranks(train_and_leave, 2, str(tmp_path), full_exit=True, **case) == [None, None]
    for each in read_run(tmp_path).ranks:
        assert [step.step for step in each.steps] == [0, 1]
        assert (each.end is not None) == ended
    assert summarise(tmp_path).ended == ended


def leave_and_collect(folder):
    """What of a run is left after its last user."""
    import gc
    import weakref

    train_and_leave(folder)
    gone = [weakref.ref(each) for each in (KEPT[0][0].run, KEPT[0][1])]
    KEPT.clear()
    gc.collect()
    return [each() is None for each in gone], read_run(folder).ranks[0].end is not None


def test_a_report_keeps_no_model_and_ends_with_its_run(tmp_path):
    assert run_ranks(leave_and_collect, 1, str(tmp_path)) == [([True, True], True)]


def test_a_script_that_fails_has_not_ended_its_run(tmp_path):
    script = tmp_path / "train.py"
    body = "from test_report_runs import train_and_leave\ntrain_and_leave('report')\nraise ValueError('on purpose')\n"
    script.write_text(f"import sys\nsys.path.insert(0, {str(Path(__file__).parent)!r})\n{body}")
    done = subprocess.run([sys.executable, str(script)], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.stderr.endswith("ValueError: on purpose\n")
    (each,) = read_run(tmp_path / "report").ranks
    assert len(each.steps) == 2
    assert each.end is None


# ---- where a script comes from ---------------------------------------------------------------------------------------
def test_the_commit_is_that_of_the_folder_if_git_answers(tmp_path, monkeypatch):
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path))
    assert commit_of(tmp_path) == commit_of(tmp_path / "nowhere") == ""
    if shutil.which("git") is not None:
        repository = tmp_path / "repository"
        (repository / "scripts").mkdir(parents=True)
        git = ["git", "-C", str(repository), "-c", "user.name=a", "-c", "user.email=a@b"]
        for words in (["init", "-q"], ["commit", "-q", "--allow-empty", "-m", "first"]):
            subprocess.run([*git, *words], check=True, capture_output=True)
        assert re.fullmatch("[0-9a-f]{40,64}", commit_of(repository / "scripts", seconds=60))
    monkeypatch.setenv("PATH", str(tmp_path))
    assert commit_of(tmp_path) == ""
    (tmp_path / "git").write_text("#!/bin/sh\nexec /bin/sleep 1000\n")
    (tmp_path / "git").chmod(0o755)
    assert commit_of(tmp_path, seconds=0.05) == ""


def resumed(folder, report):
    """Saves after two steps, and goes on from there in a second run."""
    from neuron_accel import NeuronAccelerator

    for part in range(2):
        accelerator = NeuronAccelerator(
            config={"plugins": [{"run_report": {"folder": f"{report}/{part}", "show": "nothing"}}]}
        )
        torch.manual_seed(0)
        model = torch.nn.Linear(4, 4)
        model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
        if part:
            accelerator.load_state(folder)
        for _ in range(2):
            accelerator.backward(model(torch.ones(2, 4)).sum())
            optimizer.step()
            optimizer.zero_grad()
        if not part:
            accelerator.save_state(folder)
        accelerator.free_memory()


def test_a_resumed_run_goes_on_counting_steps(tmp_path):
    run_ranks(resumed, 2, str(tmp_path / "checkpoint"), str(tmp_path / "report"))
    assert [step.step for step in read_run(tmp_path / "report" / "0").ranks[0].steps] == [0, 1]
    assert [step.step for step in read_run(tmp_path / "report" / "1").ranks[0].steps] == [2, 3]


# ---- trackers --------------------------------------------------------------------------------------------------------
def with_own_tracker(folder):
    from accelerate.tracking import GeneralTracker, on_main_process

    class Notes(GeneralTracker):
        name, requires_logging_directory = "notes", False
        logged: list = []  # noqa: RUF012

        @property
        def tracker(self):
            return self.logged

        @on_main_process
        def store_init_configuration(self, values):
            pass

        @on_main_process
        def log(self, values, step=None, **_):
            self.logged.append((step, values))

    notes = Notes()
    train([], batches=3, options={"folder": f"{folder}/report"}, trackers={"log_with": [notes]})
    return notes.logged


def test_figures_reach_a_tracker_of_the_user(tmp_path):
    first, second = run_ranks(with_own_tracker, 2, str(tmp_path))
    assert not second  # one rank logs
    assert [step for step, _ in first] == [0, 1, 2]
    values = first[-1][1]
    expected = ("seconds", "tokens_per_second", "loss", "grad_norm", "lr", "parts/backward", "memory/host", "sent/dp")
    assert {f"run_report/{name}" for name in expected} <= set(values)
    assert all(isinstance(value, float) for value in values.values())


def test_figures_reach_tensorboard(tmp_path):
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    trackers = {"log_with": "tensorboard", "project_dir": str(tmp_path / "logs")}
    run_ranks(train, 1, [], batches=3, options={"folder": str(tmp_path / "report")}, trackers=trackers)
    (events,) = (tmp_path / "logs").rglob("events.out.tfevents.*")
    found = EventAccumulator(str(events.parent))
    found.Reload()
    assert [event.step for event in found.Scalars("run_report/loss")] == [0, 1, 2]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["wandb", "mlflow", "aim"])
def test_figures_reach_other_trackers(name, tmp_path, monkeypatch):
    pytest.importorskip(name, reason=f"{name} is not installed")
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_DIR", str(tmp_path))
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"file:{tmp_path}/mlruns")
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    monkeypatch.chdir(tmp_path)
    trackers = {"log_with": name, "project_dir": str(tmp_path / "logs")}
    run_ranks(train, 1, [], batches=3, options={"folder": str(tmp_path / "report")}, trackers=trackers)
    written = {"wandb": "run-*.wandb", "mlflow": "mlruns/**/run_report/loss", "aim": ".aim"}[name]
    assert any(tmp_path.rglob(written))


# ---- one time for several machines -----------------------------------------------------------------------------------
AHEAD = 37.25
"""Seconds by which the clock of the second rank's machine is ahead."""


def with_a_clock_of_its_own(folder):
    """Returns for each range of this rank's own the true time at which it was opened."""
    from unittest import mock

    from neuron_accel import NeuronAccelerator

    rank, true, true_ns = int(os.environ["RANK"]), time.time, time.time_ns
    with (
        mock.patch.object(platform, "node", return_value=f"machine{rank}"),
        mock.patch.object(time, "time", side_effect=lambda: true() + AHEAD * rank),
        mock.patch.object(time, "time_ns", side_effect=lambda: true_ns() + round(AHEAD * 1e9) * rank),
    ):
        report = {"folder": folder, "show": "nothing", "trace_steps": list(range(1, 9))}
        accelerator = NeuronAccelerator(config={"plugins": [{"run_report": report}]})
        model = torch.nn.Linear(4, 4)
        model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
        opened = []
        for _ in range(9):
            accelerator.backward(model(torch.ones(2, 4)).sum())
            with accelerator.run.events.open("now"):
                opened.append(true())
            optimizer.step()
            optimizer.zero_grad()
        accelerator.end_training()
    return opened


def test_ranks_of_machines_with_different_clocks_are_in_one_time(tmp_path):
    results = run_ranks(with_a_clock_of_its_own, 2, str(tmp_path))
    report = read_run(tmp_path)
    first, second = (each.header for each in report.ranks)
    assert (first.clock_offset, first.clock_error) == (0.0, 0.0)
    assert 0 < second.clock_error < 0.5
    assert abs(second.clock_offset + AHEAD) <= second.clock_error
    for each, opened in zip(report.ranks, results, strict=True):
        spans = [span for span in each.ranges if span.name == "now"]
        differences = sorted(first.started + span.begin / 1e9 - at for span, at in zip(spans, opened[1:], strict=True))
        middle = differences[len(differences) // 2]  # a rank may be interrupted between the two readings
        assert abs(middle) <= each.header.clock_error + 0.002
    assert first.started == second.started
    assert trace(report)["otherData"]["clock_error"] == second.clock_error


# ---- what it costs ---------------------------------------------------------------------------------------------------
def train_longer_steps(folder):
    from transformers import LlamaConfig, LlamaForCausalLM

    from neuron_accel import NeuronAccelerator

    accelerator = NeuronAccelerator(
        config={"plugins": ["fully_sharded", {"run_report": {"folder": folder, "show": "nothing"}}]}
    )
    config = LlamaConfig(
        hidden_size=256,
        intermediate_size=512,
        num_hidden_layers=8,
        num_attention_heads=4,
        num_key_value_heads=4,
        vocab_size=1024,
    )
    model = LlamaForCausalLM(config)
    model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters()))
    tokens = torch.randint(0, 1024, (4, 256))
    for _ in range(8):
        accelerator.backward(model(input_ids=tokens, labels=tokens).loss)
        accelerator.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    accelerator.end_training()


def test_it_takes_less_than_one_percent_of_a_step(tmp_path):
    run_ranks(train_longer_steps, 2, str(tmp_path))
    for each in read_run(tmp_path).ranks:  # other work on this machine may interrupt it
        shares = [step.own_seconds / step.seconds for step in each.steps[1:]]
        assert 0 < min(shares) < 0.01, shares


def losses_of(plugins, folder):
    """Losses of a small model with a report, and without."""
    from neuron_accel import NeuronAccelerator

    found = []
    for report in ([], [{"run_report": {"folder": folder, "show": "nothing", "trace_steps": [1]}}]):
        accelerator = NeuronAccelerator(config={"plugins": [*plugins, *report], "gradient_accumulation_steps": 2})
        torch.manual_seed(0)
        model = llama()
        model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=1e-2))
        losses = []
        for batch in token_batches(8, size=2):
            with accelerator.accumulate(model):
                loss = model(**batch).loss
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), MAX_NORM)
                optimizer.step()
                optimizer.zero_grad()
            losses.append(float(loss))
        found.append(losses)
        accelerator.free_memory()
    return found


@pytest.mark.parametrize("name", ["zero1-accumulating", "pp2"])
def test_training_is_bit_identical(name, tmp_path):
    plugins, ranks, _ = COMPOSITIONS[name]
    for plain, reported in run_ranks(losses_of, ranks, plugins, str(tmp_path)):
        assert plain == reported
    assert len(read_run(tmp_path).ranks[0].steps) == 4


# ---- compiled models -------------------------------------------------------------------------------------------------
def compiled(folder):
    import warnings

    from neuron_accel import NeuronAccelerator

    accelerator = NeuronAccelerator(config={"plugins": [{"run_report": {"folder": folder, "show": "nothing"}}]})
    model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.ReLU(), torch.nn.Linear(8, 1))
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        faster = torch.compile(model, backend="eager")
        for _ in range(3):
            accelerator.backward(faster(torch.ones(4, 8)).sum())
            optimizer.step()
            optimizer.zero_grad()
    accelerator.end_training()


def test_a_model_that_is_compiled_later_is_measured(tmp_path):
    run_ranks(compiled, 1, str(tmp_path))
    for step in read_run(tmp_path).ranks[0].steps:
        assert step.parts["forward"] > 0
        assert step.samples == 4
