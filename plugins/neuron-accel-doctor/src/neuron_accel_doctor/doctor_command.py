# SPDX-License-Identifier: Apache-2.0
"""``neuron-accel doctor``: what is this machine, and will training work on it."""

from __future__ import annotations

import argparse
import dataclasses
import json
import tempfile
from pathlib import Path

from neuron_accel.commands import format_table, main, show, table_width
from neuron_accel.errors import ConfigurationError
from neuron_accel_doctor.checks import Check, examine, install_lines
from neuron_accel_doctor.machine import Machine, look

DESCRIPTION = """\
Say what this machine has beside what the table of Neuron's releases expects for its instance and its torch, and what to
do about each that differs. Imports no torch. The exit code is 1 if something differs.
"""
EXAMPLES = """\
examples:
  neuron-accel doctor                       a table, and what to do
  neuron-accel doctor --json                for scripts
  neuron-accel doctor --bundle ticket.zip   one file for a support ticket, without secrets (package neuron-accel-report)
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument("--bundle", metavar="FILE", help="also write a zip file for a support ticket")


def run(args: argparse.Namespace) -> int:
    machine = look()
    checks = examine(machine)
    text = report(machine, checks)
    if args.json:
        print(json.dumps(as_json(machine, checks), indent=2))
    else:
        show(text)
    if args.bundle:
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder, "doctor")
            path.mkdir()
            (path / "doctor.txt").write_text(text + "\n")
            (path / "doctor.json").write_text(json.dumps(as_json(machine, checks), indent=2) + "\n")
            if code := _bundle(args.bundle, path):
                return code
    return int(any(check.ok is False for check in checks))


def _bundle(file: str, folder: Path) -> int:
    try:
        return main(["bundle", file, "--include", str(folder)])
    except ImportError as error:
        raise ConfigurationError(
            "The bundle cannot be written: torch cannot be imported.",
            where="--bundle",
            why=f"{type(error).__name__}: {error}",
            fix="send what neuron-accel doctor --json prints",
        ) from error


def as_json(machine: Machine, checks: list[Check]) -> dict[str, object]:
    return {
        "ok": all(check.ok is not False for check in checks),
        "checks": [dataclasses.asdict(check) for check in checks],
        "install": install_lines(machine),
        "machine": {name: value for name, value in vars(machine).items() if name != "network"},
    }


def report(machine: Machine, checks: list[Check]) -> str:
    """A table, a line of what to do for each check that differs, and how to install this project here."""
    states = {True: "ok", False: "DIFFERS", None: ""}
    rows = [[check.name, states[check.ok], check.found, check.expected] for check in checks]
    wrong = [f"{check.name}: {check.fix}" for check in checks if check.ok is False]
    advice = ["", "what to do", *(f"  {line}" for line in wrong)] if wrong else []
    how = ["", "to install neuron_accel in a clone, with the torch of this machine", *install_lines(machine)]
    return "\n".join([format_table(["what", "", "found", "expected"], rows, table_width()), *advice, *how])
