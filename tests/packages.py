"""Packages that tests build, install and test, without a network: a wheel, in a folder of its own."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]


def install(package: Path, target: Path) -> Path:
    """Builds a wheel of ``package`` and installs it into ``target``; returns the wheel."""
    wheels = target.parent / f"{target.name}-wheels"
    common = [sys.executable, "-m", "pip", "--disable-pip-version-check", "-q"]
    offline = ["--no-deps", "--no-index"]
    _run([*common, "wheel", *offline, "--no-build-isolation", "--wheel-dir", str(wheels), str(package)])
    (wheel,) = wheels.glob("*.whl")
    _run([*common, "install", *offline, "--target", str(target), str(wheel)])
    return wheel


def run_in(target: Path, command: list[str], cwd: Path) -> str:
    """Runs a command of Python's with ``target`` among what is installed; returns its output."""
    path = os.pathsep.join([str(target), *([str(ROOT)] if _from_sources() else [])])
    return _run([sys.executable, *command], cwd=cwd, env={**os.environ, "PYTHONPATH": path})


def _from_sources() -> bool:
    import neuron_accel

    return Path(neuron_accel.__file__).parents[1] == ROOT


def _run(command: list[str], **options) -> str:
    result = subprocess.run(command, capture_output=True, text=True, check=False, **options)
    assert result.returncode == 0, f"{command}\n{result.stdout[-6000:]}\n{result.stderr[-3000:]}"
    return result.stdout
