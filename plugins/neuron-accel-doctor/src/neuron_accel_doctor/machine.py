# SPDX-License-Identifier: Apache-2.0
"""What there is on this machine: files of the system, output of commands, metadata of packages."""

from __future__ import annotations

import contextlib
import importlib.metadata
import json
import os
import resource
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from neuron_accel import find_instance
from neuron_accel.commands import collect_network
from neuron_accel.errors import ConfigurationError

DISTRIBUTIONS = ("torch", "torch-neuronx", "torch-xla", "libneuronxla", "neuronx-cc", "nki")
ROOT_VARIABLE = "NEURON_ACCEL_HARDWARE_ROOT"
"""Environment variable for the folder that stands for ``/``."""
SECONDS = 20.0
"""Time limit of a command."""


@dataclass(frozen=True, kw_only=True)
class Machine:
    """What was found.

    Args:
        product: the instance type, from the firmware; empty if there is none.
        devices: number of Neuron devices in ``dev``.
        system: name and version of the operating system: ``ubuntu 24.04``.
        driver: version of the driver that is loaded; None: none is.
        packages: versions of the system's packages whose name contains neuron or efa.
        tools: whether ``neuron-ls`` is on the PATH.
        python: major and minor version.
        distributions: versions of Python packages.
        environment: the folder of this Python environment.
        images: the environments of an AWS image.
        holders: processes that use a device, as ``pid command``.
        network: the checks of ``neuron-accel env --network``; empty where instances cannot train together.
        open_files: how many files a process may open.
        cache: folder of compiled graphs.
        cache_free: bytes that are free there; None if it is elsewhere.
    """

    product: str = ""
    devices: int = 0
    system: str = ""
    driver: str | None = None
    packages: Mapping[str, str]
    tools: bool = False
    python: tuple[int, int]
    distributions: Mapping[str, str]
    environment: str = ""
    images: tuple[str, ...] = ()
    holders: tuple[str, ...] = ()
    network: tuple[Mapping[str, Any], ...] = ()
    open_files: int = 1 << 20
    cache: str = ""
    cache_free: int | None = None


def look(environ: Mapping[str, str] = os.environ) -> Machine:
    """Looks at this machine, or at the one below the folder that :data:`ROOT_VARIABLE` names."""
    root = Path(environ.get(ROOT_VARIABLE, "").strip() or "/")
    product = _read(root / "sys/devices/virtual/dmi/id/product_name").removeprefix("ml.")
    versions = {name: version for name in DISTRIBUTIONS if (version := _version(name))}
    cache = _cache(environ, native="torch-xla" not in versions)
    return Machine(
        product=product,
        devices=sum(path.name.removeprefix("neuron").isdigit() for path in (root / "dev").glob("neuron*")),
        system=_system(root),
        driver=_read(root / "sys/module/neuron/version") or None,
        packages=_packages(environ),
        tools=shutil.which("neuron-ls", path=environ.get("PATH", "")) is not None,
        python=sys.version_info[:2],
        distributions=versions,
        environment=sys.prefix,
        images=tuple(sorted(f"/opt/{path.name}" for path in (root / "opt").glob("aws_neuronx_venv_*"))),
        holders=_holders(root, environ),
        network=_network(product, root, environ),
        open_files=resource.getrlimit(resource.RLIMIT_NOFILE)[0],
        cache=cache,
        cache_free=None if "://" in cache else shutil.disk_usage(_existing(Path(cache))).free,
    )


def _read(path: Path) -> str:
    try:
        return path.read_text(errors="replace").strip()
    except OSError:
        return ""


def _version(distribution: str) -> str | None:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None


def _system(root: Path) -> str:
    lines = _read(root / "etc/os-release").splitlines()
    values = {name: value.strip('"') for name, _, value in (line.partition("=") for line in lines)}
    return f"{values.get('ID', '')} {values.get('VERSION_ID', '')}".strip()


def _output(command: Sequence[str], environ: Mapping[str, str]) -> str:
    """What a command prints; nothing if it is not installed, or fails."""
    program = shutil.which(command[0], path=environ.get("PATH", ""))
    if program is None:
        return ""
    with contextlib.suppress(OSError, subprocess.SubprocessError):
        done = subprocess.run(
            [program, *command[1:]], env=dict(environ), capture_output=True, text=True, timeout=SECONDS, check=True
        )
        return done.stdout
    return ""


def _packages(environ: Mapping[str, str]) -> dict[str, str]:
    """Of dpkg, or of rpm."""
    lines = _output(["dpkg-query", "-W", "-f", "${Package} ${Version}\n"], environ).splitlines()
    lines = lines or _output(["rpm", "-qa", "--qf", "%{NAME} %{VERSION}\n"], environ).splitlines()
    found = dict(line.split(maxsplit=1) for line in lines if len(line.split()) > 1)
    return {name: version for name, version in found.items() if "neuron" in name or "efa" in name.split("-")}


def _holders(root: Path, environ: Mapping[str, str]) -> tuple[str, ...]:
    """Those that neuron-ls names, and those of this user that have a device open."""
    found: dict[int, str] = {}
    with contextlib.suppress(ValueError, TypeError, AttributeError):
        for device in json.loads(_output(["neuron-ls", "--json-output"], environ) or "[]"):
            for process in device.get("neuron_processes") or ():
                found[int(process["pid"])] = str(process.get("command", ""))
    for folder in (root / "proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if any(os.readlink(link).startswith("/dev/neuron") for link in (folder / "fd").iterdir()):
                found.setdefault(int(folder.name), _read(folder / "cmdline").replace("\0", " "))
    return tuple(f"{pid} {command}".strip() for pid, command in sorted(found.items()) if pid != os.getpid())


def _network(product: str, root: Path, environ: Mapping[str, str]) -> tuple[Mapping[str, Any], ...]:
    try:
        instance = find_instance(product)
    except ConfigurationError:
        return ()
    return tuple(collect_network(environ, instance, root)) if instance.multi_node else ()


def _cache(environ: Mapping[str, str], *, native: bool) -> str:
    name = "TORCH_NEURONX_NEFF_CACHE_DIR" if native else "NEURON_COMPILE_CACHE_URL"
    return environ.get(name, "").removeprefix("file://") or (
        "/tmp/neff_cache" if native else "/var/tmp/neuron-compile-cache"
    )


def _existing(path: Path) -> Path:
    return next((folder for folder in (path, *path.parents) if folder.exists()), Path("/"))
