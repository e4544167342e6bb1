# SPDX-License-Identifier: Apache-2.0
"""``neuron-accel launch``: starts a training script on several ranks."""

from __future__ import annotations

import argparse
import dataclasses
import errno
import os
import platform
import shlex
import signal
import socket
import sys
import tempfile
from collections.abc import Mapping
from typing import Any

from neuron_accel.backends.select import Machine, choose
from neuron_accel.cli.parser import naming_options
from neuron_accel.cli.terminal import format_command, show, table_width
from neuron_accel.errors import ConfigurationError
from neuron_accel.launch.cluster import find_machines
from neuron_accel.launch.failures import describe, first_failure, signal_name
from neuron_accel.launch.host import Host, count_cores, find_loopback, interface_towards, kernel_version, read_mounts
from neuron_accel.launch.plan import (
    DEFAULT_MASTER_PORT,
    DYNAMIC,
    HEARTBEAT_SECONDS,
    RENDEZVOUS_SECONDS,
    STATIC,
    LaunchPlan,
    LaunchRequest,
    check_request,
    most_ranks,
    plan_launch,
)
from neuron_accel.neuron.cache import HOST, CompileCache
from neuron_accel.neuron.instances import detect_instance, read_product

AUTO = "auto"

DESCRIPTION = """\
Start a training script on several ranks, with the elastic agent of torchrun.

The exit code is that of the rank that failed first (128 + n if signal n ended it). SIGINT and SIGTERM
are passed on to the ranks, and all ranks end with the launcher.

If Slurm (srun), SageMaker, MPI, or PyTorchJob or TrainJob on Kubernetes start one launcher on each machine, the number
of machines, the index of this machine and the address of machine 0 are detected. Options override the detected values;
--nnodes 1 launches on this machine only. In an Indexed Job of Kubernetes, pass --nnodes and --master-addr.
"""
EXAMPLES = """\
examples:
  four ranks on this machine, on its accelerators, or on the CPU if it has none:
    neuron-accel launch --nproc-per-node 4 train.py --epochs 3
  the same on the CPU, with the output of every rank shown and kept in files:
    neuron-accel launch --nproc-per-node 4 --cpu --tee --log-dir logs train.py
  print the command and the environment without launching:
    neuron-accel launch --nproc-per-node 4 --dry-run train.py
  a module instead of a file:
    neuron-accel launch --nproc-per-node 2 --module my_package.train
  two Trainium instances under Slurm: writes train.sbatch and, to compile first, train_compile.sbatch:
    neuron-accel launch --nnodes 2 --nproc-per-node 32 --instance trn1.32xlarge --slurm train.sbatch train.py
  the machines of a Slurm step, one task on each:
    srun --nodes 2 --ntasks-per-node 1 neuron-accel launch --nproc-per-node 32 train.py
  two machines; run this on both, with --node-rank 1 on the second:
    neuron-accel launch --nnodes 2 --node-rank 0 --master-addr 10.0.0.1 --nproc-per-node 32 train.py
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    ranks = parser.add_argument_group("ranks")
    _option(
        ranks,
        "--nproc-per-node",
        type=_count,
        default=1,
        metavar="N",
        help="ranks on this machine, or auto: one per accelerator core, else one per CPU core (default: 1)",
    )
    _option(
        ranks,
        "--nnodes",
        metavar="N|MIN:MAX",
        help="number of machines (default: detected, else 1), or the smallest and the largest: the run then continues "
        "without machines that are lost, and with those that come",
    )
    _option(ranks, "--node-rank", type=int, metavar="R", help="index of this machine, from 0 (default: detected)")
    _option(ranks, "--master-addr", metavar="A", help="address of machine 0 (default: detected)")
    _option(
        ranks,
        "--master-port",
        type=int,
        metavar="P",
        help="port of the rendezvous on machine 0 (default: a free port on one machine, 29500 on several)",
    )
    _option(
        ranks,
        "--socket-interface",
        metavar="NAME",
        help="network interface for the rendezvous of several machines, such as eth0 (default: detected)",
    )
    _option(
        ranks,
        "--rdzv-backend",
        metavar="NAME",
        help=f"torch's rendezvous (default: {STATIC}; {DYNAMIC} with MIN:MAX or --rdzv-endpoint)",
    )
    _option(
        ranks, "--rdzv-endpoint", metavar="HOST:PORT", help="its address (default: --master-addr and --master-port)"
    )
    _option(ranks, "--rdzv-id", metavar="ID", help="name of the run, the same on all machines")
    _option(ranks, "--rdzv-conf", metavar="K=V,...", help="further settings of torch's rendezvous")
    _option(
        ranks,
        "--heartbeat",
        type=float,
        metavar="SECONDS",
        help="consider a machine lost after SECONDS without a sign of it (default: 30; 0: never)",
    )
    _option(
        ranks, "--max-restarts", type=int, default=0, metavar="N", help="restart all ranks at most N times (default: 0)"
    )
    for name in GONE:
        _option(parser, name, action=_Gone, help=argparse.SUPPRESS)
    parser.add_argument("--cpu", action="store_true", help="train on the CPU even if there are accelerators")
    neuron = parser.add_argument_group("Trainium")
    _option(neuron, "--instance", metavar="TYPE", help="instance type, such as trn1.32xlarge (default: detected)")
    _option(neuron, "--lnc", type=int, choices=(1, 2), help="physical cores per logical core (trn2, trn3; default: 2)")
    _option(
        neuron,
        "--cache-dir",
        metavar="PLACE",
        help="the compile cache: a folder, in which {host} is replaced by this machine's name, or s3://bucket/prefix",
    )
    _option(neuron, "--retry-failed-compilation", action="store_true", help="retry cached failures")
    _option(neuron, "--compiler-flags", metavar="TEXT", default="", help="compiler flags, added to NEURON_CC_FLAGS")
    _option(
        neuron, "--slurm", metavar="PLACE", help="write Slurm batch files to this file or folder instead of launching"
    )
    _option(
        neuron,
        "--requeue",
        action="store_true",
        help="with --slurm: the job gets SIGTERM before its time limit, time enough for --grace, and is queued again",
    )
    _option(
        neuron,
        "--check-memory",
        action="store_true",
        help="first dry-run the script up to its second optimizer step, and warn if it does not fit a core",
    )
    output = parser.add_argument_group("output")
    output.add_argument("--tee", action="store_true", help="show every rank's output, prefixed with the rank")
    _option(output, "--log-dir", metavar="DIR", help="keep every rank's output in DIR/rank_N/{stdout,stderr}.log")
    output.add_argument("--quiet", action="store_true", help="do not print the launch settings")
    _option(
        parser,
        "--grace",
        type=float,
        default=30.0,
        metavar="SECONDS",
        help="time from a signal until ranks are killed (default: 30)",
    )
    _option(parser, "--dry-run", action="store_true", help="print the launch settings without launching")
    parser.add_argument("--module", "-m", action="store_true", help="the script is a module name")
    parser.add_argument("script", help="the training script")
    parser.add_argument("script_args", nargs=argparse.REMAINDER, metavar="...", help="its arguments")


GONE = {
    "--min-nnodes": "pass --nnodes MIN:MAX and --max-restarts, and load_state(resume='latest', keep_batch=True) in the "
    "script",
    "--min-nproc-per-node": "launch again with fewer --nproc-per-node; load_state(resume='latest', keep_batch=True) "
    "keeps the samples of a step",
    "--secret-file": "leave it out: launchers listen at no port of their own any more",
}
"""Options that there were, and what to do instead."""


class _Gone(argparse.Action):
    def __call__(self, parser: argparse.ArgumentParser, *args: Any, **kwargs: Any) -> None:
        option = self.option_strings[0]
        parser.error(f"{option} does not exist any more: {GONE[option]}")


def _count(text: str) -> int | str:
    if text == AUTO:
        return text
    try:
        return int(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is neither a number nor {AUTO!r}") from None


def _option(parser: argparse._ActionsContainer, name: str, **kwargs: Any) -> None:
    """Adds an option that can also be spelt with underscores, as those of torchrun."""
    parser.add_argument(*dict.fromkeys([name, "--" + name[2:].replace("-", "_")]), **kwargs)


def run(args: argparse.Namespace) -> int:
    machines = _machines(args, os.environ)
    request = LaunchRequest(
        target=args.script,
        arguments=tuple(args.script_args),
        module=args.module,
        nproc_per_node=1 if args.nproc_per_node == AUTO else args.nproc_per_node,
        as_many_as_possible=args.nproc_per_node == AUTO,
        **machines,
        socket_interface=args.socket_interface,
        cpu=args.cpu,
        tee=args.tee,
        log_dir=args.log_dir,
        grace=args.grace,
        max_restarts=args.max_restarts,
        instance=args.instance,
        lnc=args.lnc,
        cache=_cache(args),
        compiler_flags=args.compiler_flags,
        heartbeat=args.heartbeat,
    )
    plan = prepare(request, meets=args.slurm is None)
    if args.requeue and args.slurm is None:
        raise ConfigurationError(
            "--requeue has no effect without --slurm.",
            where="--requeue",
            why="it is a property of the job that a batch file describes",
            fix="add --slurm FILE, or leave it out",
        )
    if args.check_memory and request.node_rank == 0:
        from neuron_accel.cli.memory_check import check_memory

        _say(check_memory(plan))
    if args.slurm is not None:
        _write_batch_files(args.slurm, plan, args)
        return 0
    if args.dry_run:
        width = table_width()
        show(f"{plan.explain(width)}\neach rank runs:")
        print(format_command([sys.executable, *plan.command("LAUNCHER_PID")], width, indent="  "))
        return 0
    return launch(plan, quiet=args.quiet)


def _machines(args: argparse.Namespace, environ: Mapping[str, str]) -> dict[str, Any]:
    """The fields of a request about machines: from options, or else detected from the cluster's scheduler."""
    given = _nnodes(args.nnodes)
    for name in ("node_rank", "master_addr", "master_port", "rdzv_backend", "rdzv_endpoint", "rdzv_id"):
        given[name] = getattr(args, name)
    given["rdzv_conf"] = _pairs(args.rdzv_conf)
    given = {name: value for name, value in given.items() if value is not None}
    if given.get("nnodes") == 1 or args.slurm is not None:
        return given
    found = find_machines(environ, DEFAULT_MASTER_PORT)
    if found is None or (found.count in (None, 1) and "nnodes" not in given):
        if found is not None and found.count is None:
            return {**given, "alone": found.source}
        return given
    detected = {"nnodes": found.count, "node_rank": found.rank, "master_addr": found.address, "master_port": found.port}
    if "nnodes" not in given:
        detected |= {"min_nnodes": found.fewest, "rdzv_endpoint": found.endpoint}
    filled = {name: value for name, value in detected.items() if value is not None and name not in given}
    return {**given, **filled, "found": f"according to {found.source}" if filled else ""}


def _nnodes(text: str | None) -> dict[str, Any]:
    """The fields of ``--nnodes N`` or ``--nnodes MIN:MAX``."""
    if text is None:
        return {}
    fewest, colon, most = text.partition(":")
    try:
        return {"nnodes": int(most), "min_nnodes": int(fewest)} if colon else {"nnodes": int(fewest)}
    except ValueError:
        raise ConfigurationError(
            f"--nnodes {text} is not a number of machines.", where="--nnodes", fix="pass a number, or two: 2:4"
        ) from None


def _pairs(text: str | None) -> tuple[tuple[str, str], ...] | None:
    """The settings of ``--rdzv-conf``."""
    if not text:
        return None
    pairs = [(name.strip(), value.strip()) for name, _, value in (part.partition("=") for part in text.split(","))]
    if not all(name and value for name, value in pairs):
        raise ConfigurationError(
            f"--rdzv-conf {text} is not a list of settings.", where="--rdzv-conf", fix="pass name=value,name=value"
        )
    return tuple(pairs)


def _cache(args: argparse.Namespace) -> CompileCache:
    with naming_options({"CompileCache.location": "--cache-dir"}):
        return CompileCache(location=args.cache_dir, retry_failed_compilation=args.retry_failed_compilation)


def _write_batch_files(place: str, plan: LaunchPlan, args: argparse.Namespace) -> None:
    from neuron_accel.launch.slurm import cache_per_host, describe_batch_files, write_batch_files

    args.cache_dir = cache_per_host(args.cache_dir)
    files = describe_batch_files(place, plan, _options_of(args), args.cache_dir, requeue=args.requeue)
    if args.dry_run:
        print("\n".join(f"# would be written to {file.path}\n{file.text}" for file in files))
        return
    write_batch_files(files)
    for file in files:
        show(f"{file.path}: {file.purpose}")
    training = shlex.quote(str(files[-1].path))
    print(f"next: sbatch {training}")
    if len(files) > 1:
        first = shlex.quote(str(files[0].path))
        print(f"to compile first: job=$(sbatch --parsable {first}) && sbatch --dependency=afterok:$job {training}")
        if args.cache_dir and HOST in args.cache_dir:
            show(f"each machine has its own cache, {args.cache_dir}: run both jobs on the same machines (--nodelist)")


def _options_of(args: argparse.Namespace) -> list[str]:
    """The options and the script as words of a command line, without options that differ between machines."""
    words = ["--nproc-per-node", str(args.nproc_per_node), "--grace", f"{args.grace:g}"]
    words += ["--heartbeat", f"{HEARTBEAT_SECONDS if args.heartbeat is None else args.heartbeat:g}"]
    names = ("rdzv_backend", "rdzv_endpoint", "rdzv_id", "rdzv_conf", "socket_interface")
    for name in (*names, "instance", "lnc", "cache_dir", "compiler_flags", "log_dir"):
        if getattr(args, name):
            words.append(f"--{name.replace('_', '-')}={getattr(args, name)}")
    for name in ("cpu", "tee", "quiet", "retry_failed_compilation", "module"):
        if getattr(args, name):
            words.append(f"--{name.replace('_', '-')}")
    if args.max_restarts:
        words += ["--max-restarts", str(args.max_restarts)]
    return [*words, args.script, *args.script_args]


def prepare(request: LaunchRequest, *, meets: bool = True) -> LaunchPlan:
    """Plans a launch on this machine, in this environment.

    Args:
        request: what to launch.
        meets: whether several machines must already know the address of machine 0; a batch file determines it.

    Raises:
        ConfigurationError: if the request cannot be launched.
    """
    if not meets:
        request = dataclasses.replace(request, master_addr=request.master_addr or "the first machine of the job")
    check_request(request)  # before torch is imported, so that a wrong path is reported at once
    probes = Machine()
    decision = choose(None, os.environ, probes, cpu=request.cpu)
    instance = detect_instance()
    host = Host(
        cores=count_cores(),
        loopback=find_loopback(),
        torch_xla=probes.torch_xla,
        neuron=probes.neuron_hardware,
        instance=instance.name if instance else None,
        product=read_product(),
        kernel=kernel_version(platform.release()) if sys.platform == "linux" else None,
        name=socket.gethostname(),
        mounts=read_mounts(),
        interface=_interface(request) if meets else None,
    )
    if request.as_many_as_possible:
        request = dataclasses.replace(request, nproc_per_node=most_ranks(request, host, decision, os.environ))
    return plan_launch(request, host, decision, os.environ)


def _interface(request: LaunchRequest) -> str | None:
    if request.nnodes == 1 or request.socket_interface is not None:
        return None
    endpoint = request.rdzv_endpoint or f"{request.master_addr}:0"
    return interface_towards(endpoint.rpartition(":")[0] or endpoint)


def launch(plan: LaunchPlan, *, quiet: bool = False) -> int:
    """Runs the ranks of this machine and returns the exit code for the shell.

    Raises:
        ConfigurationError: if the port or the network interface cannot be used, or the folder for logs or the compile
            cache cannot be written.
        CommunicationError: if the rendezvous of the machines failed.
    """
    _check_port(plan)
    _check_interface(plan)
    _check_log_dir(plan)
    _note_unknown_address(plan)
    from neuron_accel.launch.agent import run_ranks

    if not quiet:
        _say(plan.explain(table_width(sys.stderr)))
    _check_cache(plan)
    outcome = run_ranks(plan)
    if outcome.signal is not None:
        _say(f"ended by {signal_name(outcome.signal)}")
        return 128 + outcome.signal
    if outcome.end is not None:
        if any(-failure.exit_code not in (signal.SIGTERM, signal.SIGKILL) for failure in outcome.failures):
            _say(f"on this machine {describe(outcome.failures, outcome.successes)}")
        _say(f"the run has ended: {outcome.end.what}")
        return outcome.end.code
    if outcome.failures:
        _say(describe(outcome.failures, outcome.successes))
        return first_failure(outcome.failures).shell_code
    return 0


def _check_cache(plan: LaunchPlan) -> None:
    """Checks that compiled graphs can be kept, where ranks compile any.

    Raises:
        ConfigurationError: if the cache cannot be written.
    """
    environ = {**os.environ, **{setting.name: setting.value for setting in plan.settings}}
    on_neuron = environ.get("PJRT_DEVICE", "NEURON") == "NEURON"
    if plan.device == "xla" and (on_neuron or plan.request.cache.location):
        plan.request.cache.check_writable(environ)


def _check_port(plan: LaunchPlan) -> None:
    """Checks that machine 0 can listen on the port, before ranks are started."""
    _, _, port = plan.endpoint.rpartition(":")
    is_ours = plan.is_loopback or (plan.backend == STATIC and plan.request.node_rank == 0)
    if not is_ours or not port.isdecimal() or port == "0":
        return
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
                why="it is the port of the rendezvous of all ranks",
                fix="pass another port" + ("" if plan.request.nnodes > 1 else ", or none to use a free one"),
            ) from error


def _check_interface(plan: LaunchPlan) -> None:
    """Checks the name of the network interface, with which ranks would fail later."""
    known = [name for _, name in socket.if_nameindex()]
    for name in (plan.request.socket_interface or "").split(","):
        if name and name not in known:
            raise ConfigurationError(
                f"This machine has no network interface {name!r}.",
                where="--socket-interface",
                why="it is the interface for the rendezvous of the machines",
                fix=f"pass one of {', '.join(known)}, or leave it out",
            )


def _note_unknown_address(plan: LaunchPlan) -> None:
    """Prints a note if the address of machine 0 cannot be resolved; it may become resolvable while a cluster starts."""
    if plan.request.nnodes == 1 or not plan.request.master_addr:
        return
    try:
        socket.getaddrinfo(plan.request.master_addr, None)
    except (OSError, UnicodeError) as error:
        _say(
            f"{plan.request.master_addr} (--master-addr) cannot be resolved ({error}); retrying for "
            f"{RENDEZVOUS_SECONDS // 60} minutes"
        )


def _check_log_dir(plan: LaunchPlan) -> None:
    """Checks that the folder for logs can be written, before ranks are started."""
    if not plan.request.log_dir:
        return
    try:
        os.makedirs(plan.request.log_dir, exist_ok=True)
        with tempfile.TemporaryFile(dir=plan.request.log_dir):
            pass
    except OSError as error:
        raise ConfigurationError(
            f"{plan.request.log_dir} cannot be written: {os.strerror(error.errno) if error.errno else error}.",
            where="--log-dir",
            why="the output of each rank is written to a folder in it",
            fix="pass a folder that can be written; it is created if it does not exist",
        ) from None


def _say(text: str) -> None:
    show(f"neuron-accel: {text}", sys.stderr)
