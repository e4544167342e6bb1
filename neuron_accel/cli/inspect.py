# SPDX-License-Identifier: Apache-2.0
"""``neuron-accel inspect``: shows the contents of a checkpoint."""

from __future__ import annotations

import argparse
import json
from typing import Any

from neuron_accel.terminal import format_pairs, format_table, show, table_width

DESCRIPTION = """\
Show the mesh that a checkpoint was saved on, its files, and its tensors with their shapes, dtypes and layouts.
Reads no tensors, and needs no torch. In a terminal, tables are wrapped to its width.
"""
EXAMPLES = """\
examples:
  neuron-accel inspect checkpoint              the model's weights
  neuron-accel inspect checkpoint --all        also the optimizer's state
  neuron-accel inspect checkpoint --json       everything, as JSON
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("checkpoint_dir", help="the checkpoint, or its tensor_parallel_shards folder; a folder or URL")
    parser.add_argument("--all", action="store_true", help="also list the optimizer's state")
    parser.add_argument("--json", action="store_true", help="print JSON")


def run(args: argparse.Namespace) -> int:
    from neuron_accel.checkpoint.tools.consolidate import checkpoint_folder
    from neuron_accel.checkpoint.tools.report import inspect
    from neuron_accel.storage import location

    report = inspect(checkpoint_folder(location(args.checkpoint_dir)))
    if args.json:
        print(json.dumps(report, indent=2))
    else:
        show(format_report(report, everything=args.all))
    return 0


def format_report(report: dict[str, Any], *, everything: bool = False) -> str:
    mesh = " x ".join(f"{axis} {degree}" for axis, degree in report["mesh"].items() if degree > 1) or "one rank"
    total = sum(file["size"] for file in report["files"].values())
    pairs = [
        ("saved", report["saved"] or "-"),
        ("mesh", mesh),
        ("plugins", ", ".join(report["plugins"]) or "-"),
        ("models", ", ".join(model["class"] for model in report["models"] if model) or "-"),
        ("optimizers", ", ".join(report["optimizers"]) or "-"),
        *([("replicas", f"{report['replicas']}; the first is shown")] if report["replicas"] > 1 else []),
        ("files", f"{len(report['files'])}, {_size(total)}"),
    ]
    sections = [format_pairs(pairs, indent="", width=table_width())]
    for collection, tensors in report["collections"].items():
        size = sum(tensor["bytes"] for tensor in tensors)
        sections.append(f"{collection}: {len(tensors)} tensors, {_size(size)}")
        if everything or collection.startswith("model."):
            rows = [[t["name"], t["dtype"], str(tuple(t["shape"])), _cuts(t), str(t["pieces"])] for t in tensors]
            sections.append(format_table(("name", "dtype", "shape", "layout", "shards"), rows, table_width()))
    return "\n\n".join(sections)


def _cuts(tensor: dict[str, Any]) -> str:
    cuts = [
        f"Shard({cut['dim']}) over {cut['axis']} {cut['degree']}"
        + (f" in {len(cut['blocks'])} blocks" if len(cut["blocks"]) > 1 else "")
        + (", padded" if cut["padded"] else "")
        for cut in tensor["cuts"]
    ]
    return "; ".join(cuts) or "unsharded"


def _size(size: float) -> str:
    for unit in ("B", "kB", "MB", "GB"):
        if size < 1000:
            return f"{size:.4g} {unit}"
        size /= 1000
    return f"{size:.4g} TB"
