"""What a launch will do, decided before anything starts: a pure function of the request and the machine."""

from __future__ import annotations

import contextlib
import importlib.util
import math
import os
import warnings
from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib.machinery import PathFinder
from pathlib import Path

from neuron_accel.backends.select import Decision
from neuron_accel.cli.host import Host
from neuron_accel.cli.terminal import format_pairs
from neuron_accel.errors import ConfigurationError, did_you_mean
from neuron_accel.neuron import flags
from neuron_accel.neuron.cache import CompileCache, location_of, remark_on_place
from neuron_accel.neuron.compiler import CompilerOptions
from neuron_accel.neuron.environment import (
    INSTANCE_VARIABLE,
    RuntimeOptions,
    check_visible_cores,
    compile_settings,
    root_address,
)
from neuron_accel.neuron.instances import Instance, find_instance
from neuron_accel.neuron.variables import Setting, review

# ---- What a launch will do, decided before anything starts: a pure function of the request, the machine and the ------
# environment, so that ``--dry-run`` prints exactly what a launch would do.
DEFAULT_MASTER_PORT = 29500
RENDEZVOUS_SECONDS = 900


@dataclass(frozen=True, kw_only=True)
class LaunchRequest:
    """What the user asked for; one field an option of ``neuron-accel launch``.

    Besides, ``found`` says how the machines of the launch are known if no option says it, and ``alone`` of what this
    one is a member, of which no option says how many there are.
    """

    target: str
    arguments: tuple[str, ...] = ()
    module: bool = False
    nproc_per_node: int = 1
    as_many_as_possible: bool = False
    nnodes: int = 1
    node_rank: int = 0
    master_addr: str | None = None
    master_port: int | None = None
    found: str = ""
    alone: str = ""
    socket_interface: str | None = None
    cpu: bool = False
    tee: bool = False
    log_dir: str | None = None
    grace: float = 30.0
    max_restarts: int = 0
    instance: str | None = None
    lnc: int | None = None
    cache: CompileCache = field(default_factory=CompileCache)
    compiler_flags: str = ""
    heartbeat: float = 30.0


@dataclass(frozen=True, kw_only=True)
class LaunchPlan:
    """A launch that is ready to start."""

    request: LaunchRequest
    settings: tuple[Setting, ...]
    device: str
    reason: str
    remarks: tuple[str, ...] = ()

    @property
    def world_size(self) -> int:
        return self.request.nproc_per_node * self.request.nnodes

    @property
    def is_static(self) -> bool:
        """Whether the rendezvous is at an address that the user named; otherwise a free local port is taken."""
        return self.request.nnodes > 1 or self.request.master_port is not None

    @property
    def endpoint(self) -> str:
        if not self.is_static:
            return "127.0.0.1:0"
        return f"{self.request.master_addr or '127.0.0.1'}:{self.request.master_port or DEFAULT_MASTER_PORT}"

    @property
    def heartbeat_port(self) -> int:
        """Of machine 0; the one after that where ranks meet."""
        return int(self.endpoint.rpartition(":")[2]) + 1

    def command(self, launcher_pid: int | str) -> list[str]:
        """The command line of every rank, after the interpreter."""
        kind = "module" if self.request.module else "script"
        rank = ["-u", str(Path(__file__).with_name("_rank.py")), str(launcher_pid), kind]
        return [*rank, self.request.target, *self.request.arguments]

    def explain(self) -> str:
        request = self.request
        ranks = "1 rank" if self.world_size == 1 else f"{self.world_size} ranks"
        where = "this machine" if request.nnodes == 1 else f"{request.nnodes} machines, this is {request.node_rank}"
        pairs = [(f"{setting.name}={setting.value}", setting.why) for setting in self.settings]
        if request.found:
            pairs.append((f"machine {request.node_rank} of {request.nnodes}", request.found))
        if self.is_static:
            if request.nnodes > 1 and request.heartbeat:
                beats = (
                    f"a machine that says nothing for {request.heartbeat:g} s at port {self.heartbeat_port} is given up"
                )
                pairs.append((f"heartbeat {request.heartbeat:g}", beats))
            waits = f"waits {RENDEZVOUS_SECONDS // 60} minutes for all machines" if request.nnodes > 1 else "as asked"
            pairs.append((f"rendezvous {self.endpoint}", waits))
        pairs.append(("output", _explain_output(request)))
        pairs += [("note", remark) for remark in self.remarks]
        return f"{ranks} of {request.target} on {where}; device {self.device}: {self.reason}\n{format_pairs(pairs)}"


def plan_launch(request: LaunchRequest, host: Host, decision: Decision, environment: Mapping[str, str]) -> LaunchPlan:
    """Decides how to launch.

    Args:
        request: what the user asked for.
        host: this machine.
        decision: the backend that the ranks will choose.
        environment: the environment variables that the ranks inherit; what it sets is left alone.

    Raises:
        ConfigurationError: the request cannot be launched.
    """
    check_request(request)
    noted = remarks(request, host, decision, environment)  # first: it refuses variables that cannot be
    settings = [
        setting
        for setting in (
            _threads(request, host),
            _use_cpu(request, decision),
            _loopback(request, host, decision),
            _interface(request),
            _nccl_interface(request, decision),
            _own_store(request),
            _no_xla(host, decision),
            *neuron_settings(request, host, decision, environment),
        )
        if setting is not None and (setting.name not in environment or setting.binding)
    ]
    return LaunchPlan(
        request=request,
        settings=tuple(settings),
        device=decision.device,
        reason=decision.reason,
        remarks=noted,
    )


def _threads(request: LaunchRequest, host: Host) -> Setting:
    threads = max(1, host.cores // request.nproc_per_node)
    why = f"cores / ranks on this machine = {host.cores} / {request.nproc_per_node}, at least 1"
    return Setting(name="OMP_NUM_THREADS", value=str(threads), why=why)


def _use_cpu(request: LaunchRequest, decision: Decision) -> Setting | None:
    if decision.device != "cpu":
        return None
    why = "--cpu" if request.cpu else "no accelerator; without this, ranks of Accelerate would each train alone"
    return Setting(name="ACCELERATE_USE_CPU", value="true", why=why, binding=request.cpu)


def _loopback(request: LaunchRequest, host: Host, decision: Decision) -> Setting | None:
    if decision.device != "cpu" or request.nnodes > 1 or host.loopback is None:
        return None
    why = "all ranks are on this machine, whatever its name resolves to"
    return Setting(name="GLOO_SOCKET_IFNAME", value=host.loopback, why=why)


def _interface(request: LaunchRequest) -> Setting | None:
    if request.socket_interface is None:
        return None
    why = "machines meet over the interface that was asked for"
    return Setting(name="GLOO_SOCKET_IFNAME", value=request.socket_interface, why=why, binding=True)


def _nccl_interface(request: LaunchRequest, decision: Decision) -> Setting | None:
    if request.socket_interface is None or decision.device != "cuda":
        return None
    why = "the same for nccl"
    return Setting(name="NCCL_SOCKET_IFNAME", value=request.socket_interface, why=why, binding=True)


def _own_store(request: LaunchRequest) -> Setting | None:
    if not request.max_restarts:
        return None
    why = "ranks that are started again must not find the addresses of those before"
    return Setting(name="TORCH_DISABLE_SHARE_RDZV_TCP_STORE", value="1", why=why)


def _no_xla(host: Host, decision: Decision) -> Setting | None:
    if not host.torch_xla or decision.backend == "xla":
        return None
    why = "torch_xla is installed, and Accelerate would use it"
    return Setting(name="USE_TORCH_XLA", value="false", why=why)


def _explain_output(request: LaunchRequest) -> str:
    if request.log_dir:
        shown = "every rank's is shown here" if request.tee else "rank 0's is shown here"
        return f"every rank's goes to {request.log_dir}; {shown}, line by line"
    if request.nproc_per_node == 1:
        return "here"
    if request.tee:
        return "every rank's is shown here, those after the first with their rank in front"
    return "the first rank's is shown here; the others' is kept if one fails (--tee shows it, --log-dir keeps it)"


def check_request(request: LaunchRequest) -> None:
    """Raises :class:`ConfigurationError` for a request that cannot be launched."""
    _check_ranks(request)
    if request.module:
        _check_module(request.target)
    else:
        _check_script(request.target)
    if request.log_dir and os.path.isfile(request.log_dir):
        raise ConfigurationError(
            f"{request.log_dir} is a file.",
            where="--log-dir",
            why="Each rank gets a folder of its own below it.",
            fix="Name a folder; it is made if it does not exist.",
        )


def _check_ranks(request: LaunchRequest) -> None:
    if request.nproc_per_node < 1:
        raise ConfigurationError(
            f"{request.nproc_per_node} ranks cannot train anything.",
            where="--nproc-per-node",
            fix="Give the number of ranks on this machine: 1 or more, at most one for each accelerator core.",
        )
    if request.nnodes < 1:
        raise ConfigurationError(
            f"{request.nnodes} machines cannot train anything.", where="--nnodes", fix="Give 1 or more."
        )
    if not 0 <= request.node_rank < request.nnodes:
        raise ConfigurationError(
            f"Machine {request.node_rank} does not exist among {request.nnodes}.",
            where="--node-rank",
            why="Machines are counted from 0.",
            fix=f"Give a number from 0 to {request.nnodes - 1}; a different one on every machine.",
        )
    if request.nnodes > 1 and not request.master_addr:
        raise ConfigurationError(
            f"{request.nnodes} machines need to know where to meet.",
            where="--master-addr",
            fix="Give the address of machine 0, the same on all of them.",
        )
    if request.socket_interface is not None and (request.nnodes == 1 or not request.socket_interface.strip()):
        raise ConfigurationError(
            f"The interface {request.socket_interface!r} "
            + ("names none." if not request.socket_interface.strip() else "does nothing on one machine."),
            where="--socket-interface",
            why="it is the network interface over which several machines meet",
            fix="Name one, such as eth0, with --nnodes; or leave it out.",
        )
    if request.master_port is not None and not 0 < request.master_port < 65536:
        raise ConfigurationError(
            f"{request.master_port} is not a port.",
            where="--master-port",
            fix="Give a number from 1 to 65535, or leave it out on one machine: a free port is taken then.",
        )
    if request.master_port == 65535 and request.nnodes > 1 and request.heartbeat:
        raise ConfigurationError(
            "Port 65535 is the last one.",
            where="--master-port",
            why="machines tell each other that they are there at the port after it",
            fix="Give a smaller number, or --heartbeat 0.",
        )
    if request.max_restarts < 0:
        raise ConfigurationError(
            f"Ranks cannot be restarted {request.max_restarts} times.", where="--max-restarts", fix="Give 0 or more."
        )
    if not (request.heartbeat == 0 or 3 <= request.heartbeat < math.inf):
        raise ConfigurationError(
            f"A machine cannot be considered lost after {request.heartbeat:g} seconds.",
            where="--heartbeat",
            why="machines send a heartbeat every second",
            fix="Give 3 or more seconds, or 0 to disable the check.",
        )
    if not 0 <= request.grace < math.inf:
        raise ConfigurationError(
            f"Ranks cannot be given {request.grace} seconds to end.", where="--grace", fix="Give 0 or more seconds."
        )


def _check_script(target: str) -> None:
    if os.path.isfile(target):  # unlike Path, also where the name is too long to be one
        return
    what = "is a folder" if os.path.isdir(target) else "does not exist"
    folder = Path(target).parent if os.path.isdir(os.path.dirname(target)) else Path()
    nearby = [str(folder / file.name) if folder != Path() else file.name for file in folder.glob("*.py")]
    fix = did_you_mean(target, nearby) if len(nearby) <= 20 else "Check the path."
    if not nearby:
        fix = "Check the path; for a module that Python can import give --module."
    raise ConfigurationError(
        f"{target or 'The script'} {what}.", where=f"script to launch, looked up from {os.getcwd()}", fix=fix
    )


def _check_module(target: str) -> None:
    package = target.partition(".")[0]
    if not all(target.split(".")) or os.path.isfile(target):
        raise ConfigurationError(
            f"{target!r} is not a valid module name.",
            where="--module",
            why="a module name consists of identifiers separated by dots, starting with the top-level package",
            fix="Write my_package.train for my_package/train.py, or leave --module out to give a file.",
        )
    with contextlib.suppress(ValueError):  # of this program's own __main__
        if PathFinder.find_spec(package, [os.getcwd()]) or importlib.util.find_spec(package):
            return
    raise ConfigurationError(
        f"There is no module {package!r}.",
        where="--module",
        fix="Install it, or run from the folder that contains it; for a file leave --module out.",
    )


# ---- What a launch sets and checks because ranks run on Trainium, or are planned for it. Pure ------------------------
def instance_of(request: LaunchRequest, host: Host, environment: Mapping[str, str]) -> Instance | None:
    """The instance that is asked for, or that this machine is.

    Raises:
        ConfigurationError: if it is none that the table knows.
    """
    if request.instance is not None:
        return find_instance(request.instance, "--instance")
    named = environment.get(INSTANCE_VARIABLE, "").strip()
    if named:
        return find_instance(named, INSTANCE_VARIABLE)
    return find_instance(host.instance) if host.instance else None


def most_ranks(request: LaunchRequest, host: Host, decision: Decision, environment: Mapping[str, str]) -> int:
    """One rank for each logical core of the Trainium instance, GPU, or CPU core that there is.

    Raises:
        ConfigurationError: if the number of cores is not known.
    """
    instance = instance_of(request, host, environment)
    if instance is not None and (request.instance or runs_on_neuron(host, decision)):
        return instance.cores(request.lnc) // instance.hosts
    if runs_on_neuron(host, decision):
        raise ConfigurationError(
            "This instance is not known, nor how many cores it has.",
            where="--nproc-per-node auto",
            fix="give the number of ranks, or name the --instance",
        )
    if decision.device == "cuda":
        import torch

        return torch.cuda.device_count()
    return host.cores


def runs_on_neuron(host: Host, decision: Decision) -> bool:
    return decision.device == "neuron" or (decision.device == "xla" and host.neuron)


def neuron_settings(
    request: LaunchRequest, host: Host, decision: Decision, environment: Mapping[str, str]
) -> tuple[Setting, ...]:
    """Variables for Neuron's runtime, network, compiler and compile cache.

    Raises:
        PlanError: if the instance cannot run so many ranks; the nearest number is named.
        ConfigurationError: for options that contradict the environment, or that do nothing here.
    """
    instance = instance_of(request, host, environment)
    if instance is not None:
        _check_ranks_of_instance(request, instance)
    found = []
    if instance is not None and (request.instance or environment.get(INSTANCE_VARIABLE)):
        why = "the plan is checked against what it can do"
        found.append(Setting(name=INSTANCE_VARIABLE, value=instance.name, why=why, binding=bool(request.instance)))
    native = decision.device == "neuron"
    if not runs_on_neuron(host, decision):
        _refuse_without_neuron(request, decision)
        if decision.device == "xla":
            found += compile_settings(_options(request, None), request.cache, environment, native=False)
        return tuple(found)
    check_visible_cores(environment, request.nproc_per_node)
    runtime = RuntimeOptions(lnc=request.lnc, socket_interface=request.socket_interface)  # type: ignore[arg-type]
    found += runtime.settings(instance, nnodes=request.nnodes, native=native, kernel=host.kernel)
    if not native:
        address = request.master_addr if request.nnodes > 1 else None
        own = root_address(environment, address=address, port=request.master_port)
        found += [own] if own is not None else []
    options = _options(request, None if native else _compiled_lnc(request, instance))
    found += compile_settings(options, request.cache, environment, native=native)
    return tuple(found)


def remarks(request: LaunchRequest, host: Host, decision: Decision, environment: Mapping[str, str]) -> tuple[str, ...]:
    """What is worth saying about the machine, and about variables that are set already.

    Raises:
        ConfigurationError: for a value that no version understands.
    """
    compiles = decision.device == "xla"
    said = []
    if request.alone:
        said.append(
            f"this is one machine of {request.alone}, and trains alone: give --nnodes and --master-addr (or "
            "MASTER_ADDR) for one training over all of them"
        )
    if runs_on_neuron(host, decision):
        way = "xla" if compiles else "native"
        said += [f"{remark.name}={remark.value}: {remark.text}" for remark in review(environment, way)]  # type: ignore[arg-type]
        said += _remark_on_instance(request, host, environment)
    if compiles:
        said += [f"{flags.VARIABLE}: {text}" for text in flags.remarks(environment.get(flags.VARIABLE, ""))]
        said += [f"--compiler-flags: {t}" for t in flags.remarks(request.compiler_flags, "--compiler-flags")]
        place = remark_on_place(request.cache.location or location_of(environment), host.mounts, host.name)
        said += [place] if place is not None else []
    return tuple(said)


def _remark_on_instance(request: LaunchRequest, host: Host, environment: Mapping[str, str]) -> list[str]:
    instance = instance_of(request, host, environment)
    says = f"says that it is {host.product!r}" if host.product else "does not say what it is"
    if instance is None:
        return [
            f"instance not recognised: this machine {says}; numbers of ranks and groups are not checked, and logical "
            "cores are left to the runtime; name --instance"
        ]
    is_variant = instance.name == host.instance and host.product not in (None, instance.name)
    return [f"this machine {says}, and is taken for a {instance.name}; --instance names another"] if is_variant else []


def _options(request: LaunchRequest, lnc: int | None) -> CompilerOptions:
    extra = (request.compiler_flags,) if request.compiler_flags else ()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # what is odd about flags is among the remarks
        return CompilerOptions(extra=extra, lnc=lnc)  # type: ignore[arg-type]


def _compiled_lnc(request: LaunchRequest, instance: Instance | None) -> int | None:
    """The logical configuration that the compiler receives; None where there is no choice, or it is not known."""
    if instance is None:
        return request.lnc
    return instance.logical(request.lnc) if len(instance.lnc) > 1 else None


def _check_ranks_of_instance(request: LaunchRequest, instance: Instance) -> None:
    hardware = instance.hardware(request.lnc)
    hardware.check_ranks(request.nproc_per_node * request.nnodes)
    full = instance.cores(request.lnc) // instance.hosts
    if request.nnodes > 1 and request.nproc_per_node != full:
        raise ConfigurationError(
            f"{request.nproc_per_node} ranks on each of {request.nnodes} {instance.name} cannot form groups.",
            where="--nproc-per-node",
            why="with several machines each runs one rank on every core",
            fix=f"give {full}, or one machine",
        )


def _refuse_without_neuron(request: LaunchRequest, decision: Decision) -> None:
    if request.lnc is not None and not request.instance:
        raise ConfigurationError(
            "--lnc does nothing here.",
            where=f"device {decision.device}: {decision.reason}",
            why="logical cores are Trainium's",
            fix="drop it, or name the --instance to plan for",
        )
    if decision.device == "xla" or request.instance:  # planned for another machine
        return
    for option, value in (("--compiler-flags", request.compiler_flags), ("--cache-dir", request.cache.location)):
        if value:
            raise ConfigurationError(
                f"{option} does nothing here.",
                where=f"device {decision.device}: {decision.reason}",
                why="nothing is compiled on this device",
                fix="drop it, or choose the xla backend",
            )
