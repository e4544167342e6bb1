# SPDX-License-Identifier: Apache-2.0
"""``neuron-accel cache``: lists the compile cache and evicts entries."""

from __future__ import annotations

import argparse
import json
import os
import time
from typing import Any

from neuron_accel.cli.parser import naming_options
from neuron_accel.errors import ConfigurationError
from neuron_accel.neuron.cache import CompileCache, Entry, Eviction, entries, in_use, location_of, prune
from neuron_accel.neuron.quantities import format_duration, format_size
from neuron_accel.terminal import format_pairs, format_table, show, table_width

DESCRIPTION = """\
List the persistent compile cache of the XLA path, and evict entries.

The cache keeps every compiled graph, in one folder per compiler version, graph and set of flags; Neuron never evicts
entries. Its location is set by --cache-dir, NEURON_CC_FLAGS (--cache_dir) or NEURON_COMPILE_CACHE_URL; the default is
/var/tmp/neuron-compile-cache.

  list    every entry, least recently used first
  stats   number and size of entries, compiler versions
  prune   evict entries unused for --ttl, then the least recently used until --max-size remains

prune keeps entries that a job may be using: those that are locked, being compiled, or were used within a day. It may
run during training, for example from cron. A cache on S3 is left to lifecycle rules of its bucket.
"""
EXAMPLES = """\
examples:
  neuron-accel cache list                                  every entry
  neuron-accel cache stats --json                          for programs
  neuron-accel cache prune --max-size 200GB --dry-run      print what would be evicted
  neuron-accel cache prune --ttl 30d --max-size 200GB      evict
  neuron-accel cache stats --cache-dir /fsx/neuron_cache   another cache
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("action", choices=("list", "stats", "prune"), help="see above")
    parser.add_argument("--cache-dir", metavar="PATH", help="location of the cache (default: from the environment)")
    parser.add_argument("--max-size", metavar="SIZE", help="prune: maximum size of the cache, such as 200GB or 50GiB")
    parser.add_argument("--ttl", metavar="TIME", help="prune: evict entries unused for longer, such as 30d or 12h")
    parser.add_argument("--dry-run", action="store_true", help="prune: print what would be evicted, without evicting")
    parser.add_argument("--json", action="store_true", help="print JSON")


OPTIONS = {"CompileCache.max_size": "--max-size", "CompileCache.ttl": "--ttl"}
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


def _report(args: argparse.Namespace) -> tuple[Any, str]:
    given = location_of(os.environ) if args.cache_dir is None else os.path.expanduser(args.cache_dir)
    place = given.removeprefix("file://")
    if args.action == "list" and args.cache_dir is None and "://" not in place and not os.path.exists(place):
        return [], f"{place} does not exist yet; the first training that compiles creates it"
    return {"list": _list, "stats": _stats, "prune": _prune}[args.action](place, args)


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


def _list(folder: str, args: argparse.Namespace) -> tuple[Any, str]:
    now = time.time()
    report = [{**_plain(entry), "in_use": in_use(entry, now)} for entry in entries(folder)]
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


def _stats(folder: str, args: argparse.Namespace) -> tuple[Any, str]:
    found = entries(folder)
    oldest = found[0].last_used if found else None
    compilers = {
        version: {
            "entries": sum(entry.compiler == version for entry in found),
            "bytes": sum(entry.size for entry in found if entry.compiler == version),
        }
        for version in sorted({entry.compiler for entry in found})
    }
    states = {state: sum(entry.state == state for entry in found) for state in ("done", "failed", "incomplete")}
    size = sum(entry.size for entry in found)
    report = {
        "folder": folder,
        "entries": len(found),
        "bytes": size,
        "states": states,
        "compilers": compilers,
        "least_recently_used": oldest,
    }
    pairs = [
        ("folder", folder),
        ("entries", f"{len(found)} ({', '.join(f'{n} {state}' for state, n in states.items())})"),
        ("size", format_size(size)),
        ("least recently used", "-" if oldest is None else f"{format_duration(time.time() - oldest)} ago"),
        *((f"compiler {v}", f"{row['entries']} entries, {format_size(row['bytes'])}") for v, row in compilers.items()),
    ]
    return report, format_pairs(pairs, indent="", width=table_width())


def _prune(folder: str, args: argparse.Namespace) -> tuple[Any, str]:
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
        lines.append(f"more than {format_size(limits.max_bytes)} remain, because jobs may be using entries")
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
