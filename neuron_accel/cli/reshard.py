# SPDX-License-Identifier: Apache-2.0
"""``neuron-accel reshard``: shards a checkpoint for another mesh."""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

from neuron_accel.cli.parser import add_former_name
from neuron_accel.terminal import Bar, show

if TYPE_CHECKING:
    from torch import nn

    from neuron_accel.engine.sharding.layout import Layout
    from neuron_accel.storage import Location

DESCRIPTION = """\
Write a checkpoint as the ranks of another mesh would have saved it, so that each rank reads only its own files. This
is optional, since a checkpoint can be loaded on any mesh. Needs no accelerator and a few megabytes of memory.

Tensor and pipeline parallelism need the model's config.json in the checkpoint, which `save_state` writes for models of
transformers: it determines how the model is sharded. Other models cannot be resharded along these axes.
"""
EXAMPLES = """\
examples:
  neuron-accel reshard --tensor-parallel-size 8 checkpoint checkpoint-tp8
  neuron-accel reshard --tensor-parallel-size 4 --data-parallel-size 8 --zero-1 checkpoint checkpoint-tp4-dp8
  neuron-accel reshard --pipeline-parallel-size 4 --tensor-parallel-size 8 checkpoint checkpoint-pp4-tp8
  neuron-accel reshard checkpoint full                   unsharded: one file of weights, one of optimizer state
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("checkpoint_dir", help="the checkpoint, or its tensor_parallel_shards folder; a folder or URL")
    parser.add_argument("output_dir", help="an empty folder or URL; created if it does not exist")
    parser.add_argument(
        "--tensor-parallel-size",
        type=int,
        default=1,
        metavar="N",
        help="tensor-parallel degree; needs config.json in the checkpoint (default: 1)",
    )
    parser.add_argument(
        "--pipeline-parallel-size",
        type=int,
        default=1,
        metavar="N",
        help="pipeline-parallel degree; likewise (default: 1)",
    )
    parser.add_argument(
        "--virtual-stages", type=int, default=1, metavar="N", help="pipeline stages of each rank (default: 1)"
    )
    parser.add_argument(
        "--data-parallel-size", type=int, default=1, metavar="N", help="data-parallel degree (default: 1)"
    )
    for kind in ("tensor", "pipeline", "data"):
        add_former_name(parser, f"--{kind}-parallel", f"--{kind}-parallel-size")
    parser.add_argument("--zero-1", action="store_true", help="shard the optimizer's state over data-parallel ranks")
    parser.add_argument("-q", "--quiet", action="store_true", help="no progress bar")


def run(args: argparse.Namespace) -> int:
    from neuron_accel.checkpoint.tools.consolidate import checkpoint_folder
    from neuron_accel.checkpoint.tools.reshard import Sharding, reshard
    from neuron_accel.engine.plan.mesh import AxisKind, AxisSpec, Mesh
    from neuron_accel.errors import ConfigurationError
    from neuron_accel.storage import location

    tp, pp, dp = args.tensor_parallel_size, args.pipeline_parallel_size, args.data_parallel_size
    if min(tp, pp, dp, args.virtual_stages) < 1:
        raise ConfigurationError(
            "Degrees are at least 1.",
            where="--tensor-parallel-size, --pipeline-parallel-size, --virtual-stages, --data-parallel-size",
        )
    folder = checkpoint_folder(location(args.checkpoint_dir))
    model = None if tp == pp == 1 else model_of(folder)
    axes = [
        AxisSpec(name="pp", degree=pp, kind=AxisKind.STAGE),
        AxisSpec(name="dp", degree=dp, kind=AxisKind.DATA),
        AxisSpec(name="tp", degree=tp, kind=AxisKind.MODEL),
    ]
    sharding = Sharding(
        mesh=Mesh.build(axes, tp * pp * dp),
        layouts={} if model is None or tp == 1 else layouts_of(model, tp),
        stages={} if model is None or pp == 1 else stages_of(model, pp, args.virtual_stages),
        shard_optimizer=args.zero_1,
    )
    with Bar(sys.stderr, hidden=args.quiet) as bar:
        reshard(folder, location(args.output_dir), sharding, progress=bar.show)
    show(f"{args.output_dir}: pp {pp} x dp {dp} x tp {tp}")
    return 0


def model_of(folder: Location) -> nn.Module:
    """The model of the configuration in ``folder``, on the meta device.

    Raises:
        ConfigurationError: if there is no configuration to build it from.
    """
    from neuron_accel.errors import ConfigurationError

    if not (folder / "config.json").is_file():
        raise ConfigurationError(
            "The checkpoint contains no config.json.",
            where=str(folder),
            why="the model's configuration determines how parameters are sharded and which layers form a stage",
            fix="load the checkpoint on the new mesh and save it there",
        )
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    with tempfile.TemporaryDirectory() as copy:
        Path(copy, "config.json").write_bytes((folder / "config.json").read_bytes())
        config = AutoConfig.from_pretrained(copy)
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(config)


def layouts_of(model: nn.Module, degree: int) -> dict[str, Layout]:
    """The layouts of the parameters that tensor parallelism shards, by FQN."""
    from neuron_accel.models.architecture import Architecture, join_fqn
    from neuron_accel.strategies.tensor_parallel.shard_plan import plan_shards

    return {
        join_fqn(sharding.fqn, name): layout
        for sharding in plan_shards(Architecture.of(model), degree)
        for name, layout in sharding.layouts.items()
        if layout.cuts
    }


def stages_of(model: nn.Module, degree: int, virtual_stages: int) -> dict[str, int]:
    """The position along the pipeline of the rank that holds each parameter and buffer, by FQN."""
    from neuron_accel.strategies.pipeline.cuts import cut

    stack, starts = cut(model, degree * virtual_stages, None)
    stage_of = dict(stack.stages_of(starts))
    result = {}
    for name in model.state_dict():
        part = name
        while part and part not in stage_of:
            part = part.rpartition(".")[0]
        result[name] = stage_of.get(part, 0) % degree
    return result
