# SPDX-License-Identifier: Apache-2.0
"""``neuron-accel test``: checks that this installation trains correctly on several ranks."""

from __future__ import annotations

import argparse
import json
import math
import tempfile
import time
from pathlib import Path

from neuron_accel.cli.launch import launch, prepare
from neuron_accel.errors import ConfigurationError
from neuron_accel.launch.request import LaunchRequest

DESCRIPTION = """\
Launch ranks, compare every collective with its definition, and train tiny models for three steps, comparing
losses, gradients and weights with a plain loop in one process. A Llama under tensor and sequence parallelism
is among them if transformers is installed and the number of ranks is even.
"""
EXAMPLES = """\
examples:
  neuron-accel test                            two ranks, on accelerators if there are any, else on the CPU
  neuron-accel test --nproc-per-node 4 --cpu   four ranks on the CPU
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--nproc-per-node", "--nproc_per_node", type=int, default=2, metavar="N", help="ranks (default: 2)"
    )
    parser.add_argument("--cpu", action="store_true", help="use the CPU even if there are accelerators")
    parser.add_argument(
        "--timeout", type=float, default=120.0, metavar="SECONDS", help="time limit of the test (default: 120)"
    )


def run(args: argparse.Namespace) -> int:
    if not 0 < args.timeout < math.inf:
        raise ConfigurationError(
            f"The time limit is {args.timeout:g} seconds.", where="--timeout", fix="pass a finite number above 0"
        )
    start = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="neuron_accel_") as folder:
        result_file = Path(folder, "result.json")
        request = LaunchRequest(
            target="neuron_accel.cli.smoke",
            arguments=(str(result_file), str(args.timeout)),
            module=True,
            nproc_per_node=args.nproc_per_node,
            cpu=args.cpu,
        )
        code = launch(prepare(request))
        if code != 0:
            return code
        result = json.loads(result_file.read_text())
    failed = len(result["failed"])
    print(
        f"{result['passed']} passed, {failed} failed on {args.nproc_per_node} ranks in {time.monotonic() - start:.0f} s"
    )
    return 1 if failed else 0
