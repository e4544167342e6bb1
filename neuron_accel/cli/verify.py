# SPDX-License-Identifier: Apache-2.0
"""``neuron-accel verify``: checks that a checkpoint is complete and undamaged."""

from __future__ import annotations

import argparse
import sys

from neuron_accel.terminal import show

DESCRIPTION = """\
Compare every file of a checkpoint with its checksum, and check that all shards of all tensors are present and that
their shapes match the model's configuration. Needs no torch. The exit code is 1 if a check fails.
"""
EXAMPLES = """\
examples:
  neuron-accel verify runs/checkpoints/checkpoint_3
  neuron-accel verify s3://bucket/runs/checkpoints/checkpoint_3
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("checkpoint_dir", help="the checkpoint, or its tensor_parallel_shards folder; a folder or URL")
    parser.add_argument("-v", "--verbose", action="store_true", help="print the name of every file")


def run(args: argparse.Namespace) -> int:
    from neuron_accel.checkpoint.tools.consolidate import checkpoint_folder
    from neuron_accel.checkpoint.tools.report import verify
    from neuron_accel.storage import location

    folder = checkpoint_folder(location(args.checkpoint_dir))
    wrong = verify(folder, (lambda path: print(path, flush=True)) if args.verbose else (lambda path: None))
    for problem in wrong:
        show(problem, sys.stderr)
    show(
        f"{folder}: {len(wrong)} problem{'s' if len(wrong) != 1 else ''}" if wrong else f"{folder}: complete, undamaged"
    )
    return 1 if wrong else 0
