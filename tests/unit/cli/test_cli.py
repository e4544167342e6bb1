"""The command line: its imports, its help, and its error messages."""

from __future__ import annotations

import importlib
import os
import shlex
import subprocess
import sys

import pytest

from neuron_accel.cli import main as main_module
from neuron_accel.cli.main import COMMANDS, main
from neuron_accel.terminal import format_pairs, format_table


@pytest.mark.parametrize("arguments", [["--help"], *[[name, "--help"] for name in COMMANDS]])
def test_help_imports_neither_torch_nor_accelerate(arguments):
    probe = (
        "import sys\n"
        "from neuron_accel.cli.main import main\n"
        "try:\n    main(sys.argv[1:])\nexcept SystemExit as end:\n    assert end.code == 0, end.code\n"
        "heavy = {'torch', 'accelerate', 'transformers', 'torch_xla'} & set(sys.modules)\n"
        "assert not heavy, heavy\n"
    )
    done = subprocess.run([sys.executable, "-c", probe, *arguments], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "examples:" in done.stdout


@pytest.mark.parametrize("name", COMMANDS)
def test_every_example_in_the_help_parses(name):
    from neuron_accel.cli.main import build_parser

    examples = importlib.import_module(COMMANDS[name][0]).EXAMPLES
    commands = [line.strip() for line in examples.splitlines() if "neuron-accel " in line]
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
        f"{shlex.quote(sys.executable)} -m neuron_accel.cli.main plugins --json | true",
        shell=True,
        capture_output=True,
        text=True,
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


# ---- commands of other distributions ---------------------------------------------------------------------------------
GREET = """\
DESCRIPTION = "Greet."
EXAMPLES = "examples:\\n  neuron-accel greet you"


def add_arguments(parser):
    parser.add_argument("who", help="whom")


def run(args):
    print(f"hello {args.who}")
    return 3
"""


@pytest.fixture
def greeting(tmp_path):
    """Runs ``neuron-accel`` with a distribution that has two commands, one of which cannot be imported."""
    (tmp_path / "greetings.py").write_text(GREET)
    info = tmp_path / "greetings-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: greetings\nVersion: 1.0\nSummary: greet somebody\n")
    points = "[neuron_accel.commands]\ngreet = greetings\nbroken = greetings.nothing\nlaunch = greetings\n"
    (info / "entry_points.txt").write_text(points)

    def run(*words):
        command = [sys.executable, "-m", "neuron_accel.cli.main", *words]
        environ = {**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), os.getcwd()])}
        return subprocess.run(command, capture_output=True, text=True, env=environ)

    return run


def test_a_command_of_another_distribution(greeting):
    assert "greet somebody (greetings)" in greeting("--help").stdout
    done = greeting("greet", "you")
    assert (done.returncode, done.stdout) == (3, "hello you\n")
    assert greeting("greet", "--help").stdout.startswith("usage: neuron-accel greet [-h] who")
    assert "start a training script" in greeting("launch", "--help").stdout.replace("Start", "start")  # not replaced


def test_a_command_that_cannot_be_imported_breaks_no_other(greeting):
    done = greeting("broken")
    assert done.returncode == 2
    assert "The command 'broken' cannot be imported." in done.stderr
    assert "Traceback" not in done.stderr


def test_commands_of_packages_that_are_missing_are_named(monkeypatch, capsys):
    packages = {"neuron-accel-x": {main_module.GROUP: ("surprise",)}}
    monkeypatch.setattr(main_module, "PACKAGES", packages)
    monkeypatch.setattr(main_module, "offered_by", lambda group, name: "neuron-accel-x" if name == "surprise" else None)
    assert "in packages that are not installed: surprise (neuron-accel-x)" in main_module.build_parser().format_help()
    with pytest.raises(SystemExit):
        main(["surprise"])
    error = capsys.readouterr().err
    assert "pip install ./plugins/neuron-accel-x" in " ".join(error.split())
