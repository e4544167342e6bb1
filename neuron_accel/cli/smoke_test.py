# SPDX-License-Identifier: Apache-2.0
"""``neuron-accel test``: a ladder of checks, from opening the device to the Trainer."""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import tempfile
import time
from pathlib import Path
from typing import Any

from neuron_accel.cli.launch import launch, prepare
from neuron_accel.errors import ConfigurationError, did_you_mean
from neuron_accel.launch.request import LaunchRequest
from neuron_accel.terminal import show

RESULT_FILE = "neuron-accel-test.json"
RUNGS = {
    "device": "the device opens, and values go there and back",
    "operation": "one operation gives what the CPU gives",
    "all-reduce": "ranks can sum",
    "all-gather": "ranks can gather",
    "reduce-scatter": "ranks can sum and keep a chunk each",
    "all-to-all": "ranks can exchange chunks",
    "permute": "ranks can send around a ring",
    "broadcast": "one rank can send to all",
    "objects": "ranks can exchange Python objects",
    "graph": "all ranks record one graph for a step",
    "data-parallel": "training equals that of one process",
    "zero1": "so it does with the optimizer sharded",
    "tp": "so it does for a Llama with tensor parallelism",
    "tp-sp": "and with sequence parallelism",
    "pp": "and as a pipeline",
    "fully-sharded": "so it does with everything sharded",
    "checkpoint": "what is saved is loaded and consolidated exactly",
    "trainer": "the Trainer trains like one process",
}
"""What each rung proves, in the order in which they are tried."""
QUICK = list(RUNGS)[: list(RUNGS).index("data-parallel") + 1]

DESCRIPTION = f"""\
Launch ranks and climb a ladder of checks, each of which relies on those before it, and stop at the first that fails:
{", ".join(RUNGS)}.

Trainings of tiny models are compared with a plain loop in one process on the CPU; what was measured is shown beside
what is allowed for the device. A rung has two minutes (times NEURON_ACCEL_TIMEOUT_FACTOR), in which the time of the
compiler is not counted. The results are also written to {RESULT_FILE} in the current folder, to be sent with a report.
"""
EXAMPLES = """\
examples:
  neuron-accel test                            two ranks, on accelerators if there are any, else on the CPU
  neuron-accel test --nproc-per-node 4 --cpu   four ranks on the CPU
  neuron-accel test --quick                    without the trainings that take longest to compile
  neuron-accel test --from tp                  go on where it failed
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--nproc-per-node", "--nproc_per_node", type=int, default=2, metavar="N", help="ranks (default: 2)"
    )
    parser.add_argument("--cpu", action="store_true", help="use the CPU even if there are accelerators")
    parser.add_argument("--from", dest="first", metavar="RUNG", help="begin with this rung")
    parser.add_argument("--quick", action="store_true", help=f"end with the rung {QUICK[-1]}")


def run(args: argparse.Namespace) -> int:
    names = QUICK if args.quick else list(RUNGS)
    if args.first is not None and args.first not in names:
        raise ConfigurationError(
            f"There is no rung {args.first!r}" + (" with --quick." if args.first in RUNGS else "."),
            where="--from",
            fix=did_you_mean(args.first, names),
        )
    names = names[names.index(args.first or names[0]) :]
    start = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="neuron_accel_") as folder:
        result_file = Path(folder, "result.json")
        request = LaunchRequest(
            target="neuron_accel.cli.smoke",
            arguments=(str(result_file), *names),
            module=True,
            nproc_per_node=args.nproc_per_node,
            cpu=args.cpu,
        )
        plan = prepare(request)
        code = launch(plan)
        results = json.loads(result_file.read_text()) if result_file.exists() else []
    for result in results:
        if result["status"] == "running":
            result |= {"status": "failed", "problems": [f"the ranks ended with exit code {code}"]}
    taken = f"{args.nproc_per_node} ranks in {time.monotonic() - start:.0f} s"
    passed, failed, skipped = ([one for one in results if one["status"] == s] for s in ("passed", "failed", "skipped"))
    print(f"{len(passed)} passed, {len(failed)} failed, {len(skipped)} skipped on {taken}")
    _write({"ranks": args.nproc_per_node, "device": plan.device, "reason": plan.reason, "rungs": results})
    if failed:
        rung = failed[0]["name"]
        show(f"the rung {rung!r} failed; once it is mended: neuron-accel test --from {rung}")
    return code or int(bool(failed))


def _write(results: dict[str, Any]) -> None:
    """Writes the result file, with versions and settings, if the current folder can be written."""
    from neuron_accel.cli.env import collect

    report = collect(os.environ)
    text = json.dumps({**results, **{name: report[name] for name in ("versions", "system", "environment")}}, indent=2)
    with contextlib.suppress(OSError):
        Path(RESULT_FILE).write_text(text + "\n")
        print(f"results: {RESULT_FILE}")
