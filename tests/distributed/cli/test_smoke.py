"""``neuron-accel test`` passes on this installation, and fails at the rung that something is wrong with."""

from __future__ import annotations

import contextlib
import functools
import json
import subprocess
import sys
import time
from pathlib import Path
from unittest import mock

import pytest
import torch

from neuron_accel.backends.group import Then
from neuron_accel.backends.torch_distributed import TorchBackend
from neuron_accel.cli import smoke, smoke_test
from neuron_accel.cli.main import main
from neuron_accel.testing import RankExit, RanksError, run_ranks
from tests.unit.cli.screen import terminal


# ---- a fault for each rung -------------------------------------------------------------------------------------------
def changed(name, change):
    """The method of the backend with this name returns something else."""
    real = getattr(TorchBackend, name)
    return mock.patch.object(TorchBackend, name, lambda self, *args, **options: change(real(self, *args, **options)))


def a_percent_too_much(pending):
    return Then(pending, lambda found: found.mul_(1.01) if found.is_floating_point() else found)


@contextlib.contextmanager
def collectives_that_are_a_little_wrong():
    with contextlib.ExitStack() as stack:
        for name in ("start_all_reduce", "start_reduce_scatter", "start_reduce_scatter_into", "start_receive"):
            stack.enter_context(changed(name, a_percent_too_much))
        yield


def rolled(found):
    return found.roll(1, dims=0)


def renamed(found):
    return "another" if isinstance(found, str) and found.startswith("rank ") else found


WRONG_SUMS = collectives_that_are_a_little_wrong
FAULTS = {
    "device": functools.partial(changed, "to_host", lambda found: found + 1),
    "operation": functools.partial(changed, "to_host", lambda found: found * 1.05),
    "all-reduce": functools.partial(changed, "all_reduce", rolled),
    "all-gather": functools.partial(changed, "all_gather", rolled),
    "reduce-scatter": functools.partial(changed, "reduce_scatter", rolled),
    "all-to-all": functools.partial(changed, "all_to_all", rolled),
    "permute": functools.partial(changed, "permute", rolled),
    "broadcast": functools.partial(changed, "broadcast", rolled),
    "objects": functools.partial(changed, "broadcast_object", renamed),
    "graph": lambda: mock.patch.object(TorchBackend, "graph_of", lambda self, tensors: f"graph {self.rank}"),
    "data-parallel": WRONG_SUMS,
    "zero1": WRONG_SUMS,
    "tp": WRONG_SUMS,
    "tp-sp": WRONG_SUMS,
    "pp": WRONG_SUMS,
    "fully-sharded": WRONG_SUMS,
    "checkpoint": lambda: mock.patch("neuron_accel.NeuronAccelerator.load_state"),
    "trainer": WRONG_SUMS,
}


def climbed(names):
    return [(result["name"], result["status"]) for result in smoke.climb(names)]


def with_every_fault():
    """What each rung says of its fault, with a rung after it that is not tried."""
    found = {}
    for name, fault in FAULTS.items():
        with fault():
            found[name] = climbed([name, "objects"])
    return found


@pytest.mark.timeout(240)
def test_each_rung_finds_its_fault_and_is_the_last_one():
    found = run_ranks(with_every_fault, 2, timeout=200)
    assert found == [{name: [(name, "failed")] for name in smoke_test.RUNGS}] * 2
    assert list(smoke.CLIMBS) == list(smoke_test.RUNGS)


def fails_on_one_rank():
    def difference(ladder):
        assert ladder.backend.rank != 1, "not like one process"

    with mock.patch.dict(smoke.CLIMBS, graph=difference):
        return smoke.climb(["graph"])[0]["problems"]


def test_what_is_wrong_on_one_rank_fails_on_all():
    assert run_ranks(fails_on_one_rank, 2) == [["rank 1: not like one process"]] * 2


@pytest.mark.parametrize("ranks", [1, 3])
def test_the_ladder_is_climbed_by_any_number_of_ranks(ranks):
    names = [name for name in smoke_test.RUNGS if name != "trainer"]
    found = run_ranks(climbed, ranks, names, timeout=100)[0]
    assert [status for _, status in found] == [
        "skipped" if name in ("tp", "tp-sp", "pp") else "passed" for name in names
    ]


# ---- limits ----------------------------------------------------------------------------------------------------------
def too_long():
    with smoke.Limit(0.2):
        time.sleep(1000)


def test_a_rank_that_hangs_ends_and_shows_where():
    with pytest.raises(RanksError) as failed:
        run_ranks(too_long, 1)
    assert isinstance(failed.value.errors[0], RankExit)
    assert "in too_long" in str(failed.value)


def test_the_time_of_a_compiler_is_not_counted():
    limit = smoke.Limit(10)
    assert limit.counts(100, compiles=True)
    assert not limit.counts(4, compiles=False)
    assert (limit.compiling, limit._left) == (100, 6)


def sees_a_compiler(folder):
    """A compiler below another rank of the launcher, on its way and at its end."""
    program = Path(folder, "neuronx-cc")
    program.write_text("import sys; sys.stdin.read()")
    found = [smoke.compiler_runs()]
    process = subprocess.Popen([sys.executable, str(program)], stdin=subprocess.PIPE)
    found.append(smoke.compiler_runs())
    process.communicate()
    return [*found, smoke.compiler_runs()]


def test_a_compiler_is_seen(tmp_path):
    assert run_ranks(sees_a_compiler, 1, str(tmp_path)) == [[False, True, False]]


# ---- the command -----------------------------------------------------------------------------------------------------
def test_results_are_the_same_only_bit_by_bit():
    x = torch.arange(3.0)
    assert smoke.same([x, "a"], [x.clone(), "a"])
    assert not smoke.same([x], [x + 1e-6])
    assert not smoke.same([x], [x, x])
    assert not smoke.same("a", "b")


@pytest.mark.parametrize(("last", "code"), [("passed", 0), ("failed", 1), ("running", 3)])
def test_the_exit_code_follows_the_result(monkeypatch, capsys, tmp_path, last, code):
    """And the file is there to be sent, also if the ranks have ended."""

    def launch(plan):
        file, *names = plan.request.arguments
        assert names[0] == "zero1"
        rungs = [{"name": "zero1", "status": "passed"}, {"name": "tp", "status": last}]
        Path(file).write_text(json.dumps(rungs))
        return code if last == "running" else 0

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(smoke_test, "launch", launch)
    assert main(["test", "--cpu", "--from", "zero1"]) == code
    said = capsys.readouterr().out
    assert ("neuron-accel test --from tp" in said) == (last != "passed")
    written = json.loads((tmp_path / smoke_test.RESULT_FILE).read_text())
    assert written["rungs"][1]["status"] == ("passed" if last == "passed" else "failed")
    assert {"versions", "environment", "device", "ranks"} <= written.keys()


@pytest.mark.parametrize("command", ["test --cpu", "calibrate --cpu --quick --output machine.yaml"])
def test_what_commands_with_ranks_show_fits_a_terminal_of_80_columns(command, tmp_path):
    if command.startswith("calibrate"):
        pytest.importorskip("neuron_accel_plan", reason="calibrate is a command of neuron-accel-plan")
    with terminal(80) as written:
        started = [sys.executable, "-m", "neuron_accel.cli.main", *command.split()]
        code = subprocess.run(started, cwd=tmp_path, check=False).returncode
    text = b"".join(written).decode()
    assert code == 0, text
    assert "Traceback" not in text
    lines = [state.replace("\x1b[K", "") for line in text.split("\r\n") for state in line.split("\r")]
    lines = [line for line in lines if not line.startswith("[Gloo]")]  # torch 2.9 prints them
    assert len(lines) > 5
    assert [line for line in lines if len(line) > 80 and len(line.split()) > 1] == []
    if command.startswith("test"):
        rungs = json.loads((tmp_path / smoke_test.RESULT_FILE).read_text())["rungs"]
        assert [(one["name"], one["status"]) for one in rungs] == [(name, "passed") for name in smoke_test.RUNGS]
