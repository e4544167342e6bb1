"""Help fits the terminal, and errors of usage name the option of the command line."""

from __future__ import annotations

import argparse
import importlib
import re
from importlib import metadata

import pytest

from neuron_accel.cli.main import COMMANDS, EPILOG, build_parser, main
from neuron_accel.cli.parser import HelpFormatter
from neuron_accel.launch.host import count_cores
from tests.guests import is_installed


def ends(arguments) -> int:
    with pytest.raises(SystemExit) as end:
        main(arguments)
    return end.value.code


def test_no_command_is_answered_with_the_help(capsys):
    assert main([]) == 2
    error = capsys.readouterr().err
    assert all(f"\n    {name} " in error for name in COMMANDS)
    assert "examples:" in error


def test_the_version(capsys):
    assert ends(["--version"]) == 0
    assert capsys.readouterr().out == f"neuron-accel {metadata.version('neuron-accel')}\n"


# ---- help ------------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("columns", [60, 80, 120])
@pytest.mark.parametrize("arguments", [["--help"], *[[name, "--help"] for name in COMMANDS]])
def test_help_fits_the_terminal_and_breaks_between_words(arguments, columns, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", str(columns))
    assert ends(arguments) == 0
    shown = capsys.readouterr().out
    assert [line for line in shown.splitlines() if len(line) > columns] == []
    source = importlib.import_module(COMMANDS[arguments[0]][0]) if arguments[0] in COMMANDS else None
    words = (source.DESCRIPTION + source.EXAMPLES).split() if source else EPILOG.split()
    assert set(words) <= set(shown.split())


@pytest.mark.parametrize("name", COMMANDS)
def test_every_option_is_listed_once_and_explained(name, capsys):
    (commands,) = [a for a in build_parser()._actions if isinstance(a.choices, dict)]
    commands.choices[name].load()
    for action in commands.choices[name]._actions:
        assert action.help, action
        assert len(set(action.option_strings)) == len(action.option_strings), action
    assert ends([name, "--help"]) == 0
    for line in capsys.readouterr().out.splitlines():
        options = re.findall(r"--[a-z][a-z-]+", line.strip().partition("   ")[0]) if line.startswith("  -") else []
        assert len(set(options)) == len(options), line


def test_examples_that_are_too_long_go_on_as_in_a_shell():
    text = "examples:\n  neuron-accel launch " + "--option value " * 8 + "  and why\n  neuron-accel env    fits"
    lines = HelpFormatter("neuron-accel", width=60)._fill_text(text, 60, "").splitlines()
    assert max(map(len, lines)) <= 60
    command = " ".join(line.rstrip("\\").strip() for line in lines[1 : lines.index("      and why")])
    assert command == "neuron-accel launch " + "--option value " * 7 + "--option value"
    assert lines[-2:] == ["  neuron-accel env", "      fits"]  # as the others of the list


# ---- wrong usage -----------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("command", "message"),
    [
        ("launch --nproc-per-nod 2 t.py", "unknown option --nproc-per-nod; did you mean --nproc-per-node?"),
        ("launch --nproc_per_nod=2 t.py", "unknown option --nproc_per_nod; did you mean --nproc-per-node?"),
        ("launch -n 2 t.py", "unknown option -n; did you mean --nproc-per-node?"),
        ("launch --dry-rum", "unknown option --dry-rum; did you mean --dry-run?"),
        ("launch --dry-rnu", "unknown option --dry-rnu; did you mean --dry-run?"),
        ("launch", "the following arguments are required: script"),
        ("launch --nproc-per-node x t.py", "'x' is neither a number nor 'auto'"),
        ("precompile --max-step 3 -- train", "did you mean --max-steps?"),
        ("env --xyz", "unknown option --xyz\n"),
        ("env more", "unexpected argument 'more'"),
        ("cache lst", "invalid choice: 'lst' (choose from"),
        ("cache lst", "did you mean list?"),
    ],
)
def test_wrong_usage_is_answered_by_the_command(command, message, capsys):
    assert ends(command.split()) == 2
    error = capsys.readouterr().err
    assert error.startswith(f"usage: neuron-accel {command.split()[0]} ")
    assert message in error


@pytest.mark.parametrize("option", ["pipeline_parallel_size", "num_microbatches", "cache_dir"])
def test_an_option_has_one_name_in_every_command(option):
    (commands,) = [a for a in build_parser()._actions if isinstance(a.choices, dict)]
    for parser in commands.choices.values():
        parser.load()
    actions = [a for parser in commands.choices.values() for a in parser._actions if a.dest == option]
    shown = [a for a in actions if a.help != argparse.SUPPRESS]
    assert len(shown) > 1 or not is_installed("neuron-accel-plan")  # whose commands have these options as well
    assert all(f"--{option.replace('_', '-')}" in a.option_strings for a in shown)


def test_arguments_of_the_script_are_not_ours():
    args = build_parser().parse_args(["launch", "--cpu", "train.py", "--nproc-per-nod", "3", "-n", "--", "x"])
    assert args.script_args == ["--nproc-per-nod", "3", "-n", "--", "x"]


def test_a_command_that_was_removed_names_the_way_round(capsys):
    assert ends(["reshard", "a", "b"]) == 2
    error = capsys.readouterr().err
    assert "'reshard' was removed: load_state loads a checkpoint on any mesh" in error
    assert "consolidate" in error


@pytest.mark.parametrize(("word", "near"), [("lauch", "did you mean 'launch'?"), ("xyzzy", "commands: launch, env")])
def test_an_unknown_command(word, near, capsys):
    assert ends([word]) == 2
    error = capsys.readouterr().err
    assert f"unknown command {word!r}" in error
    assert near in error


# ---- what cannot be done ---------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("command", "what", "where"),
    [
        ("test --from tq", "There is no rung 'tq'", "--from"),
        ("test --quick --from tp", "There is no rung 'tp' with --quick", "--from"),
        ("cache list --cache-dir s3://bucket/p", "is not listed or pruned", None),
        ("launch --cache-dir s3://b/p x.py", "'s3://b/p' is not a valid S3 address", "--cache-dir"),
        ("cache prune --ttl abc --cache-dir .", "'abc'", "--ttl"),
        ("cache prune --max-size abc --cache-dir .", "'abc'", "--max-size"),
        ("new-plugin class", "'class' is a keyword of Python", None),
        ("precompile -- torchrun train.py", "neuron_parallel_compile is not on the PATH", None),
        ("inspect /nope", "'/nope' does not exist", "/nope"),
        ("verify /nope", "'/nope' does not exist", "/nope"),
        ("consolidate /nope out", "'/nope' does not exist", "/nope"),
    ],
)
def test_what_cannot_be_done_is_said_in_words_of_the_command_line(command, what, where, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert main(command.split()) in (1, 2)
    captured = capsys.readouterr()
    error = captured.err + captured.out
    assert what in error
    assert where is None or f"where: {where}" in error
    assert not re.search(r"CompileCache|Traceback", error)
    assert list(tmp_path.iterdir()) == []


def test_a_rehearsal_needs_no_tool(capsys):
    assert main(["precompile", "--dry-run", "--", "torchrun", "train.py"]) == 0
    output = capsys.readouterr().out
    assert "neuron_parallel_compile torchrun train.py" in output
    assert "is not on the PATH" in output


def test_an_instance_is_only_guessed_if_it_is_near(capsys, tmp_path):
    (tmp_path / "t.py").touch()
    for name, guess in (("trn9.big", "fix: Known:"), ("trn1.32xl", "Did you mean 'trn1.32xlarge'?")):
        assert main(["launch", "--instance", name, "--dry-run", str(tmp_path / "t.py")]) == 2
        assert guess in capsys.readouterr().err


def test_as_many_ranks_as_there_are_cores(capsys, tmp_path):
    (tmp_path / "t.py").touch()
    for options, ranks in ((["--cpu"], count_cores()), (["--instance", "trn2.3xlarge"], 4)):
        assert main(["launch", *options, "--nproc-per-node", "auto", "--dry-run", str(tmp_path / "t.py")]) == 0
        assert capsys.readouterr().out.startswith(f"{ranks} rank")


def test_a_backend_that_cannot_be_used_is_a_failure(capsys, monkeypatch):
    assert main(["env"]) == 0
    monkeypatch.setenv("NEURON_ACCEL_BACKEND", "abacus")
    assert main(["env"]) == 1
    assert "abacus" in capsys.readouterr().out
