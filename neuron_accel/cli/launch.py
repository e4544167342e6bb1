# SPDX-License-Identifier: Apache-2.0
"""``neuron-accel launch``: starts a training script on several ranks."""

from __future__ import annotations

import argparse
import contextlib
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

from neuron_accel.backends.select import Machine, choose, flag
from neuron_accel.cli.parser import naming_options
from neuron_accel.errors import ConfigurationError
from neuron_accel.launch.cluster import find_machines
from neuron_accel.launch.failures import describe, first_failure, signal_name
from neuron_accel.launch.host import Host, count_cores, find_loopback, interface_towards, kernel_version, read_mounts
from neuron_accel.launch.plan import RENDEZVOUS_SECONDS, LaunchPlan, check_request, most_ranks, plan_launch
from neuron_accel.launch.request import (
    AUTO,
    DEFAULT_MASTER_PORT,
    GROUPS,
    STATIC,
    LaunchRequest,
    options,
    rendezvous_settings,
    spelt,
)
from neuron_accel.neuron.cache import HOST
from neuron_accel.neuron.instances import detect_instance, read_product
from neuron_accel.neuron.variables import PRECOMPILE_TOOL, STEPS_VARIABLE
from neuron_accel.terminal import format_command, show, table_width

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
  a JobSet of Kubernetes for two instances, to pipe into kubectl apply -f -:
    neuron-accel launch --nnodes 2 --nproc-per-node 32 --instance trn1.32xlarge --emit kubernetes --image t:1 train.py
  two machines; run this on both, with --node-rank 1 on the second:
    neuron-accel launch --nnodes 2 --node-rank 0 --master-addr 10.0.0.1 --nproc-per-node 32 train.py
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    groups = {title: parser.add_argument_group(title) for title in GROUPS}
    for name, option, default in options():
        kind = {"action": "store_true"} if default is False else option.argument
        _add(groups.get(option.group, parser), spelt(name), default=None, help=option.help, **kind)
    for name in GONE:
        _add(parser, name, action=_Gone, help=argparse.SUPPRESS)
    neuron = groups["Trainium"]
    _add(neuron, "--slurm", metavar="PATH", help="write Slurm batch files to this file or folder instead of launching")
    _add(
        neuron,
        "--requeue",
        action="store_true",
        help="with --slurm: the job gets SIGTERM before its time limit, time enough for --grace, and is queued again",
    )
    _add(
        neuron,
        "--check-memory",
        action="store_true",
        help="first dry-run the script up to its second optimizer step, and warn if it does not fit a core",
    )
    kubernetes = parser.add_argument_group("Kubernetes")
    _add(kubernetes, "--emit", choices=["kubernetes"], help="print a JobSet for kubectl instead of launching")
    _add(kubernetes, "--image", metavar="IMAGE", help="its container image, which has this package and the script")
    _add(kubernetes, "--claim", metavar="NAME", help="a PersistentVolumeClaim, mounted at /data")
    _add(parser, "--dry-run", action="store_true", help="print the launch settings without launching")
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


def _add(parser: argparse._ActionsContainer, name: str, **kwargs: Any) -> None:
    """Adds an option that can also be spelt with underscores, as those of torchrun."""
    short = ["-m"] if name == "--module" else []
    parser.add_argument(*dict.fromkeys([name, "--" + name[2:].replace("-", "_"), *short]), **kwargs)


def request_of(args: argparse.Namespace, environ: Mapping[str, str]) -> LaunchRequest:
    """Returns what options ask for, and about machines also what the cluster's scheduler says.

    Raises:
        ConfigurationError: if an option has an impossible value.
    """
    given = {name: getattr(args, name) for name, _, _ in options() if getattr(args, name) is not None}
    if given.get("nproc_per_node") == AUTO:
        given |= {"nproc_per_node": 1, "as_many_as_possible": True}
    given |= _nnodes(given.pop("nnodes", None))
    request = LaunchRequest(target=args.script, arguments=tuple(args.script_args), **given)
    with naming_options({"CompileCache.location": "--cache-dir"}):
        request.cache  # noqa: B018  which raises an error for an impossible place
    rendezvous_settings(request.rdzv_conf)
    if given.get("nnodes") == 1 or args.slurm is not None or args.emit is not None:
        return request
    found = find_machines(environ, DEFAULT_MASTER_PORT)
    if found is None or (found.count in (None, 1) and "nnodes" not in given):
        is_member = found is not None and found.count is None
        return dataclasses.replace(request, alone=found.source) if is_member and found is not None else request
    detected = {"nnodes": found.count, "node_rank": found.rank, "master_addr": found.address, "master_port": found.port}
    if "nnodes" not in given:
        detected |= {"min_nnodes": found.fewest, "rdzv_endpoint": found.endpoint}
    filled: dict[str, Any] = {
        name: value for name, value in detected.items() if value is not None and name not in given
    }
    return dataclasses.replace(request, **filled, found=f"according to {found.source}" if filled else "")


def run(args: argparse.Namespace) -> int:
    request = request_of(args, os.environ)
    plan = prepare(request, meets=args.slurm is None and args.emit is None)
    if args.requeue and args.slurm is None:
        raise ConfigurationError(
            "--requeue has no effect without --slurm.",
            where="--requeue",
            why="it is a property of the job that a batch file describes",
            fix="add --slurm FILE, or leave it out",
        )
    if args.slurm is not None and args.emit is not None:
        raise ConfigurationError("--slurm and --emit exclude each other.", where="--emit", fix="pass one of them")
    for option in ("image", "claim"):
        if getattr(args, option) and args.emit is None:
            raise ConfigurationError(
                f"--{option} has no effect without --emit.",
                where=f"--{option}",
                why="it is a property of the JobSet",
                fix="add --emit kubernetes, or leave it out",
            )
    if args.check_memory and request.node_rank == 0:
        from neuron_accel.cli.memory_check import check_memory

        _say(check_memory(plan))
    if args.slurm is not None:
        _write_batch_files(args.slurm, plan, args)
        return 0
    if args.emit is not None:
        import yaml

        from neuron_accel.launch.kubernetes import describe_job_set

        print(yaml.safe_dump(describe_job_set(plan, args.image, args.claim), sort_keys=False), end="")
        return 0
    if args.dry_run:
        width = table_width()
        show(f"{plan.explain(width)}\neach rank runs:")
        print(format_command([sys.executable, *plan.command("LAUNCHER_PID")], width, indent="  "))
        return 0
    asks_for_cpu = request.cpu or flag(os.environ, "ACCELERATE_USE_CPU")
    if request.instance and plan.device in ("cpu", "cuda") and not asks_for_cpu:
        raise ConfigurationError(
            f"This machine has no device of a {request.instance}.",
            where="--instance",
            why=f"its ranks would use another one: device {plan.device}, {plan.reason}",
            fix="pass --cpu to rehearse here, or --dry-run to see the plan",
        )
    return launch(plan)


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


def _write_batch_files(place: str, plan: LaunchPlan, args: argparse.Namespace) -> None:
    from neuron_accel.launch.slurm import cache_per_host, describe_batch_files, write_batch_files

    request = dataclasses.replace(plan.request, cache_dir=cache_per_host(plan.request.cache_dir))
    files = describe_batch_files(place, plan, request.words(), request.cache_dir, requeue=args.requeue)
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
        if request.cache_dir and HOST in request.cache_dir:
            show(
                f"each machine has its own cache, {request.cache_dir}: run both jobs on the same machines (--nodelist)"
            )


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
    probes = Machine(apart=True)
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


def launch(plan: LaunchPlan) -> int:
    """Runs the ranks of this machine and returns the exit code for the shell.

    Raises:
        ConfigurationError: if the port or the network interface cannot be used, or the folder for logs or the compile
            cache cannot be written.
        CommunicationError: if the rendezvous of the machines failed.
    """
    _check_left_over()
    _check_port(plan)
    _check_interface(plan)
    _check_log_dir(plan)
    _note_unknown_address(plan)
    from neuron_accel.launch.agent import run_ranks

    if not plan.request.quiet:
        _say(plan.explain(table_width(sys.stderr)))
    _check_cache(plan)
    outcome = run_ranks(plan)
    if outcome.signal is not None:
        _say(f"ended by {signal_name(outcome.signal)}")
        return 128 + outcome.signal
    if outcome.end is not None:
        if any(-failure.exit_code not in (signal.SIGTERM, signal.SIGKILL) for failure in outcome.failures):
            _say(f"on this machine {describe(outcome.failures, outcome.successes, outcome.reports)}")
        _say(f"the run has ended: {outcome.end.what}")
        return outcome.end.code
    if outcome.failures:
        _say(describe(outcome.failures, outcome.successes, outcome.reports))
        return first_failure(outcome.failures).shell_code
    return 0


def _check_left_over() -> None:
    """Checks that a run that would only collect graphs is meant to.

    Raises:
        ConfigurationError: if the variable that says so is set, but no tool that collects graphs has set it.
    """
    name = "NEURON_EXTRACT_GRAPHS_ONLY"
    if not flag(os.environ, name) or os.environ.get(STEPS_VARIABLE, "").strip() or _is_started_by(PRECOMPILE_TOOL):
        return
    raise ConfigurationError(
        f"With {name}={os.environ[name]} nothing would be trained: all values are zero, and no checkpoint is saved.",
        where=f"environment variable {name}",
        why=f"no {PRECOMPILE_TOOL} has started this launch, so it is left over",
        fix=f"unset it; to collect graphs, use neuron-accel precompile, or set {STEPS_VARIABLE}, too",
    )


def _is_started_by(tool: str) -> bool:
    import psutil

    for process in psutil.Process().parents():
        with contextlib.suppress(psutil.Error):  # it has ended, or belongs to another user
            if any(os.path.basename(word) == tool for word in process.cmdline()):
                return True
    return False


def _check_cache(plan: LaunchPlan) -> None:
    """Checks that compiled graphs can be kept, where ranks compile any.

    Raises:
        ConfigurationError: if the cache cannot be written.
    """
    environ = {**os.environ, **{setting.name: setting.value for setting in plan.settings}}
    on_neuron = environ.get("PJRT_DEVICE", "NEURON") == "NEURON"
    if plan.device == "xla" and (on_neuron or plan.request.cache_dir):
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
