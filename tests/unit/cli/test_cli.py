"""The command line: its imports, its help, and its error messages."""

from __future__ import annotations

import subprocess
import sys

import pytest

from neuron_accel.cli.main import COMMANDS, main
from neuron_accel.cli.terminal import format_pairs, format_table


@pytest.mark.parametrize("arguments", [["--help"], *[[name, "--help"] for name in COMMANDS]])
def test_help_imports_neither_torch_nor_accelerate(arguments):
    probe = (
        "import sys\n"
        "from neuron_accel.cli.main import main\n"
        "try:\n    main(sys.argv[1:])\nexcept SystemExit as end:\n    assert end.code == 0, end.code\n"
        "heavy = {'torch', 'accelerate', 'transformers', 'torch_xla'} & set(sys.modules)\n"
        "assert not heavy, heavy\n"
    )
    done = subprocess.run([sys.executable, "-c", probe, *arguments], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert "examples:" in done.stdout


@pytest.mark.parametrize("name", COMMANDS)
def test_every_example_in_the_help_parses(name):
    from neuron_accel.cli.main import build_parser

    commands = [line.strip() for line in COMMANDS[name].EXAMPLES.splitlines() if "neuron-accel " in line]
    assert commands
    for command in commands:
        words = command.partition("neuron-accel ")[2].partition("   ")[0].split()
        assert build_parser().parse_args(words).command == name


def test_an_error_of_the_project_is_printed_without_a_traceback(capsys):
    assert main(["launch", "--nproc-per-node", "0", "train.py"]) == 2
    error = capsys.readouterr().err
    assert error.startswith("neuron-accel: error: --nproc-per-node is 0; expected at least 1.")
    assert "where: --nproc-per-node" in error
    assert "Traceback" not in error


def test_output_into_a_closed_pipe_ends_quietly():
    done = subprocess.run(
        f"{sys.executable} -m neuron_accel.cli.main plugins --json | true",
        shell=True,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert "Traceback" not in done.stderr
    assert "Exception ignored" not in done.stderr


def test_table_columns_are_as_wide_as_their_widest_cell():
    table = format_table(("name", "n"), [("a", "1"), ("longer", "22")])
    assert table.splitlines() == ["name    n", "----    -", "a       1", "longer  22"]


def test_a_table_is_wrapped_to_the_width_that_is_asked_for():
    name = "model.layers.10.self_attn.q_proj.weight"
    rows = [(name, "float32", "(64, 64)", "Shard(0) over tp 2 in 3 blocks, padded", "2"), ("b", "bool", "()", "-", "1")]
    headers = ("name", "dtype", "shape", "layout", "shards")
    full, wrapped = format_table(headers, rows).splitlines(), format_table(headers, rows, 80).splitlines()
    assert max(map(len, full)) > 80 >= max(map(len, wrapped))
    assert len(full) == 4
    assert "".join(line[:30].split("  ")[0] for line in wrapped[2:-1]) == name
    assert wrapped[-1].split() == ["b", "bool", "()", "-", "1"]
    assert format_table(headers, rows, 200).splitlines() == full


def test_pairs_align_their_values():
    assert format_pairs([("a", "1"), ("long", "")]) == "  a     1\n  long"
