"""``neuron-accel precompile`` with a stand-in for neuron_parallel_compile."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

from neuron_accel.cli.main import build_parser, main
from neuron_accel.cli.precompile import plan_precompile
from neuron_accel.errors import ConfigurationError
from neuron_accel.neuron.cache import CompileCache
from neuron_accel.neuron.compiler import CompilerOptions
from neuron_accel.neuron.environment import compile_settings
from neuron_accel.testing import run_ranks

# What the real one does as far as anybody can see: it runs the command with graphs being extracted.
FAKE_TOOL = """#!/bin/bash
printf '%s\\n' "$@" > "$RECORD"
env | grep -E '^NEURON' > "$RECORD.env"
while [[ "$1" == --* ]]; do shift 2; done
[ $# -eq 0 ] || NEURON_EXTRACT_GRAPHS_ONLY=1 exec "$@"
"""

TRAINING = """
import json, os, sys, torch
from neuron_accel import NeuronAccelerator
from neuron_accel.contract import Phase, PluginSpec, StrategyPlugin
class Looks(StrategyPlugin):
    spec = PluginSpec(name="looks", api_version=4, phase=Phase.OPTIMIZER, provides=frozenset({"looks-at-values"}))
accelerator = NeuronAccelerator(gradient_accumulation_steps=2, plugins=[Looks()], zero_1=True)
model = torch.nn.Linear(4, 1)
optimizer = torch.optim.AdamW(model.parameters())
data = torch.utils.data.TensorDataset(torch.randn(400, 4))
loader, evaluation = (torch.utils.data.DataLoader(data, batch_size=2) for _ in range(2))
model, optimizer, loader, evaluation = accelerator.prepare(model, optimizer, loader, evaluation)
loaded = accelerator.load_state("/nowhere/at/all")
batches = steps = evaluated = 0
try:
    for epoch in range(5):
        for (x,) in loader:
            batches += 1
            with accelerator.accumulate(model):
                accelerator.backward(model(x).square().mean())
                optimizer.step()
                optimizer.zero_grad()
            steps += accelerator.sync_gradients
        for (x,) in evaluation:
            evaluated += 1
            accelerator.gather_for_metrics(model(x))
        accelerator.log({"loss": 0.0})
        folder = accelerator.save_state(os.path.join(sys.argv[1], "checkpoint"))
        accelerator.save_model(model, os.path.join(sys.argv[1], "model"))
        accelerator.save({"x": 1}, os.path.join(sys.argv[1], "object"))
finally:
    if accelerator.is_main_process:
        found = [accelerator.is_precompiling, bool(loaded), folder, batches, steps, evaluated, len(loader)]
        found += [accelerator.check_trigger(), [plugin.spec.name for plugin in accelerator.plan.plugins]]
        with open(os.path.join(sys.argv[1], "report.json"), "w") as file:
            json.dump(found, file)
"""


@pytest.fixture
def tool(tmp_path, environment):
    path = tmp_path / "tools" / "neuron_parallel_compile"
    path.parent.mkdir()
    path.write_text(FAKE_TOOL)
    path.chmod(0o755)
    environment["PATH"] = f"{path.parent}:{os.path.dirname(sys.executable)}:{environment['PATH']}"
    environment["RECORD"] = str(tmp_path / "record")
    return tmp_path / "record"


def test_a_trial_sees_every_phase_once_keeps_nothing_and_ends(tool, start, tmp_path):
    script = tmp_path / "train.py"
    script.write_text(TRAINING)
    out = tmp_path / "out"
    out.mkdir()
    training = ["neuron-accel", "launch", "--nproc-per-node", "2", "--cpu", str(script), str(out)]
    cache = ["--cache-dir", str(tmp_path / "cache")]
    code, shown, err = start("--max-steps", "3", *cache, "--", *training, command="precompile").finish()
    assert code == 0, err + shown
    assert tool.read_text().splitlines() == training
    variables = dict(line.split("=", 1) for line in tool.with_suffix(".env").read_text().splitlines())
    assert variables["NEURON_ACCEL_PRECOMPILE_STEPS"] == "3"
    assert variables["NEURON_CC_FLAGS"] == f"--cache_dir={tmp_path / 'cache'}"
    precompiling, loaded, folder, batches, steps, evaluated, length, fired, plugins = json.loads(
        (out / "report.json").read_text()
    )
    assert precompiling is True
    assert (loaded, fired) == (False, False)
    assert folder == str(out / "checkpoint")
    assert (batches, steps, evaluated, length) == (8, 3, 6, 6)  # two further micro-batches until the step that is not
    assert "zero1" in plugins
    assert "precompilation" in plugins
    assert "looks" not in plugins
    assert [path.name for path in out.iterdir()] == ["report.json"]
    assert "collected the graphs of 3 steps" in err


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--command", "collect", "--", "torchrun", "train.py"], ["--command", "collect", "torchrun", "train.py"]),
        (["--command", "compile"], ["--command", "compile"]),
        (["--command", "clean"], ["--command", "clean"]),
        (["--command", "clear-locks"], ["--command", "clear-locks"]),
        (
            ["--command", "analyze", "--analyze-output", "o", "--analyze-verbosity", "2", "--", "torchrun", "t.py"],
            ["--command", "analyze", "--analyze-output", "o", "--analyze-verbosity", "2", "torchrun", "t.py"],
        ),
        (
            ["--", "torchrun", "--nproc-per-node", "32", "t.py", "--", "x"],
            ["torchrun", "--nproc-per-node", "32", "t.py", "--", "x"],
        ),
    ],
)
def test_what_the_tool_is_told(arguments, words):
    plan = plan_precompile(build_parser().parse_args(["precompile", *arguments]), {}, "/bin/tool")
    assert plan.words == ("/bin/tool", *words)
    assert {setting.name for setting in plan.settings} - {"NEURON_COMPILE_CACHE_URL"} == {
        "NEURON_ACCEL_PRECOMPILE_STEPS"
    }


LAUNCH = ["neuron-accel", "launch", "--nproc-per-node", "2"]


@pytest.mark.parametrize(
    ("arguments", "place"),
    [
        (["--", *LAUNCH, "--cache-dir", "/c", "t.py", "--cache-dir", "/of/the/script"], "/c"),
        (["--", *LAUNCH, "--cache_dir=/c", "t.py"], "/c"),
        (["--", "/opt/bin/neuron-accel", *LAUNCH[1:], "--cache-dir=/c", "t.py"], "/c"),
        (["--", "python", "-m", "neuron_accel.cli.main", *LAUNCH[1:], "--cache-dir", "/c", "t.py"], "/c"),
        (["--", "srun", "-N", "2", *LAUNCH, "--cache-dir", "/c", "t.py"], "/c"),
        (["--", "env", "A=1", "python3", "-m", "neuron_accel.cli.main", *LAUNCH[1:], "--cache-dir=/c", "t.py"], "/c"),
        (["--cache-dir", "/c", "--", *LAUNCH, "--cache-dir", "/c", "t.py"], "/c"),
        (["--cache-dir", "/c", "--", *LAUNCH, "t.py"], "/c"),
        (["--command", "collect", "--", *LAUNCH, "--cache-dir", "/c", "t.py"], "/c"),
        (["--command", "clean", "--cache-dir", "/c"], "/c"),
        (["--command", "clear-locks", "--cache-dir", "/c"], "/c"),
        (["--command", "compile", "--cache-dir", "/c"], "/c"),
        (["--", *LAUNCH, "t.py"], None),
    ],
)
def test_the_tool_and_the_ranks_have_one_cache(arguments, place):
    plan = plan_precompile(build_parser().parse_args(["precompile", *arguments]), {}, "/bin/tool")
    found = {setting.name: setting.value for setting in plan.settings}
    assert found.get("NEURON_CC_FLAGS") == (f"--cache_dir={place}" if place else None)
    assert found.get("NEURON_COMPILE_CACHE_URL") == place
    assert plan.place == (place or "/var/tmp/neuron-compile-cache")
    assert f"compile cache {plan.place}" in " ".join(plan.explain().split())


@pytest.mark.parametrize("command", [["bash", "run.sh"], ["torchrun", "--cache-dir", "/c", "t.py"]])
@pytest.mark.parametrize("environ", [{}, {"NEURON_CC_FLAGS": "--cache_dir=/d"}, {"NEURON_COMPILE_CACHE_URL": "/d"}])
def test_ranks_of_a_command_that_cannot_be_seen_get_the_cache_of_the_tool(command, environ):
    """So that a launch in a shell script refuses another one, instead of compiling everything again."""
    plan = plan_precompile(build_parser().parse_args(["precompile", "--", *command]), environ, "/bin/tool")
    place = "/d" if environ else "/var/tmp/neuron-compile-cache"
    ranks = {**environ, **{setting.name: setting.value for setting in plan.settings}}
    assert plan.place == ranks["NEURON_COMPILE_CACHE_URL"] == place
    with pytest.raises(ConfigurationError, match=f"{place} and the cache at /other contradict each other"):
        compile_settings(CompilerOptions(), CompileCache(location="/other"), ranks, native=False)


def test_a_launch_that_cannot_be_read_is_answered_at_once(capsys):
    with pytest.raises(SystemExit):
        plan_precompile(build_parser().parse_args(["precompile", "--", *LAUNCH, "--cach-dir", "c", "t.py"]), {}, "/t")
    assert "did you mean --cache-dir?" in capsys.readouterr().err


def test_a_cache_that_machines_would_share_is_said():
    arguments = build_parser().parse_args(["precompile", "--command", "clean", "--cache-dir", "/fsx/c"])
    plan = plan_precompile(arguments, {}, "/bin/tool", mounts=[("/", "ext4"), ("/fsx", "lustre")], host="trn-1")
    assert "note" in plan.explain()
    assert "/fsx/c is on lustre" in plan.explain()


@pytest.mark.parametrize("arguments", [["--command", "clean", "--cache-dir"], ["--", *LAUNCH, "t.py", "--cache-dir"]])
def test_the_cache_that_the_tool_writes_is_the_one_that_is_checked(arguments, tmp_path, capsys, monkeypatch):
    tools = tmp_path / "tools"
    tools.mkdir()
    for name in ("neuron_parallel_compile", "neuron-accel"):
        (tools / name).write_text("#!/bin/bash\ntouch ran\n")
        (tools / name).chmod(0o755)
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("PATH", str(tools))
    monkeypatch.chdir(tmp_path)
    arguments = [*arguments, "file/below"]
    if "t.py" in arguments:  # the option belongs before the script
        arguments.remove("t.py")
        arguments.append("t.py")
    assert main(["precompile", *arguments]) == 2
    assert "compile cache cannot be written" in capsys.readouterr().err
    assert not (tmp_path / "ran").exists()


def test_retries_and_flags_are_set():
    arguments = ["precompile", "--max-retries", "2", "--retry-failed-compilation", "--", "torchrun", "t.py"]
    plan = plan_precompile(build_parser().parse_args(arguments), {"NEURON_CC_FLAGS": "-O1"}, "/bin/tool")
    found = {setting.name: setting.value for setting in plan.settings}
    assert found["NEURON_PARALLEL_COMPILE_MAX_RETRIES"] == "2"
    assert found["NEURON_CC_FLAGS"] == "-O1 --retry_failed_compilation"


@pytest.mark.parametrize(
    ("arguments", "environ", "words"),
    [
        (["--", "torchrun", "t.py"], {}, "not on the PATH"),
        ([], {}, "no training command to collect graphs from"),
        (["--", "train.py", "--lr", "1"], {}, "train.py is a script, not a command"),
        (["--command", "compile", "--", "torchrun", "t.py"], {}, "--command compile does not run a training command"),
        (["--max-steps", "0", "--", "torchrun", "t.py"], {}, "0 steps"),
        (
            ["--cache-dir", "/a", "--", "neuron-accel", "launch", "--cache-dir", "/b", "t.py"],
            {},
            "The compile caches differ: /a and /b",
        ),
        (["--analyze-output", "x", "--", "torchrun", "t.py"], {}, "--analyze-output has no effect here"),
        (["--cache-dir", "https://x", "--", "torchrun", "t.py"], {}, "cannot be at"),
        (["--", "torchrun", "t.py"], {"NEURON_CC_FLAGS": "--cache_size=3"}, "--cache_size=3 has no effect"),
    ],
)
def test_what_is_refused(arguments, environ, words):
    tool = None if words == "not on the PATH" else "/bin/tool"
    with pytest.raises(ConfigurationError) as caught:
        plan_precompile(build_parser().parse_args(["precompile", *arguments]), environ, tool)
    assert words in str(caught.value)


def test_a_command_that_does_not_exist_is_not_handed_to_the_tool(tmp_path, capsys, monkeypatch):
    tool = tmp_path / "neuron_parallel_compile"
    tool.write_text("#!/bin/bash\ntouch ran\n")
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    assert main(["precompile", "--", "torchrn", "train.py"]) == 2
    assert "There is no command 'torchrn'" in capsys.readouterr().err
    assert not (tmp_path / "ran").exists()


def test_a_missing_tool_is_said_without_a_traceback(capsys, monkeypatch):
    monkeypatch.setenv("PATH", "/nowhere")
    assert main(["precompile", "--", "torchrun", "train.py"]) == 2
    error = capsys.readouterr().err
    assert "neuron_parallel_compile is not on the PATH" in error
    assert "fix: install torch-neuronx from the Neuron package index" in error


CHECK = "from neuron_accel.cli.launch import _check_left_over; _check_left_over(); print('goes on')"


def test_a_left_over_variable_is_an_error(start, environment, tmp_path):
    environment["NEURON_EXTRACT_GRAPHS_ONLY"] = "1"
    script = tmp_path / "train.py"
    script.write_text("print('trains')")
    code, shown, err = start("--nproc-per-node", "1", "--cpu", str(script)).finish()
    assert code == 2
    assert "nothing would be trained" in err
    assert "trains" not in shown


@pytest.mark.parametrize("way", ["tool", "steps", "off"])
def test_a_launch_that_collects_graphs_is_not_refused(way, tmp_path, monkeypatch):
    tool = tmp_path / "neuron_parallel_compile"
    tool.write_text('#!/bin/bash\nNEURON_EXTRACT_GRAPHS_ONLY=1 "$@"; exit $?\n')
    tool.chmod(0o755)
    monkeypatch.setenv("NEURON_EXTRACT_GRAPHS_ONLY", "0" if way == "off" else "1")
    if way == "steps":
        monkeypatch.setenv("NEURON_ACCEL_PRECOMPILE_STEPS", "3")
    command = [*([str(tool)] if way == "tool" else []), sys.executable, "-c", CHECK]
    assert subprocess.run(command, capture_output=True, text=True, check=True).stdout == "goes on\n"


def train_and_evaluate_later():
    """A loop whose evaluation comes after more steps than the trial has; returns what the trial says at its end."""
    import contextlib
    import io

    import torch

    from neuron_accel import NeuronAccelerator

    accelerator = NeuronAccelerator()
    net = torch.nn.Linear(2, 1)
    data = [torch.ones(2)] * 4
    loaders = [torch.utils.data.DataLoader(data) for _ in range(3)]
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    net, optimizer, *loaders = accelerator.prepare(net, optimizer, *loaders)
    said = io.StringIO()
    with contextlib.redirect_stderr(said), contextlib.suppress(SystemExit):
        for _ in range(2):
            for x in loaders[0]:
                accelerator.backward(net(x).sum())
                optimizer.step()
    return said.getvalue()


def test_a_loop_is_told_which_loaders_were_not_traced():
    trial = {"NEURON_EXTRACT_GRAPHS_ONLY": "1", "NEURON_ACCEL_PRECOMPILE_STEPS": "2"}
    (said,) = run_ranks(train_and_evaluate_later, 1, env=trial)
    assert "of 3 prepared loaders no batch was read from number 2, 3" in said
