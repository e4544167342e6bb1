# SPDX-License-Identifier: Apache-2.0
"""What to launch: one dataclass, whose fields are the options of ``neuron-accel launch``, and what they must fulfil."""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, fields
from typing import Any

from neuron_accel.errors import ConfigurationError
from neuron_accel.neuron.cache import CompileCache

AUTO = "auto"
DEFAULT_MASTER_PORT = 29500
HEARTBEAT_SECONDS = 30.0
"""After this time without a sign a machine is considered lost, unless ``--heartbeat`` says otherwise."""
STATIC, DYNAMIC = "static", "c10d"
"""torch's rendezvous of a fixed number of numbered machines, and that of machines that come and go."""
GROUPS = ("ranks", "Trainium", "output")
"""Headings of the options in the help."""


# ---- options ---------------------------------------------------------------------------------------------------------
@dataclass(frozen=True)
class Option:
    """How a field is given on the command line.

    Args:
        help: what it is.
        group: its heading in the help; empty: none.
        is_same: whether it is the same on all machines, so that a batch file names it.
        argument: further arguments of ``add_argument``.
    """

    help: str
    group: str
    is_same: bool
    argument: dict[str, Any]


def _option(default: Any, help: str, *, group: str = "", is_same: bool = True, **argument: Any) -> Any:
    return field(default=default, metadata={"option": Option(help, group, is_same, argument)})


def _count(text: str) -> int | str:
    if text == AUTO:
        return text
    try:
        return int(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is neither a number nor {AUTO!r}") from None


@dataclass(frozen=True, kw_only=True)
class LaunchRequest:
    """The options of ``neuron-accel launch``, the script, and what was found out about the machines.

    Args:
        target: the script, or a module.
        arguments: its arguments.
        as_many_as_possible: whether each core has a rank, ``--nproc-per-node auto``.
        nnodes, min_nnodes: the largest and the smallest number of machines.
        found: the scheduler in whose variables the machines were found; empty if options define them.
        alone: the scheduler of which this machine is a member if the number of machines is not known.
    """

    target: str
    arguments: tuple[str, ...] = ()
    as_many_as_possible: bool = False
    min_nnodes: int | None = None
    found: str = ""
    alone: str = ""
    nproc_per_node: int = _option(
        1,
        "ranks on this machine, or auto: one per accelerator core, else one per CPU core (default: 1)",
        group="ranks",
        type=_count,
        metavar="N",
    )
    nnodes: int = _option(
        1,
        "number of machines (default: detected, else 1), or the smallest and the largest: the run then continues "
        "without machines that are lost, and with those that come",
        group="ranks",
        is_same=False,
        metavar="N|MIN:MAX",
    )
    node_rank: int = _option(
        0,
        "index of this machine, from 0 (default: detected)",
        group="ranks",
        is_same=False,
        type=int,
        metavar="R",
    )
    master_addr: str | None = _option(
        None, "address of machine 0 (default: detected)", group="ranks", is_same=False, metavar="A"
    )
    master_port: int | None = _option(
        None,
        "port of the rendezvous on machine 0 (default: a free port on one machine, 29500 on several)",
        group="ranks",
        is_same=False,
        type=int,
        metavar="P",
    )
    socket_interface: str | None = _option(
        None,
        "network interface for the rendezvous of several machines, such as eth0 (default: detected)",
        group="ranks",
        metavar="NAME",
    )
    rdzv_backend: str | None = _option(
        None,
        f"torch's rendezvous (default: {STATIC}; {DYNAMIC} with MIN:MAX or --rdzv-endpoint)",
        group="ranks",
        metavar="NAME",
    )
    rdzv_endpoint: str | None = _option(
        None, "its address (default: --master-addr and --master-port)", group="ranks", metavar="HOST:PORT"
    )
    rdzv_id: str = _option("neuron_accel", "name of the run, the same on all machines", group="ranks", metavar="ID")
    rdzv_conf: str = _option("", "further settings of torch's rendezvous", group="ranks", metavar="K=V,...")
    heartbeat: float | None = _option(
        None,
        "consider a machine lost after SECONDS without a sign of it (default: 30; 0: never)",
        group="ranks",
        type=float,
        metavar="SECONDS",
    )
    max_restarts: int = _option(
        0, "restart all ranks at most N times (default: 0)", group="ranks", type=int, metavar="N"
    )
    cpu: bool = _option(False, "train on the CPU even if there are accelerators")
    instance: str | None = _option(
        None, "instance type, such as trn1.32xlarge (default: detected)", group="Trainium", metavar="TYPE"
    )
    lnc: int | None = _option(
        None,
        "physical cores per logical core (trn2, trn3; default: 2)",
        group="Trainium",
        type=int,
        choices=(1, 2),
    )
    cache_dir: str | None = _option(
        None,
        "the compile cache: a folder, in which {host} is replaced by this machine's name, or s3://bucket/prefix",
        group="Trainium",
        metavar="PATH",
    )
    retry_failed_compilation: bool = _option(False, "retry cached failures", group="Trainium")
    compiler_flags: str = _option("", "compiler flags, added to NEURON_CC_FLAGS", group="Trainium", metavar="TEXT")
    tee: bool = _option(False, "show every rank's output, prefixed with the rank", group="output")
    log_dir: str | None = _option(
        None, "keep every rank's output in DIR/rank_N/{stdout,stderr}.log", group="output", metavar="DIR"
    )
    quiet: bool = _option(False, "do not print the launch settings", group="output")
    grace: float = _option(
        30.0, "time from a signal until ranks are killed (default: 30)", type=float, metavar="SECONDS"
    )
    module: bool = _option(False, "the script is a module name")

    @property
    def cache(self) -> CompileCache:
        """The compile cache."""
        return CompileCache(location=self.cache_dir, retry_failed_compilation=self.retry_failed_compilation)

    @property
    def rendezvous(self) -> str:
        """torch's rendezvous of several machines: a static one unless options need another."""
        if self.rdzv_backend is not None:
            return self.rdzv_backend
        return STATIC if self.min_nnodes in (None, self.nnodes) and self.rdzv_endpoint is None else DYNAMIC

    def words(self) -> list[str]:
        """The options and the script as words of a command line, without options that differ between machines."""
        words = []
        for name, option, default in options():
            value = getattr(self, name)
            if name == "nproc_per_node" and self.as_many_as_possible:
                value = AUTO
            if option.is_same and value != default:
                words.append(spelt(name) if value is True else f"{spelt(name)}={_text(value)}")
        return [*words, self.target, *self.arguments]


def _text(value: Any) -> str:
    return f"{value:g}" if isinstance(value, float) else str(value)


def options() -> Iterator[tuple[str, Option, Any]]:
    """Yields name, option and default of the fields that are options."""
    for each in fields(LaunchRequest):
        if "option" in each.metadata:
            yield each.name, each.metadata["option"], each.default


def spelt(name: str) -> str:
    """Returns the option of a field."""
    return "--" + name.replace("_", "-")


def rendezvous_settings(text: str) -> dict[str, str]:
    """Returns the settings of ``--rdzv-conf``.

    Raises:
        ConfigurationError: if it is not a list of settings.
    """
    pairs = [(name.strip(), value.strip()) for name, _, value in (p.partition("=") for p in text.split(",") if text)]
    if not all(name and value for name, value in pairs):
        raise ConfigurationError(
            f"--rdzv-conf {text} is not a list of settings.", where="--rdzv-conf", fix="pass name=value,name=value"
        )
    return dict(pairs)


# ---- what options must fulfil ----------------------------------------------------------------------------------------
@dataclass(frozen=True)
class Rule:
    """A request that is not possible.

    Args:
        option: the option that is at fault.
        fails: whether a request is not possible.
        what, why, fix: the error, formatted with the request ``r``.
    """

    option: str
    fails: Callable[[LaunchRequest], bool]
    what: str
    fix: str
    why: str | None = None

    def apply(self, request: LaunchRequest) -> None:
        """Raises ConfigurationError if the request is not possible."""
        if self.fails(request):
            texts = {name: (getattr(self, name) or "").format(r=request) for name in ("what", "why", "fix")}
            raise ConfigurationError(texts["what"], where=self.option, why=texts["why"] or None, fix=texts["fix"])


def _is_blank(text: str | None) -> bool:
    return text is not None and not text.strip()


RULES = (
    Rule(
        "--nproc-per-node",
        lambda r: r.nproc_per_node < 1,
        "--nproc-per-node is {r.nproc_per_node}; expected at least 1.",
        "pass the number of ranks on this machine, at most one per accelerator core",
    ),
    Rule(
        "--nnodes",
        lambda r: r.min_nnodes is None and r.nnodes < 1,
        "--nnodes is {r.nnodes}; expected at least 1.",
        "pass the number of machines, or the smallest and the largest, such as 2:4",
    ),
    Rule(
        "--nnodes",
        lambda r: r.min_nnodes is not None and not 1 <= r.min_nnodes <= r.nnodes,
        "--nnodes {r.min_nnodes}:{r.nnodes} is not possible.",
        "pass the number of machines, or the smallest and the largest, such as 2:4",
    ),
    Rule(
        "--rdzv-backend",
        lambda r: r.rendezvous == STATIC and r.min_nnodes not in (None, r.nnodes),
        f"--nnodes {{r.min_nnodes}}:{{r.nnodes}} needs another --rdzv-backend than {STATIC}.",
        f"leave it out, for {DYNAMIC}, or pass one number of machines",
        "a static rendezvous has a fixed number of machines",
    ),
    Rule(
        "--node-rank",
        lambda r: r.rendezvous == STATIC and not 0 <= r.node_rank < r.nnodes,
        "--node-rank is {r.node_rank}, but there are {r.nnodes} machines.",
        "pass a number from 0 to below that, a different one on every machine",
        "machines are numbered from 0",
    ),
    Rule(
        "--master-addr",
        lambda r: r.nnodes > 1 and not r.master_addr and not r.rdzv_endpoint,
        "{r.nnodes} machines need the address of machine 0.",
        "pass its address, the same on all machines, or --rdzv-endpoint",
        "the rendezvous of all ranks is on machine 0",
    ),
    Rule(
        "--socket-interface",
        lambda r: _is_blank(r.socket_interface),
        "--socket-interface is empty.",
        "pass an interface, such as eth0, or leave it out",
        "it is the network interface for the ranks of several machines",
    ),
    Rule(
        "--socket-interface",
        lambda r: r.socket_interface is not None and r.nnodes == 1,
        "--socket-interface {r.socket_interface} has no effect on one machine.",
        "pass it together with --nnodes, or leave it out",
        "it is the network interface for the ranks of several machines",
    ),
    Rule(
        "--master-port",
        lambda r: r.master_port is not None and not 0 < r.master_port < 65536,
        "{r.master_port} is not a port.",
        "pass a number from 1 to 65535, or leave it out on one machine to use a free port",
    ),
    Rule(
        "--max-restarts",
        lambda r: r.max_restarts < 0,
        "--max-restarts is {r.max_restarts}; expected at least 0.",
        "pass 0 or more",
    ),
    Rule(
        "--heartbeat",
        lambda r: r.heartbeat is not None and not (r.heartbeat == 0 or 3 <= r.heartbeat < math.inf),
        "--heartbeat is {r.heartbeat:g}; expected at least 3 seconds, or 0.",
        "pass 3 or more seconds, or 0 to disable the check",
        "machines give a sign every second",
    ),
    Rule(
        "--grace",
        lambda r: not 0 <= r.grace < math.inf,
        "--grace is {r.grace:g}; expected a finite number of at least 0 seconds.",
        "pass 0 or more",
    ),
)
"""Requests that are not possible on any machine, in the order in which they are looked for."""
