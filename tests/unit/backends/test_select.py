"""Which backend a run selects, for each row of the documented table, and that Accelerate selects the same."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import dataclass
from types import SimpleNamespace

import pytest

from neuron_accel.backends.select import (
    Decision,
    DryRun,
    Machine,
    _missing_piece,
    choose,
    connect,
    flag,
    neuron_flavour,
    settle,
)
from neuron_accel.cli.main import main
from neuron_accel.errors import ConfigurationError, UsageError


@dataclass(frozen=True, kw_only=True)
class Fakes:
    native_neuron: bool = False
    xla_neuron: bool = False
    neuron_hardware: bool = False
    torch_xla: bool = False
    cuda: bool = False
    native_problem: Exception | None = None
    missing: str = "install something"


NOTHING = Fakes()
CUDA = Fakes(cuda=True)
XLA_INSTALLED = Fakes(torch_xla=True)
XLA_AND_CUDA = Fakes(torch_xla=True, cuda=True)
TRN1 = Fakes(torch_xla=True, xla_neuron=True, neuron_hardware=True)
TRN1_PACKAGES_ONLY = Fakes(torch_xla=True, xla_neuron=True)
TRN2_NATIVE = Fakes(native_neuron=True, neuron_hardware=True)
TRN2_BOTH = Fakes(native_neuron=True, torch_xla=True, xla_neuron=True, neuron_hardware=True)

ROWS = [
    # requested, environment, machine, cpu -> backend, device, part of the reason
    (None, {}, NOTHING, False, "torch", "cpu", "not installed"),
    ("auto", {}, NOTHING, False, "torch", "cpu", "no accelerator"),
    (None, {}, CUDA, False, "torch", "cuda", "CUDA"),
    (None, {}, XLA_INSTALLED, False, "torch", "cpu", "not installed"),
    (None, {}, XLA_AND_CUDA, False, "torch", "cuda", "CUDA"),
    (None, {}, TRN1, False, "xla", "xla", "Neuron hardware"),
    (None, {}, TRN1_PACKAGES_ONLY, False, "torch", "cpu", "no Neuron device"),
    (None, {}, TRN2_NATIVE, False, "torch", "neuron", "native"),
    (None, {}, TRN2_BOTH, False, "torch", "neuron", "native"),
    # the environment chooses
    (None, {"NEURON_ACCEL_BACKEND": "xla"}, XLA_INSTALLED, False, "xla", "xla", "NEURON_ACCEL_BACKEND"),
    (None, {"NEURON_ACCEL_BACKEND": "auto"}, TRN1, False, "xla", "xla", "Neuron hardware"),
    (None, {"NEURON_ACCEL_BACKEND": ""}, TRN1, False, "xla", "xla", "Neuron hardware"),
    (None, {"DISABLE_XLA": "0"}, TRN1, False, "xla", "xla", "Neuron hardware"),
    (None, {"DISABLE_XLA": "1"}, TRN2_BOTH, False, "torch", "neuron", "native"),
    # the argument comes before the environment
    ("xla", {"NEURON_ACCEL_BACKEND": "torch"}, XLA_INSTALLED, False, "xla", "xla", "argument"),
    ("auto", {"NEURON_ACCEL_BACKEND": "torch"}, TRN1, False, "xla", "xla", "Neuron hardware"),
    ("torch", {}, TRN2_BOTH, False, "torch", "neuron", "native"),
    ("torch", {}, CUDA, False, "torch", "cuda", "CUDA"),
    # a dry run is asked for by name, whatever the machine has
    (None, {"NEURON_ACCEL_BACKEND": "dryrun"}, TRN1, False, "dryrun", "meta", "NEURON_ACCEL_BACKEND"),
    ("dryrun", {"NEURON_ACCEL_BACKEND": "xla"}, CUDA, False, "dryrun", "meta", "argument"),
    (DryRun(world_size=8, rank=3), {}, TRN2_NATIVE, True, "dryrun", "meta", "argument"),
    # the wish for the CPU
    (None, {}, TRN1, True, "torch", "cpu", "cpu=True"),
    (None, {}, TRN2_NATIVE, True, "torch", "cpu", "cpu=True"),
    (None, {"ACCELERATE_USE_CPU": "true"}, CUDA, False, "torch", "cpu", "ACCELERATE_USE_CPU"),
    (None, {"ACCELERATE_USE_CPU": "false"}, CUDA, False, "torch", "cuda", "CUDA"),
    ("torch", {"ACCELERATE_USE_CPU": "yes"}, TRN2_BOTH, False, "torch", "cpu", "ACCELERATE_USE_CPU"),
]


BROKEN = Fakes(neuron_hardware=True, native_problem=OSError("libnrt.so.1: cannot open"))
REFUSALS = [
    ({}, Fakes(neuron_hardware=True), "packages for Neuron are not installed", "install something"),
    ({}, BROKEN, "OSError: libnrt.so.1: cannot open", "install something"),
    ({}, Fakes(neuron_hardware=True, cuda=True), "not installed", "install something"),
    (
        {"NEURON_ACCEL_BACKEND": "torch"},
        TRN1,
        "NEURON_ACCEL_BACKEND asks for torch",
        "do without NEURON_ACCEL_BACKEND.",
    ),
    ({"DISABLE_XLA": "1"}, TRN1, "DISABLE_XLA rules out", "do without DISABLE_XLA."),
    ({"USE_TORCH_XLA": "false"}, TRN1, "USE_TORCH_XLA=false rules out", "do without USE_TORCH_XLA=false."),
]


@pytest.mark.parametrize(("environ", "machine", "why", "fix"), REFUSALS)
def test_hardware_that_cannot_be_used_is_an_error_unless_the_cpu_is_asked_for(environ, machine, why, fix):
    with pytest.raises(ConfigurationError) as refused:
        choose(None, environ, machine)
    assert why in str(refused.value)
    assert fix in str(refused.value)
    assert refused.value.__cause__ is machine.native_problem
    assert choose(None, environ, machine, cpu=True).device == "cpu"
    assert choose(None, {**environ, "ACCELERATE_USE_CPU": "1"}, machine).device == "cpu"


def test_a_native_device_that_does_not_open_is_said_also_where_there_is_no_hardware():
    assert "OSError" not in choose(None, {}, NOTHING).reason
    assert "cannot open" in choose(None, {}, Fakes(native_problem=OSError("cannot open"))).reason


@pytest.mark.parametrize(
    ("torch", "neuronx", "flavour", "product", "advice"),
    [
        ("2.13.1+cpu", None, None, "trn2.48xlarge", "constraints/native-2.13.txt"),
        ("2.9.1", None, None, "", "constraints/xla.txt"),
        ("2.13.1", None, None, "trn1.32xlarge", "Trn1 needs torch 2.9"),
        ("2.15.0", "2.11.0.1.0.696", "inference", "trn2.48xlarge", "released for torch 2.14"),
        ("2.14.0", "1.0", None, "trn2.48xlarge", "an empty placeholder"),
        ("2.14.0", "2.14.3.0", "native", "trn2.48xlarge", "another process holds the cores"),
    ],
)
def test_what_is_missing_for_this_torch(torch, neuronx, flavour, product, advice):
    assert advice in _missing_piece(torch, neuronx, flavour, product)


def made_native_package(folder):
    """A torch-neuronx whose device does not open, and notes which process has tried."""
    info = folder / "torch_neuronx-2.13.3.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: torch-neuronx\nVersion: 2.13.3.0\n")
    (info / "entry_points.txt").write_text("[torch.backends]\ntorch_neuronx = torch_neuronx:_autoload\n")
    package = folder / "torch_neuronx"
    package.mkdir()
    (package / "__init__.py").write_text(f"""
import os, types

def device_count():
    open({str(folder / "opened")!r}, "a").write(f"{{os.getpid()}}\\n")
    raise OSError("nrt_init failed: NRT_RESOURCE, cores are held by process 4711")

def is_available():
    try:
        return device_count() > 0
    except Exception:
        return False

def _autoload():
    import torch
    torch.utils.rename_privateuse1_backend("neuron")
    torch._register_device_module("neuron", types.SimpleNamespace(device_count=device_count, is_available=is_available))
""")


def test_a_launch_on_hardware_that_does_not_open_is_refused_with_its_reason(tmp_path, monkeypatch, capsys):
    """A made trn2.48xlarge. The launcher has opened nothing, and with --cpu it plans for the CPU."""
    made_native_package(tmp_path)
    (tmp_path / "dev").mkdir()
    (tmp_path / "dev" / "neuron0").touch()
    (tmp_path / "train.py").touch()
    monkeypatch.setenv("NEURON_ACCEL_HARDWARE_ROOT", str(tmp_path))
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.delenv("ACCELERATE_USE_CPU", raising=False)
    monkeypatch.syspath_prepend(str(tmp_path))
    command = ["launch", "--nproc-per-node", "2", "--dry-run", str(tmp_path / "train.py")]
    assert main(command) == 2
    said = capsys.readouterr().err
    assert "Neuron hardware, which cannot be used" in said
    assert "cores are held by process 4711" in said
    opened = (tmp_path / "opened").read_text().split()
    assert opened
    assert str(os.getpid()) not in opened
    assert main([*command[:1], "--cpu", *command[1:]]) == 0


def test_a_launch_for_an_instance_that_is_not_here_is_refused_unless_the_cpu_is_asked_for(
    tmp_path, monkeypatch, capsys
):
    (tmp_path / "train.py").touch()
    monkeypatch.delenv("ACCELERATE_USE_CPU", raising=False)
    command = ["launch", "--instance", "trn2.48xlarge", "--nproc-per-node", "2", str(tmp_path / "train.py")]
    assert main(command) == 2
    assert "no device of a trn2.48xlarge" in capsys.readouterr().err
    monkeypatch.setattr("neuron_accel.cli.launch.launch", lambda plan: 0)
    monkeypatch.setenv("ACCELERATE_USE_CPU", "1")
    assert main(command) == 0


@pytest.mark.parametrize("name", ["trn2.48xlarge", "ml.trn1.32xlarge"])
def test_a_machine_without_the_driver_is_neuron_hardware(tmp_path, monkeypatch, name):
    product = tmp_path / "sys/devices/virtual/dmi/id/product_name"
    product.parent.mkdir(parents=True)
    product.write_text(f"{name}\n")
    monkeypatch.setenv("NEURON_ACCEL_HARDWARE_ROOT", str(tmp_path))
    assert Machine().neuron_hardware


@pytest.mark.parametrize(("requested", "environ", "machine", "cpu", "backend", "device", "reason"), ROWS)
def test_choice(requested, environ, machine, cpu, backend, device, reason):
    decision = choose(requested, environ, machine, cpu=cpu)
    assert (decision.backend, decision.device) == (backend, device)
    assert reason in decision.reason


@pytest.mark.parametrize(
    ("requested", "environ", "machine", "cpu", "words"),
    [
        ("xal", {}, NOTHING, False, ["'xal'", "the backend argument", "Did you mean 'xla'?"]),
        (None, {"NEURON_ACCEL_BACKEND": "gloo"}, NOTHING, False, ["'gloo'", "NEURON_ACCEL_BACKEND", "torch"]),
        ("xla", {}, NOTHING, False, ["torch_xla is not installed", "torch_xla==2.9.0"]),
        ("xla", {"DISABLE_XLA": "1"}, TRN1, False, ["DISABLE_XLA", "remove one"]),
        ("xla", {"USE_TORCH_XLA": "0"}, TRN1, False, ["USE_TORCH_XLA=false", "remove one"]),
        ("xla", {}, TRN1, True, ["cpu=True", "PJRT_DEVICE=CPU"]),
        ("xla", {"ACCELERATE_USE_CPU": "1"}, TRN1, False, ["ACCELERATE_USE_CPU", "PJRT_DEVICE=CPU"]),
        ("dryrun", {"WORLD_SIZE": "4"}, NOTHING, False, ["4 processes", "NEURON_ACCEL_DRYRUN_WORLD_SIZE=4"]),
        ("dryrun", {"NEURON_ACCEL_DRYRUN_WORLD_SIZE": "x"}, NOTHING, False, ["=x is not a number"]),
        ("dryrun", {"NEURON_ACCEL_DRYRUN_RANK": "1"}, NOTHING, False, ["no rank 1 among 1", "from 0 to 0"]),
        ("dryrun", {"NEURON_ACCEL_DRYRUN_WORLD_SIZE": "0"}, NOTHING, False, ["0 ranks", "at least 1"]),
        (None, {"DISABLE_XLA": "maybe"}, NOTHING, False, ["DISABLE_XLA=maybe", "1 or 0"]),
    ],
)
def test_impossible_choices_say_what_to_do(requested, environ, machine, cpu, words):
    with pytest.raises(ConfigurationError) as caught:
        choose(requested, environ, machine, cpu=cpu)
    for word in words:
        assert word in str(caught.value)


def test_the_ranks_of_a_dry_run_are_those_of_the_environment():
    environ = {"NEURON_ACCEL_DRYRUN_WORLD_SIZE": "4096", "NEURON_ACCEL_DRYRUN_RANK": "17"}
    backend = connect(choose("dryrun", environ, NOTHING))
    assert (backend.name, backend.world_size, backend.rank) == ("dryrun", 4096, 17)


@pytest.mark.parametrize(
    ("version", "groups", "flavour"),
    [
        ("2.9.0.2.15.32035", set(), "xla"),
        ("1.13.1.1.17.0", set(), "xla"),
        ("2.13.3.0", {"torch.backends"}, "native"),
        ("2.14.3.0.5", set(), "native"),
        ("0.1.0", {"torch.backends", "torch_dynamo_backends"}, "native"),
        ("0.1.0", set(), None),
        ("1.0", set(), None),
        ("2.9.0", set(), None),
        ("2.9.0.2.13.24727+abc", set(), "xla"),
        ("2.11.0.1.0.696", set(), "inference"),
        ("unknown", set(), None),
    ],
)
def test_the_two_packages_called_torch_neuronx(version, groups, flavour):
    assert neuron_flavour(version, groups) == flavour


@pytest.mark.parametrize(
    ("value", "expected"), [("1", True), (" Yes ", True), ("off", False), ("", None), (None, None)]
)
def test_flags(value, expected):
    environ = {} if value is None else {"SWITCH": value}
    assert flag(environ, "SWITCH", default=False) is (expected or False)
    assert flag(environ, "SWITCH", default=True) is (True if expected is None else expected)


def accelerate_that(uses_xla: bool) -> dict:
    return {"accelerate.utils.imports": SimpleNamespace(is_torch_xla_available=lambda: uses_xla)}


def test_settling_makes_accelerate_follow():
    environ: dict[str, str] = {}
    decision = settle(environ, probes=XLA_INSTALLED, modules={})
    assert decision.backend == "torch"
    assert environ == {"USE_TORCH_XLA": "false"}
    assert settle(environ, probes=XLA_INSTALLED, modules=accelerate_that(uses_xla=False)).backend == "torch"


def test_settling_changes_nothing_unless_accelerate_would_choose_otherwise():
    environ: dict[str, str] = {}
    settle(environ, probes=NOTHING, modules={})
    settle(environ, probes=TRN1, modules={})
    settle(environ, probes=TRN1, modules=accelerate_that(uses_xla=True))
    assert environ == {}


def test_accelerate_has_xla_already():
    with pytest.raises(UsageError, match="USE_TORCH_XLA=false") as caught:
        settle({}, probes=XLA_INSTALLED, modules=accelerate_that(uses_xla=True))
    assert "before accelerate" in str(caught.value)


def test_accelerate_has_torch_already():
    with pytest.raises(UsageError, match="NEURON_ACCEL_BACKEND=xla"):
        settle({}, probes=TRN1, modules=accelerate_that(uses_xla=False))


def test_connecting_to_the_cpu():
    backend = connect(Decision(backend="torch", device="cpu", reason="test"))
    assert (backend.name, backend.device.type, backend.rank, backend.world_size) == ("torch", "cpu", 0, 1)


def test_this_machine_can_be_looked_at():
    machine = Machine()
    found = {name: getattr(machine, name) for name in vars(Fakes())}
    said = {"native_problem": found.pop("native_problem"), "missing": found.pop("missing")}
    assert all(isinstance(value, bool) for value in found.values()), found
    assert said["native_problem"] is None
    assert "torch" in said["missing"]
    assert not (found["xla_neuron"] and not found["torch_xla"])


def test_a_fake_torch_xla_is_found_but_never_imported(tmp_path):
    """With a torch_xla that fails when it is imported: neither ``choose`` nor ``settle`` imports it, nor does
    Accelerate."""
    (tmp_path / "torch_xla").mkdir()
    (tmp_path / "torch_xla" / "__init__.py").write_text("raise SystemExit('torch_xla was imported')")
    script = (
        "import os, sys\n"
        "from neuron_accel.backends.select import Machine, settle\n"
        "assert Machine().torch_xla\n"
        "print(settle(os.environ).backend)\n"
        "import accelerate.utils.imports as imports\n"
        "assert not imports.is_torch_xla_available()\n"
        "assert 'torch_xla' not in sys.modules\n"
    )
    environ = {"PATH": "/usr/bin:/bin", "PYTHONPATH": str(tmp_path), "OMP_NUM_THREADS": "1"}
    done = subprocess.run([sys.executable, "-c", script], env=environ, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "torch"


def test_choosing_leaves_torch_alone_until_it_has_to_ask():
    script = (
        "import sys\n"
        "from neuron_accel.backends.select import Machine, choose\n"
        "choose(None, {}, Machine(), cpu=True)\n"
        "print('torch' in sys.modules)\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert done.stdout.strip() == "False", done.stdout + done.stderr
