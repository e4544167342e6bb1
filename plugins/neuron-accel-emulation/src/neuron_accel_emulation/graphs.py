# SPDX-License-Identifier: Apache-2.0
"""Checks the graphs of a training on XLA against the limits of the Neuron compiler and an instance.

The training runs on torch_xla ranks of this machine's CPU (:mod:`neuron_accel.testing.xla_ranks`), without an
accelerator and without the Neuron compiler.
"""

from __future__ import annotations

import contextlib
import importlib.util
import os
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

from neuron_accel import find_instance
from neuron_accel.errors import UsageError
from neuron_accel.testing import run_ranks
from neuron_accel_emulation.graph_report import RECORD_GRAPHS, GraphReport, check_recorded
from neuron_accel_emulation.xla_flags import quick_flags


def check_graphs(
    fn: Callable[..., Any],
    n: int,
    *args: Any,
    instance: str | None = None,
    lnc: int | None = None,
    timeout: float = 110.0,
    env: Mapping[str, str] | None = None,
    **kwargs: Any,
) -> GraphReport:
    """Calls ``fn(*args, **kwargs)`` on ``n`` XLA ranks and checks every graph that they execute.

    Use it in a test of your own training code::

        def test_graphs():
            report = check_graphs(train_three_steps, 4, instance="trn1.32xlarge")
            assert not report.findings, report.findings

    Args:
        fn, args, kwargs: as in :func:`~neuron_accel.testing.run_ranks`. ``fn`` has to train with
            ``NeuronAccelerator(backend="xla")``.
        n: number of ranks.
        instance: the instance whose limits of groups, rings and memory are checked; None: not checked.
        lnc: number of physical cores in a logical core.
        timeout: seconds after which ranks that still run are ended.
        env: more environment variables for the ranks.

    Raises:
        RanksError: if a rank raises an error, unless the graphs of ranks differ, which is a finding.
        UsageError: without torch_xla, or if no graph was executed.
    """
    with recording() as (folder, variables):
        try:
            run_ranks(fn, n, *args, timeout=timeout, env={**variables, **(env or {})}, backend="xla", **kwargs)
        except Exception:
            report = _report(folder, instance, lnc)
            if report is None or not any(finding.code == "ranks" for finding in report.findings):
                raise
            return report
        return check_recorded(folder, instance=find_instance(instance) if instance else None, lnc=lnc)


def _report(folder: Path, instance: str | None, lnc: int | None) -> GraphReport | None:
    with contextlib.suppress(UsageError):
        return check_recorded(folder, instance=find_instance(instance) if instance else None, lnc=lnc)
    return None


@contextmanager
def recording() -> Iterator[tuple[Path, dict[str, str]]]:
    """A context manager that yields a temporary folder, and the environment variables with which XLA ranks record their
    graphs in it."""
    with tempfile.TemporaryDirectory(prefix=f"neuron-accel-graphs-{os.getpid()}-", ignore_cleanup_errors=True) as name:
        dumps = f"--xla_dump_to={name}/dumps --xla_dump_hlo_as_proto"
        yield Path(name), {RECORD_GRAPHS: name, "XLA_HLO_DEBUG": "1", "XLA_FLAGS": f"{quick_flags()} {dumps}"}


# ---- Scripts whose ranks are threads ---------------------------------------------------------------------------------
def run_script(target: str, arguments: Sequence[str], module: bool = False) -> None:
    """Runs a script as ``python`` would, in the calling thread. Several threads may do so at the same time.

    Each thread has its own global variables of the script; ``sys.argv``, ``sys.path`` and ``sys.modules["__main__"]``
    are shared.

    Args:
        target: path of the script, or name of a module.
        arguments: arguments of the script.
        module: whether ``target`` is a module.

    Raises:
        SystemExit: if the script ends with a code that is not 0.
    """
    path, package = _find(target) if module else (Path(target).resolve(), None)
    main = ModuleType("__main__")
    main.__dict__.update(__file__=str(path), __package__=package, __builtins__=__builtins__)
    sys.argv[:] = [str(path), *arguments]
    folder = os.getcwd() if module else str(path.parent)
    if folder not in sys.path:
        sys.path.insert(0, folder)
    sys.modules["__main__"] = main  # dataclasses and argument parsers look up types there
    code = compile(path.read_bytes(), str(path), "exec")
    try:
        exec(code, main.__dict__)
    except SystemExit as end:
        if end.code not in (None, 0):
            raise


def _find(name: str) -> tuple[Path, str | None]:
    with contextlib.suppress(ImportError, ValueError):
        for candidate in (f"{name}.__main__", name):
            spec = importlib.util.find_spec(candidate)
            if spec is not None and spec.origin is not None and spec.origin.endswith(".py"):
                return Path(spec.origin), spec.parent
    raise UsageError(f"There is no module {name!r} to run.", where="-m", fix="check its name, and that it is installed")
