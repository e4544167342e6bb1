# SPDX-License-Identifier: Apache-2.0
"""``neuron-accel env``: prints versions, hardware and settings, for bug reports."""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import os
import platform
import re
import sys
from collections.abc import Mapping
from typing import Any

from neuron_accel.backends.select import Machine, choose, hardware_root, neuron_flavour
from neuron_accel.engine.plan.registry import Registry
from neuron_accel.errors import ConfigurationError
from neuron_accel.launch.host import count_cores, count_neuron_devices, memory_bytes
from neuron_accel.launch.network import collect_network, format_network
from neuron_accel.neuron.facts import FACTS, SDK
from neuron_accel.neuron.instances import detect_instance
from neuron_accel.neuron.variables import VARIABLES
from neuron_accel.terminal import format_pairs, table_width

DESCRIPTION = """\
Show versions, hardware, the backend that would be chosen and why, environment variables that affect training,
and the installed plugins. Values that look like secrets are left out. The exit code is 1 if no backend can be used.

--network also checks whether this machine is set up for training on several machines: EFA devices, libfabric, network
interfaces and limits. The exit code is 1 if a check fails.
"""
EXAMPLES = """\
examples:
  neuron-accel env                              print text
  neuron-accel env --json                       print JSON
  srun --ntasks-per-node 1 neuron-accel env --network    check every machine of a Slurm job
  NEURON_ACCEL_BACKEND=xla neuron-accel env     the backend that this variable selects
"""

DISTRIBUTIONS = (
    "neuron-accel",
    "torch",
    "accelerate",
    "transformers",
    "tokenizers",
    "safetensors",
    "torch-xla",
    "torch-neuronx",
    "neuronx-cc",
    "libneuronxla",
)
SECRET = re.compile(
    r"TOKEN|SECRET|PASSW|PASSPHRASE|(^|_)P(WD|AT)$(?<!^PWD)(?<!^OLDPWD)|CREDENTIAL|(^|_)(API_?)?KEY(_|$)|AUTH|JWT|BEARER"
    r"|COOKIE",
    re.IGNORECASE,
)
"""Names of variables whose values are secret."""
URL_CREDENTIALS = re.compile(r"(?<=://)[^/@\s]+@")
RELEVANT = re.compile(
    r"^(NEURON|XLA|PJRT|ACCELERATE|OMP|MKL|TORCH|PYTORCH|TORCHELASTIC|NCCL|GLOO|FI|CCOM|CUDA)_"
    r"|^SLURM_(JOB_(ID|NUM_NODES|NODELIST|PARTITION)|ARRAY_(JOB_ID|TASK_ID)|NNODES|NTASKS|NTASKS_PER_NODE|NODEID|PROCID"
    r"|LOCALID|CPUS_ON_NODE|CPUS_PER_TASK|RESTART_COUNT|STEP_(ID|NUM_NODES|NUM_TASKS|NODELIST))$"
    r"|^(USE_TORCH_XLA|DISABLE_XLA|MASTER_ADDR|MASTER_PORT|RANK|WORLD_SIZE|LOCAL_RANK|LOCAL_WORLD_SIZE|GROUP_RANK)$"
)
"""The variables that are printed: those of libraries that read them, and of Slurm, which sets secrets too, by name."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument("--network", action="store_true", help="check the setup for training on several machines")


def run(args: argparse.Namespace) -> int:
    report = collect(os.environ)
    if args.network:
        report["network"] = collect_network(os.environ, detect_instance(), hardware_root())
    if args.json:
        print(json.dumps(report, indent=2))
    else:
        print(format_report(report, table_width()))
    failed = [check["name"] for check in report.get("network", ()) if check["ok"] is False]
    return 1 if failed or "error" in report["backend"] else 0


def collect(environment: Mapping[str, str]) -> dict[str, Any]:
    """Returns the report as dicts, lists and strings."""
    probes = Machine()
    return {
        "written_for": f"Neuron SDK {SDK} of {FACTS['sdk']['date']}",
        "versions": versions(),
        "system": {
            "python": f"{platform.python_version()} ({sys.executable})",
            "platform": platform.platform(),
            "cores": count_cores(),
            "memory_gib": round(memory_bytes() / 2**30, 1),
            "neuron_devices": count_neuron_devices(hardware_root() / "dev"),
            "cuda_devices": _cuda_devices(),
        },
        "backend": _backend(environment, probes),
        "environment": relevant_variables(environment),
        "plugins": [
            {"name": entry.name, "source": entry.source, "disabled": entry.disabled}
            for entry in Registry.from_environment(environment).entries()
        ],
    }


def versions() -> dict[str, str | None]:
    """Installed versions by distribution, None for those that are not installed. Imports none of them."""
    found: dict[str, str | None] = {}
    for name in DISTRIBUTIONS:
        try:
            distribution = importlib.metadata.distribution(name)
        except importlib.metadata.PackageNotFoundError:
            found[name] = None
            continue
        found[name] = distribution.version
        if name == "torch-neuronx":
            groups = {point.group for point in distribution.entry_points}
            found[name] = describe_torch_neuronx(distribution.version, groups)
    return found


def describe_torch_neuronx(version: str, entry_point_groups: set[str]) -> str:
    """The version of torch-neuronx, with which of the packages of this name it is."""
    flavour = neuron_flavour(version, entry_point_groups)
    meaning = {
        "native": "native device (TorchNeuron)",
        "xla": "XLA",
        "inference": "for inference by vLLM, cannot train",
        None: "a placeholder without content: install the real one from the AWS Neuron package index",
    }
    return f"{version} ({meaning[flavour]})"


def relevant_variables(environment: Mapping[str, str]) -> dict[str, str]:
    """Environment variables that affect training; the value is left out if the name suggests a secret."""
    return {
        name: "(set; not shown)" if SECRET.search(name) else URL_CREDENTIALS.sub("***@", _printable(value))
        for name, value in sorted(environment.items())
        if RELEVANT.search(name) or name in VARIABLES
    }


def _printable(value: str) -> str:
    """Replaces undecodable bytes, which Python keeps as surrogates, by escapes such as ``\\xff``."""
    return os.fsencode(value).decode(errors="backslashreplace")


def _cuda_devices() -> list[str]:
    import torch

    if not torch.cuda.is_available():
        return []
    return [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]


def _backend(environment: Mapping[str, str], probes: Machine) -> dict[str, str]:
    try:
        decision = choose(None, environment, probes)
    except ConfigurationError as error:
        return {"error": str(error)}
    return {"name": decision.backend, "device": decision.device, "reason": decision.reason}


def format_report(report: Mapping[str, Any], width: int | None = None) -> str:
    """Formats a report as text, wrapped to ``width`` columns if that is given."""
    system, backend = report["system"], report["backend"]
    sections = {
        "versions": [
            *((name, version or "not installed") for name, version in report["versions"].items()),
            ("written for", report["written_for"]),
        ],
        "system": [
            ("python", system["python"]),
            ("platform", system["platform"]),
            ("cores", str(system["cores"])),
            ("memory", f"{system['memory_gib']} GiB"),
            ("Neuron devices", str(system["neuron_devices"])),
            ("CUDA devices", ", ".join(system["cuda_devices"]) or "0"),
        ],
        "backend": [(name, value) for name, value in backend.items()],
        "environment": list(report["environment"].items()) or [("(none set)", "")],
        "plugins": [
            (plugin["name"], plugin["source"] + (" (disabled)" if plugin["disabled"] else ""))
            for plugin in report["plugins"]
        ],
    }
    if "network" in report:
        sections["network"] = format_network(report["network"])
    return "\n".join(f"{title}\n{format_pairs(pairs, width=width)}" for title, pairs in sections.items())
