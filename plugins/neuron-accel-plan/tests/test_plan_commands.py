"""The help of the commands: without torch, as wide as the terminal, with examples that parse."""

from __future__ import annotations

import re
import subprocess
import sys

import pytest
from neuron_accel_plan import calibrate_command, init_command, plan_command

from neuron_accel.commands import Parser, main

MODULES = {"calibrate": calibrate_command, "init": init_command, "plan": plan_command}


PROBE = """
import sys
from neuron_accel.commands import main
try:
    code = main(sys.argv[1:])
except SystemExit as end:
    code = end.code
heavy = {'torch', 'accelerate', 'transformers', 'torch_xla'} & set(sys.modules)
assert not heavy, heavy
sys.exit(code)
"""


@pytest.mark.parametrize("name", MODULES)
def test_help_imports_no_torch(name):
    done = subprocess.run([sys.executable, "-c", PROBE, name, "--help"], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "examples:" in done.stdout


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ("--model lama-3.1-8b", ["There is no model lama-3.1-8b.", "--model", "llama-3.1-8b"]),
        ("--model someone/no-such-model", ["There is no model someone/no-such-model.", "--model", "llama-3.1-8b"]),
        ("--model llama-3.1-8b --instance trn9", ["'trn9' is not a known Trainium instance."]),
    ],
)
def test_a_wrong_name_imports_no_torch(options, said):
    """It is found at once, not after the seconds of an import."""
    words = f"plan {options} --world-size 2 --global-batch 4 --sequence 64".split()
    done = subprocess.run([sys.executable, "-c", PROBE, *words], capture_output=True, text=True)
    assert done.returncode == 2, done.stderr
    assert [each for each in said if each not in done.stderr] == []


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


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ("--world-size 8 --best 3", ["--best would be without effect", "--instances"]),
        ("--world-size 8 --write out.yaml --jobs 2", ["--jobs, --write would be without effect"]),
        ("--world-size 8 --price-per-hour 3", ["--price-per-hour needs an instance", "--instance"]),
        ("--world-size 8 --instance trn1.32xlarge --price-per-hour -3", ["--price-per-hour is -3", "above 0"]),
        ("--instances 1 --instance trn1.32xlarge --price-per-hour 0", ["--price-per-hour is 0", "above 0"]),
        ("--instances 1 --instance trn1.32xlarge --best 0", ["--best is 0", "at least 1"]),
        ("--instances 1 --instance trn1.32xlarge --schedule gpipe", ["--schedule", "would fix one"]),
    ],
)
def test_no_option_is_without_effect(options, words, tmp_path, capsys, monkeypatch):
    from transformers import LlamaConfig

    monkeypatch.chdir(tmp_path)
    LlamaConfig(hidden_size=64, intermediate_size=128, num_hidden_layers=4, vocab_size=256).save_pretrained("model")
    assert main(["plan", "--model", "model", "--global-batch", "8", "--sequence", "64", *options.split()]) == 2
    error = capsys.readouterr().err
    for word in words:
        assert word in error
    assert not (tmp_path / "out.yaml").exists()


def test_options_of_a_search_and_of_a_pipeline_are_refused_with_a_script(tmp_path, capsys):
    script = tmp_path / "train.py"
    script.write_text("raise SystemExit(7)")
    for options in (["--best", "3"], ["--write", "out.yaml"], ["--schedule", "gpipe"], ["--num-microbatches", "2"]):
        assert main(["plan", str(script), "--nproc-per-node", "2", *options]) == 2
        assert f"{options[0]} would be without effect" in capsys.readouterr().err
