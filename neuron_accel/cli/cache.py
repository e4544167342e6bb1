# SPDX-License-Identifier: Apache-2.0
"""``neuron-accel cache``: lists the compile cache and evicts entries."""

from __future__ import annotations

import argparse
import json
import os
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from neuron_accel.cli.parser import naming_options
from neuron_accel.cli.terminal import format_pairs, format_table, show, table_width
from neuron_accel.errors import ConfigurationError
from neuron_accel.neuron.cache import CompileCache, check_location, is_s3, location_of
from neuron_accel.neuron.cache_remote import RemoteEntry, refusal_to_prune, remote_entries
from neuron_accel.neuron.cache_store import (
    Entry,
    Eviction,
    entries,
    in_use,
    open_files,
    open_folder,
    prune,
    running_jobs,
)
from neuron_accel.neuron.quantities import format_duration, format_size
from neuron_accel.storage import is_url

Pairs = list[tuple[str, str]]

SUMMARY = "list the compile cache, and evict entries"
DESCRIPTION = """\
List the persistent compile cache of the XLA path, and evict entries.

The cache keeps every compiled graph, in one folder per compiler version, graph and set of flags; Neuron never evicts
entries. Its location is set by --cache-dir, NEURON_CC_FLAGS (--cache_dir) or NEURON_COMPILE_CACHE_URL; the default is
/var/tmp/neuron-compile-cache.

  list    every entry, least recently used first
  stats   number and size of entries, compiler versions, running jobs
  prune   evict entries unused for --ttl, then the least recently used until --max-size remains

list and stats also read a cache on S3 (pip install 'neuron-accel[s3]'), or at any address that fsspec can read.
S3 records when an entry was written, but not when or by which job it was used: prune does not run there, and prints a
lifecycle rule with which S3 expires entries.

prune keeps entries in use: those that are locked, being compiled or open, or were used by a running job that
`neuron-accel launch` started. It may run during training, for example from cron.
"""
EXAMPLES = """\
examples:
  neuron-accel cache list                                  every entry
  neuron-accel cache stats --json                          for programs
  neuron-accel cache prune --max-size 200GB --dry-run      print what would be evicted
  neuron-accel cache prune --ttl 30d --max-size 200GB      evict
  neuron-accel cache stats --cache-dir /fsx/neuron_cache   another cache
  neuron-accel cache list --cache-dir s3://bucket/prefix   one on S3
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("action", choices=("list", "stats", "prune"), help="see above")
    parser.add_argument("--cache-dir", metavar="PLACE", help="location of the cache (default: from the environment)")
    parser.add_argument("--max-size", metavar="SIZE", help="prune: maximum size of the cache, such as 200GB or 50GiB")
    parser.add_argument("--ttl", metavar="TIME", help="prune: evict entries unused for longer, such as 30d or 12h")
    parser.add_argument("--dry-run", action="store_true", help="prune: print what would be evicted, without evicting")
    parser.add_argument("--json", action="store_true", help="print JSON")


OPTIONS = {"CompileCache.max_size": "--max-size", "CompileCache.ttl": "--ttl", "CompileCache.location": "--cache-dir"}
"""Arguments of :class:`CompileCache` in its error messages, and the options that they correspond to."""


def run(args: argparse.Namespace) -> int:
    _check_options(args)
    with naming_options(OPTIONS):
        report, text = _report(args)
    if args.json:
        print(json.dumps(report, indent=2))
    else:
        show(text)
    return 0


def listing() -> str:
    """The entries of the cache that the environment names, as text.

    Raises:
        NeuronAccelError: if it cannot be read.
    """
    return _report(argparse.Namespace(action="list", cache_dir=None))[1]


def _report(args: argparse.Namespace) -> tuple[Any, str]:
    if args.cache_dir is not None and is_s3(args.cache_dir):
        check_location(args.cache_dir, "--cache-dir")
    place = location_of(os.environ) if args.cache_dir is None else os.path.expanduser(args.cache_dir)
    place = place.removeprefix("file://")
    if is_url(place):
        return {"list": _list_remote, "stats": _stats_remote, "prune": _refuse}[args.action](place, args)
    return {"list": _list, "stats": _stats, "prune": _prune}[args.action](open_folder(place), args)


def _check_options(args: argparse.Namespace) -> None:
    given = [f"--{name.replace('_', '-')}" for name in ("max_size", "ttl", "dry_run") if getattr(args, name)]
    if args.action != "prune" and given:
        raise ConfigurationError(
            f"{given[0]} has no effect here.", where=f"neuron-accel cache {args.action}", why="it is an option of prune"
        )
    if args.action == "prune" and args.max_size is None and args.ttl is None:
        raise ConfigurationError(
            "prune needs a limit.",
            where="neuron-accel cache prune",
            why="without one, no entry would be evicted",
            fix="give --max-size, --ttl, or both",
        )


def _list(folder: Path, args: argparse.Namespace) -> tuple[Any, str]:
    jobs, opened, now = running_jobs(folder), open_files(folder), time.time()
    report = [{**_plain(entry), "in_use": in_use(entry, jobs, opened)} for entry in entries(folder)]
    if not report:
        return report, f"{folder} contains no entries"
    headers = ("entry", "compiler", "size", "last used", "state", "in use")
    rows = [
        [
            row["entry"],
            row["compiler"],
            format_size(row["bytes"]),
            f"{format_duration(now - row['last_used'])} ago",
            row["state"],
            row["in_use"] or "-",
        ]
        for row in report
    ]
    return report, format_table(headers, rows, table_width())


def _stats(folder: Path, args: argparse.Namespace) -> tuple[Any, str]:
    found, jobs, now = entries(folder), running_jobs(folder), time.time()
    totals, counts, versions = _totals(found)
    report = {
        "folder": str(folder),
        **totals,
        "least_recently_used": found[0].last_used if found else None,
        "jobs": jobs,
    }
    pairs = [
        ("folder", str(folder)),
        *counts,
        ("least recently used", f"{format_duration(now - found[0].last_used)} ago" if found else "-"),
        *versions,
        ("jobs", ", ".join(f"{job['host']} (process {job['pid']})" for job in jobs) or "none registered"),
    ]
    return report, format_pairs(pairs, indent="", width=table_width())


def _totals(found: Sequence[Entry | RemoteEntry]) -> tuple[dict[str, Any], Pairs, Pairs]:
    """The number and size of all entries: as data, as text, and as text by compiler version."""
    compilers = {
        version: {
            "entries": sum(entry.compiler == version for entry in found),
            "bytes": sum(entry.size for entry in found if entry.compiler == version),
        }
        for version in sorted({entry.compiler for entry in found})
    }
    states = {state: sum(entry.state == state for entry in found) for state in ("done", "failed", "incomplete")}
    size = sum(entry.size for entry in found)
    totals = {"entries": len(found), "bytes": size, "states": states, "compilers": compilers}
    counts = [
        ("entries", f"{len(found)} ({', '.join(f'{n} {state}' for state, n in states.items())})"),
        ("size", format_size(size)),
    ]
    rows = [(f"compiler {v}", f"{row['entries']} entries, {format_size(row['bytes'])}") for v, row in compilers.items()]
    return totals, counts, rows


# ---- on S3 and at other URLs -----------------------------------------------------------------------------------------
def _list_remote(url: str, args: argparse.Namespace) -> tuple[Any, str]:
    found, now = remote_entries(url), time.time()
    report = [
        {
            "entry": entry.name,
            "compiler": entry.compiler,
            "bytes": entry.size,
            "last_written": entry.last_written,
            "state": entry.state,
            "path": entry.path,
        }
        for entry in found
    ]
    rows = [
        [
            entry.name,
            entry.compiler,
            format_size(entry.size),
            f"{format_duration(now - entry.last_written)} ago",
            entry.state,
        ]
        for entry in found
    ]
    text = format_table(("entry", "compiler", "size", "written", "state"), rows, table_width())
    return report, text if found else f"{url} contains no entries"


def _stats_remote(url: str, args: argparse.Namespace) -> tuple[Any, str]:
    found, now = remote_entries(url), time.time()
    totals, counts, versions = _totals(found)
    report = {"address": url, **totals, "oldest": found[0].last_written if found else None}
    pairs = [
        ("address", url),
        *counts,
        ("oldest", f"written {format_duration(now - found[0].last_written)} ago" if found else "-"),
        *versions,
        ("jobs", "unknown: jobs register in folders only"),
    ]
    return report, format_pairs(pairs, indent="", width=table_width())


def _refuse(url: str, args: argparse.Namespace) -> tuple[Any, str]:
    raise refusal_to_prune(url, CompileCache(max_size=args.max_size, ttl=args.ttl).ttl_seconds)


# ---- evicting --------------------------------------------------------------------------------------------------------
def _prune(folder: Path, args: argparse.Namespace) -> tuple[Any, str]:
    limits = CompileCache(max_size=args.max_size, ttl=args.ttl)
    done = prune(folder, max_bytes=limits.max_bytes, ttl_seconds=limits.ttl_seconds, dry_run=args.dry_run)
    report = {
        "dry_run": args.dry_run,
        "evicted": [{**_plain(entry), "reason": reason} for entry, reason in done.evicted],
        "kept": [{**_plain(entry), "reason": reason} for entry, reason in done.kept],
        "bytes_left": done.left,
    }
    return report, _describe(done, limits, args.dry_run)


def _describe(done: Eviction, limits: CompileCache, dry_run: bool) -> str:
    would = "would be evicted" if dry_run else "evicted"
    lines = []
    if done.evicted:
        rows = [[entry.name, format_size(entry.size), reason] for entry, reason in done.evicted]
        lines.append(format_table((would, "size", "because of"), rows, table_width()))
    if done.kept:
        rows = [[entry.name, format_size(entry.size), reason] for entry, reason in done.kept]
        lines += [format_table(("kept", "size", "because it is"), rows, table_width())]
    freed = sum(entry.size for entry, _ in done.evicted)
    lines.append(f"{len(done.evicted)} entries, {format_size(freed)} {would}; {format_size(done.left)} remain")
    if limits.max_bytes is not None and done.left > limits.max_bytes:
        lines.append(f"more than {format_size(limits.max_bytes)} remain, because entries are in use")
    return "\n".join(lines)


def _plain(entry: Entry) -> dict[str, Any]:
    return {
        "entry": entry.name,
        "compiler": entry.compiler,
        "bytes": entry.size,
        "last_used": entry.last_used,
        "state": entry.state,
        "path": str(entry.path),
    }
