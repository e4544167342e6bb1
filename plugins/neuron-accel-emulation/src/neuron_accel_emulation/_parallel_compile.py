# SPDX-License-Identifier: Apache-2.0
"""A stand-in for ``neuron_parallel_compile`` on an emulated instance.

It runs a command that only collects graphs, and then writes an emulated result for each graph in the cache without one.
It has the documented phases and options, uses the documented layout of the cache, and exits with the exit code of the
command.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

PHASES = ("collect", "compile", "clean", "clear-locks", "analyze")


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="neuron_parallel_compile", allow_abbrev=False)
    parser.add_argument("--command", choices=PHASES)
    parser.add_argument("--num_parallel", type=int)
    parser.add_argument("--analyze-output")
    parser.add_argument("--analyze-verbosity", type=int, choices=(1, 2))
    parser.add_argument("script", nargs=argparse.REMAINDER)
    args = parser.parse_args(arguments)
    cache = cache_of(os.environ)
    if args.command in (None, "collect", "analyze"):
        code = _collect(args.script)
        if code or args.command is not None:
            return code
    if args.command in (None, "compile"):
        _compile(cache)
    elif args.command == "clean":
        for entry in _uncompiled(cache):
            for file in entry.iterdir():
                file.unlink()
            entry.rmdir()
    elif args.command == "clear-locks":
        for lock in cache.glob("neuronxcc-*/MODULE_*/*.lock"):
            lock.unlink()
    return 0


def cache_of(environ: Mapping[str, str]) -> Path:
    """The folder of the compile cache: ``--cache_dir`` in NEURON_CC_FLAGS, else NEURON_COMPILE_CACHE_URL, else the
    default."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--cache_dir", type=str)
    flags, _ = parser.parse_known_args(shlex.split(environ.get("NEURON_CC_FLAGS", "")))
    url = environ.get("NEURON_COMPILE_CACHE_URL", "").strip().removeprefix("file://")
    return Path(flags.cache_dir or url or "/var/tmp/neuron-compile-cache").expanduser()


def _collect(script: list[str]) -> int:
    if not script:
        print("neuron_parallel_compile: no command to run", file=sys.stderr)
        return 2
    return subprocess.run(script, env={**os.environ, "NEURON_EXTRACT_GRAPHS_ONLY": "1"}).returncode


def _uncompiled(cache: Path) -> Iterator[Path]:
    """Entries of the cache that were collected but not compiled."""
    for graph in sorted(cache.glob("neuronxcc-*/MODULE_*/model.hlo_module.pb")):
        if not (graph.parent / "model.done").exists():
            yield graph.parent


def _compile(cache: Path) -> None:
    compiled = list(_uncompiled(cache))
    for entry in compiled:
        (entry / "model.neff").write_text("emulated\n")
        (entry / "model.done").touch()
    print("Compilation summary:", json.dumps({"true": len(compiled), "false": 0}))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
