"""Which backend a run selects, for each row of the documented table, and that Accelerate selects the same."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import dataclass
from types import SimpleNamespace

import pytest

from neuron_accel.backends.select import Decision, DryRun, Machine, choose, connect, flag, neuron_flavour, settle
from neuron_accel.errors import ConfigurationError, UsageError


@dataclass(frozen=True, kw_only=True)
class Fakes:
    native_neuron: bool = False
    xla_neuron: bool = False
    neuron_hardware: bool = False
    torch_xla: bool = False
    cuda: bool = False


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
    (None, {"NEURON_ACCEL_BACKEND": "torch"}, TRN1, False, "torch", "cpu", "NEURON_ACCEL_BACKEND asks for torch"),
    (None, {"NEURON_ACCEL_BACKEND": "xla"}, XLA_INSTALLED, False, "xla", "xla", "NEURON_ACCEL_BACKEND"),
    (None, {"NEURON_ACCEL_BACKEND": "auto"}, TRN1, False, "xla", "xla", "Neuron hardware"),
    (None, {"NEURON_ACCEL_BACKEND": ""}, TRN1, False, "xla", "xla", "Neuron hardware"),
    (None, {"DISABLE_XLA": "1"}, TRN1, False, "torch", "cpu", "DISABLE_XLA"),
    (None, {"DISABLE_XLA": "0"}, TRN1, False, "xla", "xla", "Neuron hardware"),
    (None, {"USE_TORCH_XLA": "false"}, TRN1, False, "torch", "cpu", "USE_TORCH_XLA"),
    (None, {"DISABLE_XLA": "1"}, TRN2_BOTH, False, "torch", "neuron", "native"),
    # the argument comes before the environment
    ("torch", {"NEURON_ACCEL_BACKEND": "xla"}, TRN1, False, "torch", "cpu", "argument"),
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
        ("xla", {}, NOTHING, False, ["torch_xla is not installed", "neuron-accel[xla]"]),
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
    assert all(isinstance(value, bool) for value in found.values()), found
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
