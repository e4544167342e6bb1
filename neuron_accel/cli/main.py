# SPDX-License-Identifier: Apache-2.0
"""Entry point of ``neuron-accel``: runs a command, and prints errors of this library without a traceback."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence

from neuron_accel import __version__
from neuron_accel.cli import (
    cache,
    calibrate,
    chaos,
    consolidate,
    env,
    inspect,
    launch,
    new_plugin,
    plan,
    plugins,
    precompile,
    report,
    reshard,
    schedule,
    smoke_test,
    trace,
    verify,
)
from neuron_accel.cli.parser import Parser, no_command
from neuron_accel.cli.terminal import show
from neuron_accel.errors import NeuronAccelError

COMMANDS = {
    "launch": launch,
    "env": env,
    "plan": plan,
    "calibrate": calibrate,
    "plugins": plugins,
    "new-plugin": new_plugin,
    "precompile": precompile,
    "cache": cache,
    "schedule": schedule,
    "report": report,
    "trace": trace,
    "test": smoke_test,
    "consolidate": consolidate,
    "reshard": reshard,
    "inspect": inspect,
    "verify": verify,
    "chaos": chaos,
}

EPILOG = """\
examples:
  neuron-accel launch --nproc-per-node 4 train.py --epochs 3    train on four ranks of this machine
  neuron-accel plan --model some/folder --world-size 64 ...     count memory and traffic, without hardware
  neuron-accel test                                             check this installation
  neuron-accel env                                              print versions and settings for a bug report
  neuron-accel plugins                                          list the installed strategies
  neuron-accel new-plugin stripes                               create a package with a strategy of your own
  neuron-accel report run_report                                show what a run did, as a page for a browser
  neuron-accel schedule --pipeline-parallel-size 4              draw a pipeline schedule
"""


def build_parser() -> argparse.ArgumentParser:
    parser = Parser(
        prog="neuron-accel",
        description="Launch, inspect and check sharded training with neuron_accel.",
        epilog=EPILOG,
    )
    parser.add_argument("--version", action="version", version=f"neuron-accel {__version__}")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    for name, module in COMMANDS.items():
        command = commands.add_parser(name, help=module.SUMMARY, description=module.DESCRIPTION, epilog=module.EXAMPLES)
        module.add_arguments(command)
        command.set_defaults(run=module.run)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command line.

    Args:
        argv: the words of the command line; None: ``sys.argv[1:]``.

    Returns:
        the exit code: 0 for success, 1 if a check failed, 2 for wrong usage or an error of this library, 128 + n if
        ended by signal n. ``launch`` returns the exit code of the rank that failed first.
    """
    words = sys.argv[1:] if argv is None else list(argv)
    parser = build_parser()
    if not words:
        parser.print_help(sys.stderr)
        return 2
    if not words[0].startswith("-") and words[0] not in COMMANDS:
        parser.error(no_command(words[0], COMMANDS))
    args = parser.parse_args(words)
    if args.command in chaos.TOOLS:
        chaos.install_faults(os.environ)
    try:
        return args.run(args)
    except NeuronAccelError as error:
        show(f"neuron-accel: error: {error}", sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:  # the reader has closed the pipe, as in `neuron-accel env | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141


if __name__ == "__main__":
    sys.exit(main())
