"""``neuron-accel reshard``: a checkpoint divided for another mesh."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from neuron_accel.cli.progress import Bar

SUMMARY = "divide a checkpoint for another mesh, optimizer included"
DESCRIPTION = """\
Write a checkpoint again as the ranks of another mesh would have saved it, so that each reads files of its own.
Loading never needs this: any mesh loads any checkpoint. Needs no accelerator and a few megabytes of memory.
"""
EXAMPLES = """\
examples:
  neuron-accel reshard --tensor-parallel 8 checkpoint checkpoint-tp8
  neuron-accel reshard --tensor-parallel 4 --data-parallel 8 --zero-1 checkpoint checkpoint-tp4-dp8
  neuron-accel reshard checkpoint whole                  one file of weights, one of optimizer state
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("checkpoint_dir", type=Path, help="the checkpoint, or its tensor_parallel_shards folder")
    parser.add_argument("output_dir", type=Path, help="an empty folder; made if it does not exist")
    parser.add_argument("--tensor-parallel", type=int, default=1, metavar="N", help="degree (default 1)")
    parser.add_argument("--data-parallel", type=int, default=1, metavar="N", help="degree (default 1)")
    parser.add_argument("--zero-1", action="store_true", help="divide the optimizer's state over data-parallel ranks")
    parser.add_argument("-q", "--quiet", action="store_true", help="no progress bar")


def run(args: argparse.Namespace) -> int:
    from neuron_accel.checkpoint.consolidate import checkpoint_folder
    from neuron_accel.checkpoint.reshard import reshard
    from neuron_accel.engine.errors import ConfigurationError

    if args.tensor_parallel < 1 or args.data_parallel < 1:
        raise ConfigurationError("Degrees are at least 1.", where="--tensor-parallel, --data-parallel")
    folder = checkpoint_folder(args.checkpoint_dir)
    with Bar(sys.stderr, hidden=args.quiet) as bar:
        reshard(
            folder,
            args.output_dir,
            tensor_parallel=args.tensor_parallel,
            data_parallel=args.data_parallel,
            layouts=layouts_of(folder, args.tensor_parallel),
            divide_optimizer=args.zero_1,
            progress=bar.show,
        )
    print(f"{args.output_dir}: tp {args.tensor_parallel} x dp {args.data_parallel}")
    return 0


def layouts_of(folder: Path, degree: int) -> dict:
    """How tensor parallelism lays out the model whose configuration lies in ``folder``, by FQN. The model is built
    without memory for its weights.

    Raises:
        ConfigurationError: if there is no configuration to build it from.
    """
    from neuron_accel.engine.errors import ConfigurationError

    if degree == 1:
        return {}
    if not (folder / "config.json").is_file():
        raise ConfigurationError(
            "There is no config.json beside the checkpoint.",
            where=str(folder),
            why="only the model's configuration says which dims heads and features lie in",
            fix="load the checkpoint on the new mesh and save it there",
        )
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    from neuron_accel.models.architecture import architecture_of, join
    from neuron_accel.strategies.tensor_parallel.division import divide

    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder))
    return {
        join(division.fqn, name): layout
        for division in divide(architecture_of(model), degree)
        for name, layout in division.layouts.items()
        if layout.cuts
    }
