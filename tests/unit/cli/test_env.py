"""``neuron-accel env`` prints a complete report without secrets."""

from __future__ import annotations

import importlib.metadata
import json
import os

import pytest

from neuron_accel.cli.env import collect, describe_torch_neuronx, relevant_variables
from neuron_accel.cli.main import main
from neuron_accel.neuron.facts import SDK
from neuron_accel.neuron.variables import VARIABLES


def test_the_report_names_versions_backend_and_plugins(capsys):
    assert main(["env", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["versions"]["neuron-accel"] == importlib.metadata.version("neuron-accel")
    assert report["versions"]["torch"] == importlib.metadata.version("torch")
    assert report["system"]["cores"] >= 1
    assert "zero1" in {plugin["name"] for plugin in report["plugins"]}
    assert report["backend"]["reason"]


def test_the_text_has_everything_that_the_json_has(capsys):
    assert main(["env"]) == 0
    text = capsys.readouterr().out
    for title in ("versions", "system", "backend", "environment", "plugins"):
        assert f"{title}\n" in text
    assert importlib.metadata.version("accelerate") in text
    assert f"Neuron SDK {SDK} of " in text


def test_the_backend_follows_the_environment_it_is_asked_about():
    assert collect({"ACCELERATE_USE_CPU": "1"})["backend"]["device"] == "cpu"
    assert "zla" in collect({"NEURON_ACCEL_BACKEND": "zla"})["backend"]["error"]


def test_variables_are_the_relevant_ones_without_secrets():
    environment = {
        "NEURON_CC_FLAGS": "--model-type transformer",
        "OMP_NUM_THREADS": "2",
        "USE_TORCH_XLA": "false",
        "HOME": "/home/somebody",
        "ACCELERATE_API_KEY": "hunter2",
        "NEURON_ACCESS_TOKEN": "hunter2",
        "XLA_CLIENT_SECRET": "hunter2",
        "SLURM_PASSWORD": "hunter2",
        "NEURON_COMPILE_CACHE_URL": "https://me:hunter2@example.com/cache",
        "MASTER_PORT": "29500",
        "NEURON_NO_TEXT": os.fsdecode(b"a\xff"),
    }
    shown = relevant_variables(environment)
    assert shown["NEURON_NO_TEXT"] == "a\\xff"
    assert "hunter2" not in json.dumps(shown)
    assert "HOME" not in shown
    assert shown["NEURON_CC_FLAGS"] == "--model-type transformer"
    assert shown["NEURON_COMPILE_CACHE_URL"] == "https://***@example.com/cache"
    assert shown["NEURON_ACCESS_TOKEN"] == "(set; not shown)"
    assert {"OMP_NUM_THREADS", "USE_TORCH_XLA", "MASTER_PORT"} <= set(shown)


@pytest.mark.parametrize(
    ("version", "groups", "words"),
    [
        ("1.0", set(), "placeholder"),
        ("2.9.0.2.15.32035", set(), "(XLA)"),
        ("2.13.3.0", {"torch.backends"}, "native"),
    ],
)
def test_the_packages_called_torch_neuronx_are_told_apart(version, groups, words):
    text = describe_torch_neuronx(version, groups)
    assert text.startswith(version)
    assert words in text


def test_every_variable_with_a_known_meaning_is_printed():
    values = dict.fromkeys(VARIABLES, "1")
    assert set(relevant_variables(values)) == set(VARIABLES)


def test_only_listed_variables_are_printed():
    environ = {
        "SLURM_JOB_ID": "7",
        "SLURM_JWT": "eyJ",
        "SLURM_SPANK_X": "y",
        "HOME": "/h",
        "PWD": "/w",
        "NCCL_DEBUG": "INFO",
    }
    assert relevant_variables(environ) == {"SLURM_JOB_ID": "7", "NCCL_DEBUG": "INFO"}
