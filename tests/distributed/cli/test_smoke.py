"""``neuron-accel test`` passes on this installation, and fails for a collective that returns a wrong result."""

from __future__ import annotations

import json

import pytest
import torch

from neuron_accel.backends.base import Done
from neuron_accel.backends.torch_distributed import TorchBackend
from neuron_accel.cli import smoke, smoke_test
from neuron_accel.cli.main import main
from neuron_accel.testing import run_ranks


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
