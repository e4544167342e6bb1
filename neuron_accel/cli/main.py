# SPDX-License-Identifier: Apache-2.0
"""Entry point of ``neuron-accel``: runs a command, and prints errors of this library without a traceback."""

from __future__ import annotations

import argparse
import importlib
import os
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from neuron_accel import __version__
from neuron_accel.cli.parser import Parser, no_command
from neuron_accel.doors import COMMANDS as GROUP
from neuron_accel.doors import PACKAGES, SUMMARIES, entry_points, how_to_install, offered_by
from neuron_accel.errors import NeuronAccelError, PluginError
from neuron_accel.terminal import show

COMMANDS = {
    "launch": ("neuron_accel.cli.launch", "start a training script on several ranks"),
    "env": ("neuron_accel.cli.env", "show versions, hardware and settings, for bug reports"),
    "plugins": ("neuron_accel.cli.plugins", "list the installed strategies"),
    "new-plugin": ("neuron_accel.cli.new_plugin", "create a package with a strategy plugin"),
    "precompile": ("neuron_accel.cli.precompile", "compile the graphs of a training run ahead of time"),
    "cache": ("neuron_accel.cli.cache", "list the compile cache, and evict entries"),
    "test": ("neuron_accel.cli.smoke_test", "check this installation: a ladder from the device to the Trainer"),
    "consolidate": ("neuron_accel.cli.consolidate", "turn a sharded checkpoint into a standard model folder"),
    "inspect": ("neuron_accel.cli.inspect", "show the contents of a checkpoint"),
    "verify": ("neuron_accel.cli.verify", "check that a checkpoint is complete and undamaged"),
}
"""The module of each command, which is imported when the command is called, and what it does. Commands of other
distributions are entry points."""

FORMER = {
    "reshard": "load_state loads a checkpoint on any mesh as it is; `neuron-accel consolidate` writes the full model",
}
"""Commands that there are no more, and what to do instead."""

EPILOG = """\
examples:
  neuron-accel launch --nproc-per-node 4 train.py --epochs 3    train on four ranks of this machine
  neuron-accel test                                             check this installation
  neuron-accel env                                              print versions and settings for a bug report
  neuron-accel plugins                                          list the installed strategies
  neuron-accel new-plugin stripes                               create a package with a strategy of your own
"""


class _Command(Parser):
    """The parser of a command, whose module is imported when the command is called."""

    module = ""

    def parse_known_args(self, args: Sequence[str] | None = None, namespace: Any = None) -> Any:  # type: ignore[override]
        self.load()
        return super().parse_known_args(args, namespace)

    def load(self) -> None:
        """Adds the arguments of the command.

        Raises:
            PluginError: if the module of another distribution cannot be imported.
        """
        name, self.module = self.module, ""
        if not name:
            return
        try:
            module = importlib.import_module(name)
        except Exception as error:
            if name.startswith("neuron_accel."):
                raise
            raise PluginError(
                f"The command {self.prog.split()[-1]!r} cannot be imported.",
                where=name,
                why=f"{type(error).__name__}: {error}",
                fix="install its distribution again, or report it to its authors",
            ) from error
        self.description, self.epilog = module.DESCRIPTION, module.EXAMPLES
        module.add_arguments(self)
        self.set_defaults(run=module.run)


def commands() -> dict[str, tuple[str, str]]:
    """Returns the module of each installed command, and what it does. Imports none."""
    found = dict(COMMANDS)
    for point in sorted(entry_points(GROUP), key=lambda point: point.name):
        about = point.dist.metadata if point.dist else {"Name": point.value, "Summary": ""}
        does = SUMMARIES.get(point.name, about["Summary"])
        found.setdefault(point.name, (point.value, f"{does} ({about['Name']})"))
    return found


def build_parser(known: Mapping[str, tuple[str, str]] | None = None) -> argparse.ArgumentParser:
    """Returns the parser of the command line, for all commands or for those that are ``known``, with the module of each
    and what it does."""
    known = commands() if known is None else known
    missing = [
        f"{', '.join(names)} ({package})"
        for package, offers in PACKAGES.items()
        if (names := [name for name in offers.get(GROUP, ()) if name not in known])
    ]
    elsewhere = f"in packages that are not installed: {'; '.join(missing)}\n\n" if missing else ""
    parser = Parser(
        prog="neuron-accel",
        description="Launch, inspect and check sharded training with neuron_accel.",
        epilog=elsewhere + EPILOG,
    )
    parser.add_argument("--version", action="version", version=f"neuron-accel {__version__}")
    listing = parser.add_subparsers(dest="command", metavar="COMMAND", required=True, parser_class=_Command)
    for name, (module, does) in known.items():
        listing.add_parser(name, help=does).module = module
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
    known = COMMANDS if words and words[0] in COMMANDS else commands()
    parser = build_parser(known)
    if not words:
        parser.print_help(sys.stderr)
        return 2
    if not words[0].startswith("-") and words[0] not in known:
        package = offered_by(GROUP, words[0])
        missing = f"the command {words[0]!r} is in a package of its own: {how_to_install(package or '')}"
        former = f"the command {words[0]!r} was removed: {FORMER.get(words[0])}"
        parser.error(missing if package else former if words[0] in FORMER else no_command(words[0], known))
    try:
        args = parser.parse_args(words)
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
