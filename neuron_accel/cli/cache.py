# SPDX-License-Identifier: Apache-2.0
"""``neuron-accel cache``: lists the compile cache and evicts entries."""

from __future__ import annotations

import argparse
import json
import os
import time
from typing import Any

from neuron_accel.errors import ConfigurationError
from neuron_accel.neuron.cache import Entry, Eviction, entries, in_use, location_of, prune
from neuron_accel.neuron.quantities import format_duration, format_size, parse_duration, parse_size
from neuron_accel.terminal import format_table, show, table_width

DESCRIPTION = """\
List the persistent compile cache of the XLA path, and evict entries.

The cache keeps every compiled graph, in one folder per compiler version, graph and set of flags; Neuron never evicts
entries. Its location is set by --cache-dir, NEURON_CC_FLAGS (--cache_dir) or NEURON_COMPILE_CACHE_URL; the default is
/var/tmp/neuron-compile-cache.

  list    every entry, least recently used first
  prune   evict entries unused for --ttl, then the least recently used until --max-size remains

prune keeps entries that a job may be using: those that are locked, being compiled, or were used within a day. It may
run during training, for example from cron. A cache on S3 is left to lifecycle rules of its bucket.
"""
EXAMPLES = """\
examples:
  neuron-accel cache list                                  every entry
  neuron-accel cache list --json                           for programs
  neuron-accel cache prune --max-size 200GB --dry-run      print what would be evicted
  neuron-accel cache prune --ttl 30d --max-size 200GB      evict
  neuron-accel cache list --cache-dir /fsx/neuron_cache    another cache
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("action", choices=("list", "prune"), help="see above")
    parser.add_argument("--cache-dir", metavar="PATH", help="location of the cache (default: from the environment)")
    parser.add_argument("--max-size", metavar="SIZE", help="prune: maximum size of the cache, such as 200GB or 50GiB")
    parser.add_argument("--ttl", metavar="TIME", help="prune: evict entries unused for longer, such as 30d or 12h")
    parser.add_argument("--dry-run", action="store_true", help="prune: print what would be evicted, without evicting")
    parser.add_argument("--json", action="store_true", help="print JSON")


def run(args: argparse.Namespace) -> int:
    _check_options(args)
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
    return (_list if args.action == "list" else _prune)(place, args)


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
    size = format_size(sum(row["bytes"] for row in report))
    return report, f"{format_table(headers, rows, table_width())}\n{len(report)} entries, {size}"


def _prune(folder: str, args: argparse.Namespace) -> tuple[Any, str]:
    size = None if args.max_size is None else parse_size(args.max_size, "--max-size")
    ttl = None if args.ttl is None else parse_duration(args.ttl, "--ttl")
    done = prune(folder, max_bytes=size, ttl_seconds=ttl, dry_run=args.dry_run)
    report = {
        "dry_run": args.dry_run,
        "evicted": [{**_plain(entry), "reason": reason} for entry, reason in done.evicted],
        "kept": [{**_plain(entry), "reason": reason} for entry, reason in done.kept],
        "bytes_left": done.left,
    }
    return report, _describe(done, size, args.dry_run)


def _describe(done: Eviction, max_bytes: int | None, dry_run: bool) -> str:
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
    if max_bytes is not None and done.left > max_bytes:
        lines.append(f"more than {format_size(max_bytes)} remain, because jobs may be using entries")
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
