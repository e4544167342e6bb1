"""Each fault of a made machine is named, with what to do, and nothing else is; torch cannot be imported there."""

from __future__ import annotations

import json

import pytest
from neuron_accel_doctor.checks import examine, install_lines
from neuron_accel_doctor.machine import Machine


def images(made, version):
    made.system = ("ubuntu", version)


def no_software(made):
    made.driver, made.packages, made.distributions, made.images, made.devices = None, {}, {}, [], 0


def no_hardware(made):
    made.product, made.devices = "", 0


def held(made):
    made.processes = [{"pid": 4711, "command": "python train.py"}]


def trn1(made):
    made.product, made.system = "trn1.2xlarge", ("ubuntu", "22.04")
    made.devices, made.images = 1, ["aws_neuronx_venv_pytorch_2_9"]
    made.distributions = {
        "torch": "2.9.1",
        "torch-neuronx": "2.9.0.2.15.32035+de43f57c",
        "torch-xla": "2.9.0",
        "libneuronxla": "2.2.17544.0",
        "neuronx-cc": "2.26.6360.0+6f180f47",
    }


def trn1_with_a_newer_compiler(made):
    trn1(made)
    made.distributions["neuronx-cc"] = "2.28.7631.0"


SOFTWARE = {"driver", "runtime", "tools", "torch", "torch-neuronx", "neuronx-cc", "nki", "devices"}
NO_EFA = {"EFA devices", "network interfaces"}  # the made machine has none of these files
CASES = {
    "an image of 24.04": (lambda made: images(made, "24.04"), set(), ""),
    "an image of 26.04": (lambda made: images(made, "26.04"), set(), ""),
    "an old system": (lambda made: images(made, "20.04"), {"system"}, "Deep Learning AMI Neuron torch-neuronx 2.14.0"),
    "hardware without software": (
        no_software,
        SOFTWARE,
        "modprobe neuron",
    ),
    "software without hardware": (no_hardware, {"Trainium"}, "--cpu"),
    "an old driver": (lambda made: setattr(made, "driver", "2.20.1"), {"driver"}, "aws-neuronx-dkms"),
    "a wrong torch": (lambda made: made.distributions.update({"torch": "2.15.0"}), {"torch"}, "torch 2.14 is for this"),
    "torch that was exchanged": (
        lambda made: made.distributions.update({"torch": "2.13.0"}),
        {"torch-neuronx"},
        "install it for torch 2.13",
    ),
    "a newer compiler": (lambda made: made.distributions.update({"neuronx-cc": "2.29.1.0"}), set(), ""),
    "an older compiler": (
        lambda made: made.distributions.update({"neuronx-cc": "2.27.9.0"}),
        {"neuronx-cc"},
        "install it for torch 2.14",
    ),
    "an older torch-neuronx": (
        lambda made: made.distributions.update({"torch-neuronx": "2.14.2.0"}),
        {"torch-neuronx"},
        "install it for torch 2.14",
    ),
    "cores held": (held, {"cores in use"}, "end them"),
    "no EFA library": (lambda made: setattr(made, "efa", False), {"libfabric (fi_info -p efa)"}, "EFA software"),
    "too few devices": (lambda made: setattr(made, "devices", 8), {"devices"}, "8 of 16 devices"),
    "a Trn1": (trn1, set(), ""),
    "a Trn1 with a newer compiler": (trn1_with_a_newer_compiler, {"neuronx-cc"}, "torch 2.9"),
}
ALWAYS = NO_EFA | {"Python", "locked memory", "open files", "compile cache", "runtime port"}
"""What differs on the machine of the tests, or depends on it."""


@pytest.mark.parametrize("name", CASES)
def test_the_fault_is_named_with_what_to_do(made, name):
    change, faults, advice = CASES[name]
    change(made)
    done = made.doctor("--json")
    assert done.returncode in (0, 1), done.stderr
    found = json.loads(done.stdout)
    wrong = {check["name"]: check["fix"] for check in found["checks"] if check["ok"] is False}
    assert set(wrong) - ALWAYS == faults
    assert found["ok"] == (not wrong) == (done.returncode == 0)
    assert advice in " ".join(wrong[fault] for fault in faults)
    assert all(wrong[fault] for fault in faults)


def test_the_table_says_what_to_do_and_keeps_the_torch(made):
    made.driver = "2.20.1"
    said = made.doctor().stdout
    assert "DIFFERS" in said
    assert "driver: upgrade it" in said
    assert "'torch==2.14.0+cpu' 'torch-neuronx==2.14.3.0.500'" in said
    assert "pip install -c image.txt '.[trainer]'" in said


@pytest.mark.parametrize(
    ("product", "line"),
    [
        ("trn1.32xlarge", "-c constraints/xla.txt '.[xla,trainer]'"),
        ("trn2.48xlarge", "-c constraints/native-2.14.txt '.[native,trainer]'"),
        ("", "pip install '.[trainer]'"),
    ],
)
def test_how_to_install_where_nothing_is(product, line):
    machine = Machine(product=product, packages={}, python=(3, 12), distributions={})
    assert line in install_lines(machine)[0]


@pytest.mark.parametrize(("python", "ok"), [((3, 11), False), ((3, 12), True), ((3, 14), True), ((3, 15), False)])
def test_a_python_without_wheels_is_named(python, ok):
    checks = examine(Machine(product="trn2.48xlarge", packages={}, python=python, distributions={}))
    assert next(check.ok for check in checks if check.name == "Python") is ok


def test_of_the_environments_of_an_image_that_for_training_is_named():
    images = ("/opt/aws_neuronx_venv_pytorch_2_9", "/opt/aws_neuronx_venv_pytorch_inference_vllm_0_16")
    machine = Machine(product="trn1.2xlarge", packages={}, python=(3, 12), distributions={}, images=images)
    fix = next(check.fix for check in examine(machine) if check.name == "environment")
    assert fix == "source /opt/aws_neuronx_venv_pytorch_2_9/bin/activate"


def test_a_laptop_lacks_nothing():
    laptop = Machine(product="A laptop", packages={}, python=(3, 12), distributions={"torch": "2.13.0"})
    assert [(check.name, check.ok) for check in examine(laptop)] == [("Trainium", None)]


def test_a_bundle_has_no_secrets(made, tmp_path):
    pytest.importorskip("neuron_accel_report", reason="bundle is a command of neuron-accel-report")
    import zipfile

    made.packages["aws-neuronx-collectives"] = "2.35.43.0"
    done = made.doctor("--bundle", str(tmp_path / "ticket.zip"), MADE_TORCH="1")
    assert (tmp_path / "ticket.zip").exists(), done.stdout + done.stderr
    with zipfile.ZipFile(tmp_path / "ticket.zip") as file:
        text = "\n".join(file.read(name).decode(errors="replace") for name in file.namelist())
    assert "aws-neuronx-collectives" in text
    assert "hf_abcdefghijklmnopqrstuvwxyz" not in text


def test_a_bundle_without_torch_is_refused_with_what_to_send_instead(made, tmp_path):
    pytest.importorskip("neuron_accel_report", reason="bundle is a command of neuron-accel-report")
    made.images = []
    done = made.doctor("--bundle", str(tmp_path / "ticket.zip"))
    assert done.returncode == 2
    assert "doctor --json" in done.stderr
