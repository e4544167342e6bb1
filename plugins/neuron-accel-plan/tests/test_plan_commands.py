"""The help of the commands: without torch, as wide as the terminal, with examples that parse."""

from __future__ import annotations

import re
import subprocess
import sys

import pytest
from neuron_accel_plan import calibrate_command, plan_command

from neuron_accel.commands import Parser, main

MODULES = {"calibrate": calibrate_command, "plan": plan_command}


@pytest.mark.parametrize("name", MODULES)
def test_help_imports_no_torch(name):
    probe = (
        "import sys\n"
        "from neuron_accel.commands import main\n"
        "try:\n    main(sys.argv[1:])\nexcept SystemExit as end:\n    assert end.code == 0, end.code\n"
        "heavy = {'torch', 'accelerate', 'transformers', 'torch_xla'} & set(sys.modules)\n"
        "assert not heavy, heavy\n"
    )
    done = subprocess.run([sys.executable, "-c", probe, name, "--help"], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert "examples:" in done.stdout


@pytest.mark.parametrize("columns", [60, 80, 120])
@pytest.mark.parametrize("name", MODULES)
def test_help_fits_the_terminal(name, columns, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", str(columns))
    with pytest.raises(SystemExit):
        main([name, "--help"])
    shown = capsys.readouterr().out
    assert [line for line in shown.splitlines() if len(line) > columns] == []
    assert {*(MODULES[name].DESCRIPTION + MODULES[name].EXAMPLES).split()} <= {*shown.split()}


@pytest.mark.parametrize("name", MODULES)
def test_examples_parse_and_options_are_explained(name):
    parser = Parser(prog=name)
    MODULES[name].add_arguments(parser)
    explained = dict.fromkeys(re.findall(r"^  (--[\w-]+)", parser.format_help(), re.MULTILINE))
    lines = parser.format_help().splitlines()
    for option in explained:
        at = next(index for index, line in enumerate(lines) if line.startswith(f"  {option}"))
        assert re.search(r"\S {2,}\S", lines[at].strip()) or lines[at + 1].startswith(" " * 10), option
    examples = [line.strip() for line in MODULES[name].EXAMPLES.splitlines() if f"neuron-accel {name}" in line]
    assert examples
    for example in examples:
        parser.parse_args(example.partition("   ")[0].split()[2:])
