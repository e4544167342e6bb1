# SPDX-License-Identifier: Apache-2.0
"""``neuron-accel precompile --check``: checks the graphs of a few training steps on CPU, without a Neuron device."""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shlex
import sys
import textwrap
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from neuron_accel import find_instance
from neuron_accel.commands import format_table, table_width, terminal_width
from neuron_accel.errors import ConfigurationError, UsageError
from neuron_accel.testing import RanksError, run_ranks
from neuron_accel_emulation.graph_report import GraphReport, check_recorded, show_ranks
from neuron_accel_emulation.graph_rules import Finding, partitions
from neuron_accel_emulation.graphs import recording, run_script

LaunchOptions = Callable[[Sequence[str]], argparse.Namespace]
"""Parses the words after ``neuron-accel launch``."""
_TRIAL, _STEPS_VARIABLE = {"NEURON_EXTRACT_GRAPHS_ONLY": "1"}, "NEURON_ACCEL_PRECOMPILE_STEPS"
_LAUNCHERS = ("torchrun", "neuron-accel", "accelerate", "python", "python3")


@dataclass(frozen=True, kw_only=True)
class TrainingCommand:
    """The script or module that a launcher would run, its arguments, and the number of ranks."""

    target: str
    arguments: tuple[str, ...]
    module: bool
    ranks: int


def run(args: argparse.Namespace, script: Sequence[str], launch_options: LaunchOptions) -> int:
    """Runs the training command for a few steps and prints a report on its graphs.

    Args:
        args: the parsed command line: ``instance``, ``lnc``, ``steps``, ``timeout``, ``json``.
        script: the training command.
        launch_options: parses the words after ``neuron-accel launch``.

    Returns:
        the exit code: 1 if the report contains errors or the run failed, else 0.
    """
    steps, timeout = args.steps, args.timeout
    if steps < 1 or timeout <= 0:
        raise ConfigurationError(
            f"{steps} steps in {timeout:g} seconds are not possible.",
            where="--steps, --timeout",
            fix="pass at least one step; 3 are needed to find graphs that are compiled again",
        )
    instance = find_instance(args.instance, "--instance") if args.instance else None
    command = parse_command(script, launch_options)
    if instance is not None:
        instance.hardware(args.lnc).check_ranks(command.ranks)
    if not command.module and not Path(command.target).is_file():
        raise ConfigurationError(f"There is no script {command.target!r}.", where="the command after --")
    failure: RanksError | None = None
    with recording() as (folder, variables):
        variables |= {**_TRIAL, _STEPS_VARIABLE: str(steps)}
        if instance is not None:
            variables["NEURON_ACCEL_INSTANCE"] = instance.name
        try:
            with contextlib.redirect_stdout(sys.stderr if args.json else sys.stdout):  # the output of the ranks
                run_ranks(
                    run_script,
                    command.ranks,
                    command.target,
                    command.arguments,
                    command.module,
                    backend="xla",
                    timeout=timeout,
                    env=variables,
                )
        except RanksError as error:
            failure = error
        try:
            report = check_recorded(folder, instance=instance, lnc=args.lnc)
        except UsageError:
            if failure is None:
                raise
            print(f"neuron-accel: the run failed before its first step:\n{failure}", file=sys.stderr)
            return 1
    print(json.dumps(report.to_json(), indent=2) if args.json else show(report))
    if failure is not None:
        print(f"neuron-accel: the run failed; graphs after the failure are missing above:\n{failure}", file=sys.stderr)
    return 1 if report.errors or failure is not None else 0


# ---- The command that would be launched ------------------------------------------------------------------------------
def parse_command(words: Sequence[str], launch_options: LaunchOptions) -> TrainingCommand:
    """Parses a command line of ``neuron-accel launch``, ``torchrun``, ``accelerate launch`` or ``python``.

    Raises:
        ConfigurationError: if it is another command, or the number of ranks is not a number.
    """
    names = [os.path.basename(word) for word in words]
    if not words or names[0] not in _LAUNCHERS:
        raise ConfigurationError(
            f"{shlex.join(words) or 'nothing'} is not a supported training command.",
            where="the command after --",
            why="--check runs the training script itself, with ranks as threads of one process",
            fix="pass neuron-accel launch --nproc-per-node N train.py ..., or torchrun",
        )
    rest = list(words[2:] if names[0] in ("neuron-accel", "accelerate") else words[1:])
    if names[0] == "neuron-accel":
        given = launch_options(rest)
        ranks, machines = given.nproc_per_node or 1, given.nnodes or 1
        return _command(given.script, given.script_args, bool(given.module), ranks, machines)
    if names[0].startswith("python"):
        return _command(*_target(rest), "1", "1")
    others = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    others.add_argument("--nproc-per-node", "--nproc_per_node", "--num_processes", "--num-processes", default="1")
    others.add_argument("--nnodes", "--num_machines", "--num-machines", default="1")
    flags = {"--standalone", "--multi_gpu", "--cpu", "--debug", "--no-python", "--no_python"}
    options: list[str] = []
    while rest and rest[0].startswith("-") and rest[0] not in ("-m", "--module"):
        word = rest.pop(0)
        options.append(word)
        if "=" not in word and word not in flags and rest:
            options.append(rest.pop(0))
    known, _ = others.parse_known_args(options)
    nodes = "1" if names[0] == "accelerate" else known.nnodes  # its number of processes is that of all machines
    return _command(*_target(rest), known.nproc_per_node, nodes)


def _target(words: list[str]) -> tuple[str, list[str], bool]:
    module = bool(words) and words[0] in ("-m", "--module")
    rest = words[1:] if module else words
    if not rest:
        raise ConfigurationError("The training command contains no script.", where="the command after --")
    return rest[0], rest[1:], module


def _command(
    target: str, arguments: Sequence[str], module: bool, per_node: int | str, nodes: int | str
) -> TrainingCommand:
    if not str(per_node).isdecimal() or not str(nodes).isdecimal() or int(per_node) * int(nodes) < 1:
        raise ConfigurationError(
            f"The number of ranks is not known: {per_node} on each of {nodes} machines.",
            where="the command after --",
            why="graphs depend on the number of ranks",
            fix="pass numbers: --nproc-per-node 32",
        )
    return TrainingCommand(
        target=target, arguments=tuple(arguments), module=bool(module), ranks=int(per_node) * int(nodes)
    )


# ---- What is printed -------------------------------------------------------------------------------------------------
def show(report: GraphReport) -> str:
    """The report as text for a terminal."""
    where = f", checked for {report.instance.name}" if report.instance else ""
    lines = [f"{_count(len(report.graphs), 'graph')} of {_count(report.ranks, 'rank')}{where}", ""]
    rows = [
        [
            str(graph.number),
            show_ranks(graph.ranks),
            str(graph.runs),
            f"{graph.instructions:,}",
            str(graph.collectives),
            str(len(partitions(graph.module, report.ranks))),
            f"{graph.memory.peak / 2**20:,.1f} MiB",
        ]
        for graph in report.graphs
    ]
    lines.append(
        format_table(["graph", "ranks", "runs", "operations", "collectives", "groups", "live"], rows, table_width())
    )
    if report.instance:
        lines.append(f"\na core has {report.instance.core_bytes(report.lnc) / 2**30:g} GiB")
    if not report.findings:
        return "\n".join([*lines, "", "no findings"])
    cells = [
        [str(i), f.level, f.code, f.graph, show_ranks(f.ranks), _op(f), _short(f.source)]
        for i, f in enumerate(report.findings, start=1)
    ]
    lines += [
        "",
        format_table(["", "level", "code", "graph", "ranks", "operation", "source"], cells, table_width()),
        "",
    ]
    width = terminal_width() - 1
    said: dict[tuple[str, str], list[int]] = {}
    for number, finding in enumerate(report.findings, start=1):
        said.setdefault((finding.what, finding.fix), []).append(number)
    for (what, fix), numbers in said.items():
        begin = f"{', '.join(map(str, numbers))}: "
        lines.append(textwrap.fill(f"{begin}{what[0].upper()}{what[1:]}.", width, subsequent_indent="   "))
        lines.append(textwrap.fill(f"   fix: {fix}", width, subsequent_indent="   "))
    errors = len(report.errors)
    return "\n".join([*lines, "", f"{_count(errors, 'error')}, {_count(len(report.findings) - errors, 'warning')}"])


def _op(finding: Finding) -> str:
    return f"{finding.op} (and {finding.count - 1} more)" if finding.op and finding.count > 1 else finding.op


def _short(source: str) -> str:
    """A path relative to the current folder, if it is below it; else its last three parts."""
    path = Path(source)
    if source and path.is_relative_to(Path.cwd()):
        return str(path.relative_to(Path.cwd()))
    return source if len(path.parts) < 5 else "/".join(("...", *path.parts[-3:]))


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"
