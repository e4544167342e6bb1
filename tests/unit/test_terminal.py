"""What every command shows fits a terminal of 60, 80 and 120 columns, in a pseudo-terminal; a pipe gets full lines."""

from __future__ import annotations

import io
import json
import shlex
import sys
from pathlib import Path

import pytest
import yaml

from neuron_accel import terminal as cli_terminal
from neuron_accel.cli.main import COMMANDS, main
from neuron_accel.terminal import Bar, format_command, format_pairs, format_table, show
from tests.guests import is_installed
from tests.unit.cli.screen import capture, terminal

LLAMA = {"model_type": "llama", "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 96}
PLAN = "plan --model config.json --world-size 8 --global-batch 8 --sequence 16 --instance trn1.32xlarge"
SEARCH = "plan --model config.json --instances 1 --instance trn1.2xlarge --global-batch 2 --sequence 16 --why"

SHOWN = {
    "launch": ["launch --dry-run --cpu --nproc-per-node 4 --log-dir some/folder train.py --epochs 3"],
    "env": ["env", "env --network"],
    "plugins": ["plugins"],
    "new-plugin": ["new-plugin a_name_that_is_rather_long_for_a_plugin --kind axis"],
    "precompile": ["precompile --dry-run -- neuron-accel launch --nproc-per-node 32 train.py --learning-rate 1e-4"],
    "cache": ["cache list", "cache prune --ttl 1d --dry-run"],
    "consolidate": ["consolidate checkpoint output"],
    "inspect": ["inspect checkpoint --all"],
    "verify": ["verify checkpoint"],
}
"""Commands that run in this process, by subcommand. ``test`` starts ranks, and has own tests."""

OF_PACKAGES = [
    f"{PLAN} --tensor-parallel-size 2 --zero-1",
    "schedule",
    "schedule --num-microbatches 32 --schedule zero-bubble",
    "schedule --pipeline-parallel-size 16 --num-microbatches 64 --schedule interleaved --virtual-stages 2",
    "schedule --num-microbatches 500",
]
OF_PACKAGES *= is_installed("neuron-accel-plan")


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory) -> Path:
    """A checkpoint of a Llama that a run of one rank has saved."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    from neuron_accel import NeuronAccelerator, Zero1Plugin

    options = {name: value for name, value in LLAMA.items() if name != "model_type"}
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model("llama", intermediate_size=96, **options))
    accelerator = NeuronAccelerator(cpu=True, plugins=[Zero1Plugin()])
    model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters()))
    ids = torch.zeros(1, 4, dtype=torch.long, device=accelerator.device)
    accelerator.backward(model(input_ids=ids, labels=ids).loss)
    optimizer.step()
    folder = tmp_path_factory.mktemp("saved") / "checkpoint"
    accelerator.save_state(str(folder))
    accelerator.end_training()
    return folder


@pytest.fixture
def folder(tmp_path, monkeypatch, checkpoint) -> Path:
    """What the commands are about, in the current folder."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").touch()
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    (tmp_path / "checkpoint").symlink_to(checkpoint)
    entry = tmp_path / "cache" / "neuronxcc-2.21.18209.0+043b1bf7" / "MODULE_4711817319104853912+e30acd3a"
    entry.mkdir(parents=True)
    (entry / "model.neff").write_bytes(bytes(1000))
    monkeypatch.setenv("NEURON_COMPILE_CACHE_URL", str(tmp_path / "cache"))
    monkeypatch.setenv("NEURON_RT_A_VARIABLE_WITH_QUITE_A_LONG_NAME_INDEED", "its value " * 9)
    return tmp_path


def too_long(lines, columns):
    """Lines that a terminal would break: all that are longer, but a word that cannot be broken, such as a path."""
    return [line for line in lines if len(line) > columns and len(words_of(line)) > 1]


def words_of(line):
    """The words of a line as a shell reads them, where a path with spaces is quoted and a command may go on."""
    try:
        return shlex.split(line.removesuffix("\\"))
    except ValueError:  # an apostrophe
        return line.split()


def test_what_every_command_shows_is_looked_at():
    assert {*SHOWN, "test"} == set(COMMANDS)


@pytest.mark.parametrize("columns", [60, 80, 120])
@pytest.mark.parametrize("command", [*(command for commands in SHOWN.values() for command in commands), *OF_PACKAGES])
def test_what_a_command_shows_fits_the_terminal(command, columns, folder):
    code, lines = capture(command.split(), columns)
    assert code == 0 or "network" in command, lines  # this machine may have no EFA
    assert "".join(lines).strip()
    assert too_long(lines, columns) == []


def test_the_search_and_its_progress_fit_a_small_terminal(folder):
    pytest.importorskip("neuron_accel_plan")
    code, lines = capture(SEARCH.split(), 60)
    assert code in (0, 1), lines  # whether a layout fits is not the matter
    assert any(line.startswith("dry runs: 1 of at least") for line in lines)
    assert too_long(lines, 60) == []


@pytest.mark.parametrize("columns", [60, 80, 120])
@pytest.mark.parametrize("name", ["", *COMMANDS, *(["calibrate", "plan", "schedule"] if OF_PACKAGES else [])])
def test_help_is_shown_as_wide_as_the_terminal(name, columns):
    code, lines = capture([*name.split(), "--help"], columns)
    assert code == 0
    assert too_long(lines, columns) == []
    assert max(map(len, lines)) > columns - 20


@pytest.mark.parametrize(
    "command",
    [
        "launch --nproc-per-nod 4 train.py",
        "cache lst",
        "launc",
        "inspect config.json",
        *(command.replace("--world-size 8", "--world-size 3") for command in OF_PACKAGES[:1]),
    ],
)
def test_errors_fit_the_terminal(command, folder):
    code, lines = capture(command.split(), 60)
    assert code == 2
    assert any("error:" in line for line in lines)
    assert too_long(lines, 60) == []


@pytest.mark.parametrize("columns", [60, 80, 120])
def test_measured_constants_fit_the_terminal(columns, tmp_path):
    describe = pytest.importorskip("neuron_accel_plan.calibrate_command").describe
    from neuron_accel_plan import load_calibration

    constants = {"product": {"float32": [[1e6, 1e10], [1e9, 2e11]]}, "element-wise": {"bfloat16": [[1e6, 1e9]]}}
    (tmp_path / "machine.yaml").write_text(
        yaml.safe_dump(
            {
                "neuron_accel_calibration": 1,
                "machine": "x86_64, torch backend on cpu, torch 2.13.0+cpu",
                "ranks": 4,
                "kernels": constants,
                "fixed": {"": 1e-5},
                "collectives": {"reduce_scatter": {4: [[1e3, 1e-4], [1e8, 1e-1]]}},
            }
        )
    )
    machine = load_calibration(tmp_path / "machine.yaml")
    with terminal(columns) as written:
        show(describe(machine, columns))
    lines = b"".join(written).decode().split("\r\n")
    assert "operations/s" in " ".join(lines)
    assert too_long(lines, columns) == []


def test_a_progress_bar_fits_the_terminal_and_is_hidden_in_a_pipe(monkeypatch):
    monkeypatch.setattr(cli_terminal, "_INTERVAL", 0.0)
    shown = {}
    for columns in (40, 60, 120):
        with terminal(columns) as written, Bar(sys.stderr) as bar:
            bar.show(123_456_000_000, 987_654_000_000)
        states = [state for state in b"".join(written).decode().replace("\x1b[K", "").split("\r") if state]
        shown[columns] = states[0]
        assert len(states[0]) < columns
        assert "12%  123456 of 987654 MB" in states[0]
    assert "[###" in shown[120]
    assert "[" not in shown[40]
    pipe = io.StringIO()
    with Bar(pipe) as bar:
        bar.show(1, 2)
    assert pipe.getvalue() == ""


def test_a_pipe_gets_full_lines(folder, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "60")
    assert main(["env"]) == 0
    assert "its value " * 8 in capsys.readouterr().out
    assert main(["inspect", "checkpoint"]) == 0
    assert "model.layers.0.post_attention_layernorm.weight  float32" in capsys.readouterr().out


def test_a_command_goes_on_as_in_a_shell():
    words = ["run", "--option", "a value", *["--more"] * 9]
    assert format_command(words) == f"run --option 'a value'{' --more' * 9}"
    lines = format_command(words, 40).split("\n")
    assert max(map(len, lines)) <= 40
    assert " ".join(line.rstrip("\\").strip() for line in lines) == format_command(words)


def test_the_value_of_a_long_name_is_below_it():
    lines = format_pairs([("short", "one two"), ("n" * 40, "three " * 20)], width=60).split("\n")
    assert lines[:2] == ["  short  one two", f"  {'n' * 40}"]
    assert lines[2].startswith("      three three")
    assert max(map(len, lines)) <= 60


def test_a_long_name_does_not_move_the_values_of_others():
    assert format_pairs([("short", "one"), ("n" * 200, "two")]) == f"  short  one\n  {'n' * 200}  two"


def test_headers_of_a_table_are_wrapped_and_numbers_are_not():
    table = format_table(("words of a header", "n"), [("1", "1,234,567 and more of it")], 26)
    assert max(map(len, table.split("\n"))) <= 26
    assert "1,234,567" in table
    assert "header" in table
