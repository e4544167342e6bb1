"""``precompile --check``: parsing of the training command, and errors."""

from __future__ import annotations

import pytest

from neuron_accel.cli import precompile
from neuron_accel.cli.main import main
from neuron_accel.errors import ConfigurationError
from tests.guests import is_installed

needs_the_package = pytest.mark.skipif(
    not is_installed("neuron-accel-emulation"), reason="neuron-accel-emulation is not installed"
)


def parse_command(words):
    from neuron_accel_emulation import precompile_check

    return precompile_check.parse_command(words, precompile._launch_options)


@needs_the_package
@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ("neuron-accel launch --nproc-per-node 4 train.py --lr 1", ("train.py", ("--lr", "1"), False, 4)),
        ("/venv/bin/neuron-accel launch --nnodes 2 --nproc-per-node 8 -m pkg.train a", ("pkg.train", ("a",), True, 16)),
        ("torchrun --nproc_per_node=2 --nnodes 2 --rdzv-backend c10d train.py x", ("train.py", ("x",), False, 4)),
        ("torchrun --standalone --nproc-per-node 2 -m pkg", ("pkg", (), True, 2)),
        ("accelerate launch --num_machines 2 --num_processes 8 train.py", ("train.py", (), False, 8)),
        ("python train.py --nproc-per-node 3", ("train.py", ("--nproc-per-node", "3"), False, 1)),
    ],
)
def test_commands_of_launchers_are_understood(words, expected):
    found = parse_command(words.split())
    assert (found.target, found.arguments, found.module, found.ranks) == expected


@needs_the_package
@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("./run.sh", "not a supported training command"),
        ("torchrun --nproc-per-node auto train.py", "number of ranks is not known: auto on each of 1 machines"),
        ("neuron-accel launch --nproc-per-node auto train.py", "number of ranks is not known"),
        ("torchrun --nproc-per-node 2", "contains no script"),
    ],
)
def test_others_are_refused_with_the_reason(words, message):
    with pytest.raises(ConfigurationError, match=message):
        parse_command(words.split())


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (
            ["--instance", "trn1.32xlarge", "--dry-run", "--", "torchrun", "x.py"],
            "--instance has no effect without --check",
        ),
        (["--check", "--", "torchrun", "nothing.py"], "There is no script 'nothing.py'"),
        (["--check", "--steps", "-1", "--", "torchrun", "x.py"], "-1 steps"),
        (
            ["--check", "--instance", "trn1.32xlarge", "--", "torchrun", "--nproc-per-node", "5", "x.py"],
            "5 ranks cannot run",
        ),
    ],
)
def test_wrong_usage_is_answered_before_anything_runs(words, message, capsys):
    if "--check" in words and not is_installed("neuron-accel-emulation"):
        message = "Checking graphs is in a package of its own"
    assert main(["precompile", *words]) == 2
    assert message in capsys.readouterr().err


def test_without_the_package_it_says_which(monkeypatch, capsys):
    monkeypatch.setattr(precompile, "entry_points", lambda group: ())
    monkeypatch.setattr(precompile, "not_installed", lambda group: ["neuron-accel-emulation"])
    assert main(["precompile", "--check", "--", "torchrun", "x.py"]) == 2
    assert "install the package neuron-accel-emulation of this project" in capsys.readouterr().err
