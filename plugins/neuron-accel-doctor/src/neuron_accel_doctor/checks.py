# SPDX-License-Identifier: Apache-2.0
"""What was found beside what the table of releases expects for this machine. Pure functions."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from packaging.version import InvalidVersion, Version

from neuron_accel import find_instance
from neuron_accel.commands import FACTS
from neuron_accel.errors import ConfigurationError
from neuron_accel_doctor.machine import Machine

OPEN_FILES = 8192
CACHE_BYTES = 20 << 30


@dataclass(frozen=True, kw_only=True)
class Check:
    """One thing that was looked at.

    Args:
        name: what.
        found, expected: as text.
        ok: whether it is as expected; None if nothing is expected.
        fix: what to do, if it is not.
    """

    name: str
    found: str
    expected: str = ""
    ok: bool | None = None
    fix: str = ""


def release_of(machine: Machine) -> Mapping[str, Any] | None:
    """The release that this machine should have: that of its torch if its instance has one, else the newest of the
    instance; None without an instance."""
    rows = [row for row in FACTS["releases"] if _family(machine.product) in row["families"]]
    torch = _release(machine.distributions.get("torch", ""))
    return next((row for row in rows if row["torch"] == torch), rows[-1] if rows else None)


def examine(machine: Machine) -> list[Check]:
    """Returns all checks. Without Trainium and without packages for it, there is one that says so."""
    neuron = [name for name in machine.distributions if name not in ("torch", "torch-xla")]
    if not machine.devices and not _family(machine.product):
        found = f"none; product name {machine.product or 'unknown'}"
        if not neuron:
            return [Check(name="Trainium", found=found)]
        fix = f"{', '.join(neuron)} need an instance with Trainium: start one, or train on the CPU with --cpu"
        return [Check(name="Trainium", found=found, expected="a device", ok=False, fix=fix)]
    row = release_of(machine)
    checks = [*_hardware(machine), *(_software(machine, row) if row else ()), *_use(machine)]
    return [*checks, *_network(machine)]


def install_lines(machine: Machine) -> list[str]:
    """The commands that install this project, and change no torch that belongs to a torch-neuronx."""
    row = release_of(machine)
    pins = [f"{name}=={version}" for name, version in machine.distributions.items()]
    if "torch-neuronx" in machine.distributions:
        pinned = " ".join(f"'{pin}'" for pin in pins)
        return [f"printf '%s\\n' {pinned} > image.txt", "pip install -c image.txt '.[trainer]'"]
    if row is None:
        return ["pip install '.[trainer]'"]
    name, extra = ("xla", "xla") if row["path"] == "xla" else (f"native-{row['torch']}", "native")
    more = "torch-neuronx neuronx-cc" if extra == "xla" else "torch-neuronx neuronx-cc nki"
    line = f"pip install -c constraints/{name}.txt '.[{extra},trainer]' {more}"
    return [f"{line}   # and AWS's package index as an extra index"]


def _hardware(machine: Machine) -> Iterator[Check]:
    try:
        instance = find_instance(machine.product)
        chips = instance.chips // instance.hosts
    except ConfigurationError:
        chips = None
    fix = "" if chips else "pass --instance to launch; its groups and logical cores are not checked otherwise"
    name = machine.product or "unknown"
    yield Check(name="instance", found=name, expected="a known instance", ok=chips is not None, fix=fix)
    loaded = "install or load the driver: sudo modprobe neuron (package aws-neuronx-dkms; lsmod | grep neuron)"
    visible = f"{machine.devices} of {chips} devices are visible: give a container all /dev/neuron*, or look at dmesg"
    yield Check(
        name="devices",
        found=str(machine.devices),
        expected=str(chips or "1 or more"),
        ok=machine.devices >= (chips or 1),
        fix=visible if machine.devices else loaded,
    )


def _software(machine: Machine, row: Mapping[str, Any]) -> Iterator[Check]:
    has, packages, xla = machine.distributions, machine.packages, row["path"] == "xla"
    yield _known("system", machine.system, row["system"], _is_system(machine.system, row["system"]), _image(row))
    wanted = row.get("driver")
    ok = machine.driver is not None and (wanted is None or not _older(machine.driver, wanted))
    fix = "upgrade it: sudo apt-get install --only-upgrade aws-neuronx-dkms, and reboot"
    yield _known("driver", machine.driver, f"{wanted} or newer" if wanted else "any", ok, fix)
    runtime = packages.get("aws-neuronx-runtime-lib")
    least = ".".join(map(str, row["runtime"]))
    ok = runtime is not None and not _older(runtime, least)
    yield _known(
        "runtime", runtime, f"{least} or newer", ok, "install the package aws-neuronx-runtime-lib of this release"
    )
    tools = packages.get("aws-neuronx-tools") or ("on the PATH" if machine.tools else None)
    yield _known(
        "tools", tools, "neuron-ls", machine.tools, "install aws-neuronx-tools, and add /opt/aws/neuron/bin to PATH"
    )
    first, last = (tuple(map(int, version.split("."))) for version in row["python"].split(" to "))
    python = ".".join(map(str, machine.python))
    yield _known("Python", python, row["python"], first <= machine.python <= last, _image(row))
    ok = _release(has.get("torch", "")) == row["torch"]
    yield _known(
        "torch", has.get("torch"), f"{row['torch']}.*", ok, f"{_image(row)}; torch {row['torch']} is for this instance"
    )
    for name in ("torch-neuronx", "neuronx-cc"):
        line = _release(row[name]) if name == "torch-neuronx" else ""
        expected = row[name] if xla else f"{row[name]} or newer" + (f", of {line}" if line else "")
        yield _known(name, has.get(name), expected, _fits(has.get(name), row[name], line, exact=xla), _install(row))
    for name in ("torch-xla", "libneuronxla") if xla else ("nki",):
        yield _known(name, has.get(name), "installed", name in has, _install(row))
    if not xla and "torch-xla" in has:
        fix = "uninstall it: Accelerate would choose it"
        yield Check(name="torch-xla", found=has["torch-xla"], expected="not installed", ok=False, fix=fix)
    if machine.images:
        meant = _image_of(row)["environment"]  # an image has others, for inference
        fix = f"source {meant if meant in machine.images else machine.images[-1]}/bin/activate"
        inside = any(machine.environment.startswith(image) for image in machine.images)
        ok = inside or "torch-neuronx" in has
        yield Check(name="environment", found=machine.environment, expected=" or ".join(machine.images), ok=ok, fix=fix)


def _use(machine: Machine) -> Iterator[Check]:
    held = "; ".join(machine.holders)
    fix = "end them, or wait: a core belongs to one process"
    yield Check(name="cores in use", found=held or "none", expected="none", ok=not held, fix=fix)
    ok = machine.open_files < 0 or machine.open_files >= OPEN_FILES  # negative: unlimited
    fix = f"ulimit -n {OPEN_FILES}"
    yield Check(name="open files", found=str(machine.open_files), expected=f"{OPEN_FILES} or more", ok=ok, fix=fix)
    if machine.cache_free is not None:
        free = f"{machine.cache}: {machine.cache_free >> 30} GiB free"
        ok = machine.cache_free >= CACHE_BYTES
        fix = "pass a --cache-dir with more space to launch"
        yield Check(name="compile cache", found=free, expected=f"{CACHE_BYTES >> 30} GiB", ok=ok, fix=fix)


def _network(machine: Machine) -> Iterator[Check]:
    """EFA is needed to train on several machines only, which the advice says."""
    for each in machine.network:
        fix = (
            f"{each['fix'] or 'look at the network of the instance'} (for training on several machines)"
            if each["ok"] is False
            else ""
        )
        yield Check(name=each["name"], found=each["found"], ok=each["ok"], fix=fix)


def _known(name: str, found: str | None, expected: str, ok: bool, fix: str) -> Check:
    return Check(name=name, found=found or "missing", expected=expected, ok=ok, fix=fix)


def _family(product: str) -> str:
    try:
        return find_instance(product).family
    except ConfigurationError:
        return ""


def _release(version: str) -> str:
    return ".".join(re.split(r"[.+]", version)[:2])


def _older(version: str, other: str) -> bool:
    try:
        return Version(version.partition("-")[0]) < Version(other)
    except InvalidVersion:
        return True


def _fits(found: str | None, expected: str, line: str, *, exact: bool) -> bool:
    """Whether a version is the expected one or, if that need not be, no older one of the release ``line``, if any."""
    if found is None:
        return False
    public = found.partition("+")[0]
    if exact:
        return public == expected
    return line in ("", _release(public)) and not _older(public, expected)


def _is_system(found: str, expected: str) -> bool:
    """Whether ``ubuntu 24.04`` is one of ``Ubuntu 24.04 and 26.04``."""
    name, _, version = found.partition(" ")
    return name == expected.partition(" ")[0].lower() and version in expected.split()


def _image_of(row: Mapping[str, Any]) -> Mapping[str, Any]:
    return next(each for each in FACTS["images"] if each["path"] == row["path"])


def _image(row: Mapping[str, Any]) -> str:
    image = _image_of(row)
    return f"take the image {image['image']!r}, environment {image['environment']}"


def _install(row: Mapping[str, Any]) -> str:
    return f"install it for torch {row['torch']} from AWS's package index, or {_image(row)}"
