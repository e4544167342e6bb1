# SPDX-License-Identifier: Apache-2.0
"""``neuron-accel consolidate``: writes the model of a sharded checkpoint as a standard folder."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from neuron_accel.terminal import Bar, show

DESCRIPTION = """\
Write the model of a checkpoint as a standard folder of transformers: names as published, weights split by
size, configuration and tokenizer beside them. Needs no accelerator and a few megabytes of memory, however large
the model is.

With the package neuron-accel-migrate, checkpoints of optimum-neuron and neuronx-distributed are read too: weights,
not optimizer state. neuronx-distributed does not write how tensors are sharded: give --config.
"""
EXAMPLES = """\
examples:
  neuron-accel consolidate runs/checkpoints/checkpoint_3 my-model
  neuron-accel consolidate runs/checkpoints/checkpoint_3/tensor_parallel_shards my-model
  neuron-accel consolidate -f pytorch --max-shard-size 2GB checkpoint my-model
  neuron-accel consolidate optimum-output/checkpoint-500 my-model
  neuron-accel consolidate --config meta-llama/config.json nxd-output/step_500 my-model
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("checkpoint_dir", help="the checkpoint, or its tensor_parallel_shards folder; a folder or URL")
    parser.add_argument("output_dir", help="a folder or URL without weights; created if it does not exist")
    parser.add_argument(
        "-f",
        "--format",
        choices=("safetensors", "pytorch"),
        default="safetensors",
        help="file format of the weights; pytorch: as torch.save writes (default: safetensors)",
    )
    parser.add_argument("--max-shard-size", default="5GB", metavar="SIZE", help="largest size of a file (default: 5GB)")
    parser.add_argument(
        "--replica",
        type=int,
        default=0,
        metavar="N",
        help="replica to write, for replicas that differ, as with local SGD (default: 0)",
    )
    parser.add_argument(
        "--model",
        type=int,
        metavar="N",
        help="number of the model to write, if the checkpoint has several (default: the only one that is trained)",
    )
    parser.add_argument(
        "--config",
        type=Path,
        metavar="FILE",
        help="the model's config.json, or its folder, for a checkpoint that has none, as of neuronx-distributed",
    )
    parser.add_argument(
        "--no-verify",
        action="store_true",
        help="do not check checksums first; in a checkpoint of another library, do not check that replicas are equal",
    )
    parser.add_argument("-q", "--quiet", action="store_true", help="no progress bar")


def run(args: argparse.Namespace) -> int:
    from neuron_accel.checkpoint.tools.consolidate import consolidate, parse_size
    from neuron_accel.storage import location

    config: Path | None = args.config
    notes: list[str] = []
    if config is not None and config.name == "config.json" and not config.is_dir():
        config = config.parent
    with Bar(sys.stderr, hidden=args.quiet) as bar:
        paths = consolidate(
            location(args.checkpoint_dir),
            location(args.output_dir),
            form=args.format,
            max_shard_size=parse_size(args.max_shard_size),
            verify=not args.no_verify,
            replica=args.replica,
            model=args.model,
            config=config,
            progress=bar.show,
            say=notes.append,
        )
    for note in notes:
        show(note)
    show(f"{args.output_dir}: {len(paths)} file{'s' if len(paths) > 1 else ''} of weights")
    return 0
