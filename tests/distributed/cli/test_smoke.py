"""``neuron-accel test`` passes on this installation, and fails for a collective that returns a wrong result."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
import torch

from neuron_accel.backends.group import Done
from neuron_accel.backends.torch_distributed import TorchBackend
from neuron_accel.cli import smoke, smoke_test
from neuron_accel.cli.main import main
from neuron_accel.testing import run_ranks
from tests.unit.cli.screen import terminal


class Swapped(TorchBackend):
    """A reduce-scatter with a fault: elements of the result are shifted by one."""

    def start_reduce_scatter(self, tensor, group, dim=0):
        return Done(super().start_reduce_scatter(tensor, group, dim).wait().roll(1, dims=dim))


def verdicts(kind):
    backend = kind.connect()
    group = backend.new_group([range(backend.world_size)], "world")
    checks = smoke.Checks(backend, group)
    for name, comparison in smoke.COLLECTIVES.items():
        checks.check(name, lambda c=comparison: smoke._verdict_of_collective(c, backend, group))
    return checks.passed, checks.failures


@pytest.mark.parametrize("ranks", [1, 3])
def test_collectives_that_work_pass(ranks):
    assert run_ranks(verdicts, ranks, TorchBackend) == [(len(smoke.COLLECTIVES), [])] * ranks


def test_a_collective_that_is_wrong_is_found_on_every_rank():
    assert run_ranks(verdicts, 2, Swapped) == [(len(smoke.COLLECTIVES) - 1, ["reduce-scatter"])] * 2


def broken_training():
    from neuron_accel import NeuronAccelerator

    run = NeuronAccelerator().run
    checks = smoke.Checks(run.backend, run.world)

    def training():
        if run.backend.rank == 1:
            raise AssertionError("not like one process")

    checks.check("training", lambda: smoke._verdict_of_training(training))
    return checks.passed, checks.failures


def test_a_training_that_differs_on_one_rank_fails_on_all():
    assert run_ranks(broken_training, 2) == [(0, ["training"])] * 2


def test_a_llama_is_trained_where_the_ranks_can_be_paired():
    assert len(smoke.trainings(2)) == len(smoke.trainings(4)) == len(smoke.trainings(3)) + 1


def test_results_are_the_same_only_bit_by_bit():
    x = torch.arange(3.0)
    assert smoke.same([x, "a"], [x.clone(), "a"])
    assert not smoke.same([x], [x + 1e-6])
    assert not smoke.same([x], [x, x])
    assert not smoke.same("a", "b")


@pytest.mark.parametrize(("failed", "code"), [([], 0), (["training"], 1)])
def test_the_exit_code_follows_the_result(monkeypatch, capsys, failed, code):
    def launch(plan):
        with open(plan.request.arguments[0], "w") as file:
            json.dump({"passed": 3, "failed": failed}, file)
        return 0

    monkeypatch.setattr(smoke_test, "launch", launch)
    assert main(["test", "--cpu"]) == code
    assert capsys.readouterr().out.startswith(f"3 passed, {len(failed)} failed on 2 ranks")


def test_the_whole_command_on_two_ranks(start):
    code, out, err = start("--nproc-per-node", "2", command="test").finish()
    assert code == 0, out + err
    lines = out.splitlines()
    assert sum(line.startswith("ok ") for line in lines) == len(smoke.COLLECTIVES) + len(smoke.trainings(2))
    assert "0 failed on 2 ranks" in lines[-1]


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
