"""A made machine: a folder that stands for ``/``, commands on a PATH of its own, metadata of packages."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest


class Made:
    """A trn2.48xlarge whose image has everything, until it is changed."""

    def __init__(self, root: Path) -> None:
        self.root, self.site = root / "root", root / "site"
        self.product, self.devices, self.system = "trn2.48xlarge", 16, ("ubuntu", "24.04")
        self.driver: str | None = "2.31.7.0"
        self.packages = {"aws-neuronx-runtime-lib": "2.35.30.0-9ea1", "aws-neuronx-tools": "2.33.38.0", "bash": "5"}
        self.distributions = {
            "torch": "2.14.0+cpu",
            "torch-neuronx": "2.14.3.0.500",
            "neuronx-cc": "2.28.7631.0+abc",
            "nki": "0.7.0",
        }
        self.processes: list[dict[str, object]] = []
        self.efa = True
        self.images = ["aws_neuronx_venv_torch_neuronx_2_14_0"]

    def write(self, path: str, text: str = "") -> Path:
        file = self.root / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
        return file

    def command(self, name: str, output: str) -> None:
        text = f"#!/bin/sh\nprintf '%s\\n' {' '.join(map(shlex.quote, output.splitlines()))}\n"
        self.write(f"bin/{name}", text).chmod(0o700)

    def environ(self) -> dict[str, str]:
        """Makes it, and returns the environment of a process on it."""
        if self.product:
            self.write("sys/devices/virtual/dmi/id/product_name", f"{self.product}\n")
        for index in range(self.devices):
            self.write(f"dev/neuron{index}")
        self.write("etc/os-release", 'NAME="A"\nID={}\nVERSION_ID="{}"\n'.format(*self.system))
        if self.driver is not None:
            self.write("sys/module/neuron/version", f"{self.driver}\n")
        for image in self.images:
            self.write(f"opt/{image}/bin/activate")
        self.command("dpkg-query", "\n".join(f"{name} {version}" for name, version in self.packages.items()))
        if "aws-neuronx-tools" in self.packages:
            self.command("neuron-ls", json.dumps([{"neuron_device": 0, "neuron_processes": self.processes}]))
        if self.efa:
            self.command("fi_info", "provider: efa")
        for name, version in self.distributions.items():
            info = self.site / f"{name.replace('-', '_')}-{version.partition('+')[0]}.dist-info"
            info.mkdir(parents=True)
            (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
        # of the packages that are installed here, those of this project and what it needs are seen alone
        (self.site / "sitecustomize.py").parent.mkdir(exist_ok=True)
        (self.site / "sitecustomize.py").write_text(HIDE)
        return {
            "PATH": f"{self.root / 'bin'}:/usr/bin:/bin",
            "PYTHONPATH": os.pathsep.join([str(self.site), *sys.path]),
            "NEURON_ACCEL_HARDWARE_ROOT": str(self.root),
            "MADE_SITE": str(self.site),
            "TORCH_NEURONX_NEFF_CACHE_DIR": str(self.root / "cache"),
            "HF_TOKEN": "hf_abcdefghijklmnopqrstuvwxyz",
        }

    def doctor(self, *words: str, **environ: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "neuron_accel.cli.main", "doctor", *words]
        return subprocess.run(
            command, env={**self.environ(), **environ}, cwd=self.root, capture_output=True, text=True, timeout=100
        )


HIDE = """
import importlib.metadata, os, sys
real = importlib.metadata.distribution
hidden = {"torch", "torch-neuronx", "torch-xla", "torch_xla", "libneuronxla", "neuronx-cc", "nki"}

def distribution(name):
    if name not in hidden:
        return real(name)
    found = next(iter(importlib.metadata.distributions(name=name, path=[os.environ["MADE_SITE"]])), None)
    if found is None:
        raise importlib.metadata.PackageNotFoundError(name)
    return found

importlib.metadata.distribution = distribution
if "MADE_TORCH" not in os.environ:
    sys.modules["torch"] = None  # it cannot be imported
"""


@pytest.fixture
def made(tmp_path):
    machine = Made(tmp_path)
    machine.root.mkdir()
    return machine
