"""``neuron-accel launch``: starts a training script on several ranks."""

from __future__ import annotations

import argparse
import errno
import os
import shlex
import socket
import sys
from typing import Any

from neuron_accel.backends.select import Machine, choose
from neuron_accel.cli.failures import describe, first_failure, signal_name
from neuron_accel.cli.host import Host, count_cores, find_loopback
from neuron_accel.cli.launch_plan import LaunchPlan, LaunchRequest, check_request, plan_launch
from neuron_accel.engine.errors import ConfigurationError

SUMMARY = "start a training script on several ranks"
DESCRIPTION = """\
Start a training script on several ranks, with torchrun's machinery underneath.

The exit code is that of the rank that failed first (128 + n if signal n ended it). SIGINT and SIGTERM
are passed on to the ranks, and no rank outlives the launcher.
"""
EXAMPLES = """\
examples:
  four ranks on this machine, on its accelerators if it has any, else on the CPU:
    neuron-accel launch --nproc-per-node 4 train.py --epochs 3
  the same on the CPU in any case, with the output of every rank shown and kept:
    neuron-accel launch --nproc-per-node 4 --cpu --tee --log-dir logs train.py
  what would be run, and with which environment:
    neuron-accel launch --nproc-per-node 4 --dry-run train.py
  a module instead of a file:
    neuron-accel launch --nproc-per-node 2 --module my_package.train
  two machines; run it on both, with --node-rank 1 on the second:
    neuron-accel launch --nnodes 2 --node-rank 0 --master-addr 10.0.0.1 --nproc-per-node 32 train.py
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    ranks = parser.add_argument_group("ranks")
    _option(ranks, "--nproc-per-node", type=int, default=1, metavar="N", help="ranks on this machine (default: 1)")
    _option(ranks, "--nnodes", type=int, default=1, metavar="N", help="number of machines (default: 1)")
    _option(ranks, "--node-rank", type=int, default=0, metavar="R", help="which machine this is, from 0 (default: 0)")
    _option(ranks, "--master-addr", metavar="A", help="address of machine 0 (default: this machine)")
    _option(
        ranks,
        "--master-port",
        type=int,
        metavar="P",
        help="port of machine 0 to meet at (default: a free one on one machine, 29500 on several)",
    )
    _option(ranks, "--max-restarts", type=int, default=0, metavar="N", help="restart all ranks so often (default: 0)")
    parser.add_argument("--cpu", action="store_true", help="train on the CPU even if there are accelerators")
    output = parser.add_argument_group("output")
    output.add_argument("--tee", action="store_true", help="show every rank's output, each line with its rank in front")
    _option(output, "--log-dir", metavar="DIR", help="keep every rank's output in DIR/rank_N/{stdout,stderr}.log")
    output.add_argument("--quiet", action="store_true", help="do not print what is launched")
    _option(
        parser,
        "--grace",
        type=float,
        default=30.0,
        metavar="SECONDS",
        help="time between a signal to end and killing ranks that have not (default: 30)",
    )
    _option(parser, "--dry-run", action="store_true", help="print what would be launched, and do nothing")
    parser.add_argument("--module", "-m", action="store_true", help="the script is the name of a module")
    parser.add_argument("script", help="the training script")
    parser.add_argument("script_args", nargs=argparse.REMAINDER, metavar="...", help="its arguments")


def _option(parser: argparse._ActionsContainer, name: str, **kwargs: Any) -> None:
    """Adds an option that may also be spelt with underscores, as torchrun's are."""
    parser.add_argument(name, "--" + name[2:].replace("-", "_"), **kwargs)


def run(args: argparse.Namespace) -> int:
    request = LaunchRequest(
        target=args.script,
        arguments=tuple(args.script_args),
        module=args.module,
        nproc_per_node=args.nproc_per_node,
        nnodes=args.nnodes,
        node_rank=args.node_rank,
        master_addr=args.master_addr,
        master_port=args.master_port,
        cpu=args.cpu,
        tee=args.tee,
        log_dir=args.log_dir,
        grace=args.grace,
        max_restarts=args.max_restarts,
    )
    plan = prepare(request)
    if args.dry_run:
        print(f"{plan.explain()}\neach rank runs:\n  {shlex.join([sys.executable, *plan.command('LAUNCHER_PID')])}")
        return 0
    return launch(plan, quiet=args.quiet)


def prepare(request: LaunchRequest) -> LaunchPlan:
    """Decides how to launch on this machine, in this environment.

    Raises:
        ConfigurationError: the request cannot be launched.
    """
    check_request(request)  # before torch is imported, so that a wrong path is answered at once
    probes = Machine()
    decision = choose(None, os.environ, probes, cpu=request.cpu)
    host = Host(cores=count_cores(), loopback=find_loopback(), torch_xla=probes.torch_xla)
    return plan_launch(request, host, decision, os.environ)


def launch(plan: LaunchPlan, *, quiet: bool = False) -> int:
    """Runs the ranks of this machine and returns the exit code for the shell.

    Raises:
        ConfigurationError: the port asked for is taken.
        CommunicationError: the machines of the launch did not find each other.
    """
    _check_port(plan)
    from neuron_accel.cli.elastic import run_ranks

    if not quiet:
        _say(plan.explain())
    outcome = run_ranks(plan)
    if outcome.signal is not None:
        _say(f"ended by {signal_name(outcome.signal)}")
        return 128 + outcome.signal
    if outcome.failures:
        _say(describe(outcome.failures))
        return first_failure(outcome.failures).shell_code
    return 0


def _check_port(plan: LaunchPlan) -> None:
    """Machine 0 will listen on the port: better to hear now that something else does."""
    if not plan.is_static or plan.request.node_rank != 0:
        return
    _, _, port = plan.endpoint.rpartition(":")
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("", int(port)))
        except OSError as error:
            if error.errno not in (errno.EADDRINUSE, errno.EACCES):
                raise
            raise ConfigurationError(
                f"Port {port} of this machine cannot be used: {os.strerror(error.errno)}.",
                where="--master-port",
                why="The ranks meet there.",
                fix="Give another port"
                + ("." if plan.request.nnodes > 1 else ", or none: on one machine a free one is taken."),
            ) from error


def _say(text: str) -> None:
    print(f"neuron-accel: {text}", file=sys.stderr, flush=True)
