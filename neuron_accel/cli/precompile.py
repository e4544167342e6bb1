# SPDX-License-Identifier: Apache-2.0
"""``neuron-accel precompile``: compiles the graphs of a training run with ``neuron_parallel_compile``."""

from __future__ import annotations

import argparse
import itertools
import os
import shlex
import shutil
import socket
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from neuron_accel.cli import launch
from neuron_accel.cli.parser import Parser, naming_options
from neuron_accel.doors import GRAPH_CHECKS, entry_points, how_to_install, not_installed
from neuron_accel.errors import ConfigurationError
from neuron_accel.launch.host import read_mounts
from neuron_accel.neuron.cache import URL_VARIABLE, CompileCache, location_of, remark_on_place
from neuron_accel.neuron.compiler import CompilerOptions
from neuron_accel.neuron.environment import compile_settings
from neuron_accel.neuron.variables import PRECOMPILE_TOOL as TOOL
from neuron_accel.neuron.variables import STEPS_VARIABLE, Setting
from neuron_accel.terminal import format_command, format_pairs, show, table_width

DESCRIPTION = """\
Compile the graphs of a training run ahead of time, many in parallel, into the compile cache (XLA path).

Give the training command after --. neuron_parallel_compile, which is part of torch-neuronx, runs it without executing
graphs (all results are zero), collects the graphs, and compiles them. The run ends after --max-steps optimizer steps,
and so does every loop over a prepared loader. Saving, loading, logging and checks of values are skipped; scripts can
test accelerator.is_precompiling.

The graphs are those of training only if batch size, sequence length, number of machines and ranks, versions and
compiler flags are the same.

The tool and the ranks need the same compile cache. The tool uses the --cache-dir of a `neuron-accel launch` after --,
also behind srun or as `python -m neuron_accel.cli.main launch`; for other commands, such as a shell script, pass it
here or set NEURON_COMPILE_CACHE_URL. --command clean and clear-locks work on this cache.
"""
EXAMPLES = """\
examples:
  neuron-accel precompile -- neuron-accel launch --nproc-per-node 32 train.py --lr 1e-4
  neuron-accel precompile --cache-dir C -- neuron-accel launch --nproc-per-node 32 --cache-dir C train.py
  neuron-accel precompile -- torchrun --nproc-per-node 32 train.py          any launcher works
  neuron-accel precompile --command collect -- torchrun train.py            only collect graphs
  neuron-accel precompile --command compile --cache-dir C                   compile the collected graphs
  neuron-accel precompile --command analyze --analyze-output out -- torchrun train.py
  neuron-accel precompile --command clean --cache-dir C                     delete the collected graphs
  neuron-accel precompile --check --instance trn1.32xlarge -- torchrun train.py    check graphs, on any machine
  neuron-accel precompile --dry-run -- torchrun train.py                    print the command
"""

COMMANDS = ("collect", "compile", "clean", "clear-locks", "analyze")
CHECKED_STEPS = 3
CHECK_S = 1800.0
_NEEDS_SCRIPT = (None, "collect", "analyze")


@dataclass(frozen=True, kw_only=True)
class PrecompilePlan:
    """What will be run: the words of the command line, environment variables, and the compile cache."""

    words: tuple[str, ...]
    settings: tuple[Setting, ...]
    cache: CompileCache
    place: str
    remarks: tuple[str, ...] = ()

    def explain(self, width: int | None = None) -> str:
        """The plan as text, wrapped to ``width`` columns."""
        pairs = [(f"{setting.name}={setting.value}", setting.why) for setting in self.settings]
        pairs.append(("compile cache", self.place))
        pairs += [("note", remark) for remark in self.remarks]
        return f"{format_command(self.words, width)}\n{format_pairs(pairs, width=width)}"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--command",
        dest="phase",
        choices=COMMANDS,
        metavar="PHASE",
        help=f"one phase only: {', '.join(COMMANDS)} (default: collect, then compile)",
    )
    parser.add_argument("--max-steps", type=int, default=10, metavar="N", help="optimizer steps to trace (default: 10)")
    parser.add_argument(
        "--max-retries", type=int, default=0, metavar="N", help="retries for a failed graph (default: 0)"
    )
    parser.add_argument("--cache-dir", metavar="PATH", help="the compile cache: a folder or s3://bucket/prefix")
    parser.add_argument("--retry-failed-compilation", action="store_true", help="retry cached failures")
    parser.add_argument("--analyze-output", metavar="DIR", help="analyze: folder for the report")
    parser.add_argument("--analyze-verbosity", type=int, choices=(1, 2), help="analyze: verbosity of the report")
    parser.add_argument("--dry-run", action="store_true", help="print the command without running it")
    _add_check(parser)
    parser.add_argument("script", nargs=argparse.REMAINDER, metavar="-- COMMAND ...", help="the training command")


def _add_check(parser: argparse.ArgumentParser) -> None:
    check = parser.add_argument_group("checking (--check)")
    check.add_argument(
        "--check",
        action="store_true",
        help="run a few steps on CPU ranks of torch_xla, without compiling for Trainium, and report what the compiler "
        "or the instance will reject",
    )
    check.add_argument("--instance", metavar="TYPE", help="instance type to check for, such as trn1.32xlarge")
    check.add_argument("--lnc", type=int, choices=(1, 2), help="physical cores per logical core (trn2, trn3)")
    check.add_argument("--steps", type=int, metavar="N", help=f"optimizer steps to run (default: {CHECKED_STEPS})")
    check.add_argument("--json", action="store_true", help="print the report as JSON")
    check.add_argument(
        "--timeout", type=float, metavar="SECONDS", help=f"time after which ranks are killed (default: {CHECK_S:g})"
    )


def run(args: argparse.Namespace) -> int:
    """Replaces this process by the tool, with its exit code and signals; with ``--check``, checks graphs instead."""
    if args.check:
        return _check(args)
    given = [name for name in ("instance", "lnc", "steps", "json", "timeout") if getattr(args, name)]
    if given:
        raise ConfigurationError(
            f"--{given[0]} has no effect without --check.", where=f"--{given[0]}", fix="add --check"
        )
    tool = shutil.which(TOOL)
    plan = plan_precompile(args, os.environ, tool, mounts=read_mounts(), host=socket.gethostname())
    print(plan.explain(table_width()), flush=True)
    if args.dry_run:
        if tool is None:
            show(f"{TOOL}, which is part of torch-neuronx, is not on the PATH of this machine")
        return 0
    _check_command(args)
    environ = {**os.environ, **{setting.name: setting.value for setting in plan.settings}}
    plan.cache.check_writable(environ)
    return os.execvpe(plan.words[0], plan.words, environ)


def _check(args: argparse.Namespace) -> int:
    """Checks graphs with what an installed package offers for it.

    Raises:
        ConfigurationError: if none does.
    """
    script = _script(args)
    checks = entry_points(GRAPH_CHECKS)
    if not checks:
        (package,) = not_installed(GRAPH_CHECKS)
        raise ConfigurationError(
            "Checking graphs is in a package of its own.", where="--check", fix=how_to_install(package)
        )
    args.steps, args.timeout = args.steps or CHECKED_STEPS, args.timeout or CHECK_S
    return checks[0].load().run(args, script, _launch_options)


def plan_precompile(
    args: argparse.Namespace,
    environ: Mapping[str, str],
    tool: str | None,
    *,
    mounts: Sequence[tuple[str, str]] = (),
    host: str = "",
) -> PrecompilePlan:
    """Plans what to run.

    Args:
        args: the parsed command line.
        environ: environment variables.
        tool: path of neuron_parallel_compile; None if it is not installed.
        mounts, host: see :func:`~neuron_accel.neuron.cache.remark_on_place`.

    Raises:
        ConfigurationError: if the tool is missing and not ``--dry-run``, or options are invalid or contradictory.
    """
    script = _script(args)
    if args.max_steps < 1 or args.max_retries < 0:
        raise ConfigurationError(
            f"{args.max_steps} steps and {args.max_retries} retries are not possible.",
            where="--max-steps, --max-retries",
            fix="pass at least one step (10 to 15 with a learning rate schedule), and 0 or more retries",
        )
    analysis = [
        *(["--analyze-output", args.analyze_output] if args.analyze_output else []),
        *(["--analyze-verbosity", str(args.analyze_verbosity)] if args.analyze_verbosity else []),
    ]
    if analysis and args.phase != "analyze":
        raise ConfigurationError(f"{analysis[0]} has no effect here.", where=analysis[0], fix="add --command analyze")
    if tool is None and not args.dry_run:
        raise ConfigurationError(
            f"{TOOL} is not on the PATH.",
            where="neuron-accel precompile",
            why="it is part of torch-neuronx for torch 2.9 (the XLA path), which is not on the public package index",
            fix="install torch-neuronx from the Neuron package index; on the native device graphs are compiled when "
            "they are first executed, and cannot be precompiled",
        )
    command = ["--command", args.phase] if args.phase else []
    cache = _cache(args, script)
    settings = _settings(args, cache, environ)
    place = location_of({**environ, **{setting.name: setting.value for setting in settings}})
    given = {**environ, **{setting.name: setting.value for setting in settings}}.get(URL_VARIABLE, "").strip()
    if script and not given and _launched_with(script) is None:
        why = "so that a `neuron-accel launch` that this command starts with another --cache-dir is refused"
        settings.append(Setting(name=URL_VARIABLE, value=place, why=why))
    remark = remark_on_place(place, mounts, host)
    return PrecompilePlan(
        words=(tool or TOOL, *command, *analysis, *script),
        settings=tuple(settings),
        cache=cache,
        place=place,
        remarks=() if remark is None else (remark,),
    )


def _cache(args: argparse.Namespace, script: Sequence[str]) -> CompileCache:
    """The compile cache of the tool, which is that of the ranks.

    Raises:
        ConfigurationError: if the tool and the ranks have different ones.
    """
    inner = _launched_with(script)
    here, there = args.cache_dir, getattr(inner, "cache_dir", None)
    retry = args.retry_failed_compilation or getattr(inner, "retry_failed_compilation", False)
    with naming_options({"CompileCache.location": "--cache-dir"}):
        caches = [CompileCache(location=place, retry_failed_compilation=retry) for place in (here or there, there)]
    if here and there and caches[0].location != caches[1].location:
        raise ConfigurationError(
            f"The compile caches differ: {here} and {there}.",
            where="--cache-dir of precompile, and of the launch command",
            why="the tool writes compiled graphs to the first, and ranks read them from the second",
            fix="pass the same to both, or to the launch command only",
        )
    return caches[0]


def _launched_with(script: Sequence[str]) -> argparse.Namespace | None:
    """The options of a ``neuron-accel launch`` or ``python -m neuron_accel.cli.main launch``, also behind another
    command such as ``srun``; None if there is none."""
    for index, (first, second) in enumerate(itertools.pairwise(script)):
        if second != "launch":
            continue
        as_module = index > 0 and script[index - 1] == "-m" and first == "neuron_accel.cli.main"
        if as_module or os.path.basename(first) == "neuron-accel":
            return _launch_options(script[index + 2 :])
    return None


def _launch_options(words: Sequence[str]) -> argparse.Namespace:
    """The options of ``neuron-accel launch``."""
    parser = Parser(prog="neuron-accel launch")
    launch.add_arguments(parser)
    return parser.parse_args(list(words))


def _script(args: argparse.Namespace) -> list[str]:
    script: Sequence[str] = args.script[1:] if args.script[:1] == ["--"] else args.script
    if not script and args.phase in _NEEDS_SCRIPT:
        raise ConfigurationError(
            "There is no training command to collect graphs from.",
            where="neuron-accel precompile",
            fix="pass the training command after --: neuron-accel precompile -- torchrun train.py",
        )
    if script and args.phase not in _NEEDS_SCRIPT:
        raise ConfigurationError(
            f"--command {args.phase} does not run a training command, but got {shlex.join(script)}.",
            where="neuron-accel precompile",
            fix="leave the training command out, or use --command collect",
        )
    if script and script[0].endswith(".py"):
        raise ConfigurationError(
            f"{script[0]} is a script, not a command.",
            where="the command after --",
            why="graphs depend on the number of ranks, which a launcher sets",
            fix=f"pass the full command: neuron-accel launch --nproc-per-node N {shlex.join(script)}",
        )
    return list(script)


def _check_command(args: argparse.Namespace) -> None:
    """Checks that the training command exists; without it the tool would compile nothing."""
    script = _script(args)
    if script and shutil.which(script[0]) is None:
        raise ConfigurationError(
            f"There is no command {script[0]!r}.",
            where="the command after --",
            why="it is neither on the PATH nor an executable file",
            fix="pass the training command as in a shell: neuron-accel launch ..., torchrun ..., ./run.sh",
        )


def _settings(args: argparse.Namespace, cache: CompileCache, environ: Mapping[str, str]) -> list[Setting]:
    found = [
        Setting(name=STEPS_VARIABLE, value=str(args.max_steps), why="the run ends after this number of optimizer steps")
    ]
    if args.max_retries:
        name = "NEURON_PARALLEL_COMPILE_MAX_RETRIES"
        found.append(Setting(name=name, value=str(args.max_retries), why="retries for a failed graph"))
    with naming_options({"CompileCache.location": "--cache-dir"}):
        return found + compile_settings(CompilerOptions(), cache, environ, native=False)
