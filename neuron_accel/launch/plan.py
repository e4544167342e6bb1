# SPDX-License-Identifier: Apache-2.0
"""The plan of a launch: a pure function of the request, the machine and the environment."""

from __future__ import annotations

import contextlib
import importlib.util
import os
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.machinery import PathFinder
from pathlib import Path

from neuron_accel.backends.select import Decision
from neuron_accel.errors import ConfigurationError, did_you_mean
from neuron_accel.launch.host import Host
from neuron_accel.launch.request import DEFAULT_MASTER_PORT, HEARTBEAT_SECONDS, RULES, STATIC, LaunchRequest
from neuron_accel.neuron import flags
from neuron_accel.neuron.cache import NATIVE_VARIABLE, URL_VARIABLE, location_of, remark_on_place
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
from neuron_accel.terminal import format_pairs

# ---- The plan of a launch; ``--dry-run`` prints it -------------------------------------------------------------------
RENDEZVOUS_SECONDS = 900


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
        """Number of ranks on all machines, the most if their number varies."""
        return self.request.nproc_per_node * self.request.nnodes

    @property
    def fewest(self) -> int:
        """The smallest number of machines."""
        return self.request.nnodes if self.request.min_nnodes is None else self.request.min_nnodes

    @property
    def is_elastic(self) -> bool:
        """Whether the run continues on fewer machines."""
        return self.fewest < self.request.nnodes

    @property
    def is_loopback(self) -> bool:
        """Whether all ranks are on this machine and meet there."""
        request = self.request
        return request.nnodes == 1 and request.rdzv_backend is None and request.rdzv_endpoint is None

    @property
    def backend(self) -> str:
        """torch's rendezvous of several machines."""
        return self.request.rendezvous

    @property
    def endpoint(self) -> str:
        """Address and port of the rendezvous; on one machine port 0 for a free one."""
        request = self.request
        if request.rdzv_endpoint is not None:
            return request.rdzv_endpoint
        port = request.master_port or (0 if self.is_loopback else DEFAULT_MASTER_PORT)
        return f"{request.master_addr or '127.0.0.1'}:{port}"

    @property
    def heartbeat(self) -> float:
        """After how many seconds without a sign a machine is lost; 0: never."""
        given = self.request.heartbeat
        return 0.0 if self.is_loopback else HEARTBEAT_SECONDS if given is None else given

    def command(self, launcher_pid: int | str) -> list[str]:
        """The command line of every rank, after the interpreter."""
        kind = "module" if self.request.module else "script"
        rank = ["-u", str(Path(__file__).with_name("_rank.py")), str(launcher_pid), kind]
        return [*rank, self.request.target, *self.request.arguments]

    def explain(self, width: int | None = None) -> str:
        """The plan as text: settings with reasons, rendezvous, output and notes, wrapped to ``width`` columns."""
        request = self.request
        ranks = "1 rank" if self.world_size == 1 else f"{self.world_size} ranks"
        count = f"{self.fewest} to {request.nnodes}" if self.is_elastic else f"{request.nnodes}"
        this = f", this is {request.node_rank}" if self.backend == STATIC else ""
        where = "this machine" if self.is_loopback else f"{count} machines{this}"
        pairs = [(f"{setting.name}={setting.value}", setting.why) for setting in self.settings]
        if request.found:
            which = f"machine {request.node_rank} of {count}" if self.backend == STATIC else f"{count} machines"
            pairs.append((which, request.found))
        if not self.is_loopback:
            if self.heartbeat:
                without = "the others go on" if self.is_elastic else "the run ends on all"
                pairs.append((f"heartbeat {self.heartbeat:g}", f"seconds without a sign of a machine, then {without}"))
            waits = f"torch's {self.backend}; waits {RENDEZVOUS_SECONDS // 60} minutes for the machines"
            pairs.append((f"rendezvous {self.endpoint}", waits))
        elif request.master_port is not None:
            pairs.append((f"rendezvous {self.endpoint}", "as requested"))
        if request.max_restarts:
            pairs.append((f"at most {request.max_restarts} restarts", "after a rank has failed"))
        pairs.append(("output", _explain_output(request)))
        pairs += [("note", remark) for remark in self.remarks]
        what = f"{ranks} of {request.target} on {where}; device {self.device}: {self.reason}"
        return f"{what}\n{format_pairs(pairs, width=width)}"


def plan_launch(request: LaunchRequest, host: Host, decision: Decision, environment: Mapping[str, str]) -> LaunchPlan:
    """Plans a launch.

    Args:
        request: what to launch.
        host: this machine.
        decision: the backend that the ranks will choose.
        environment: the environment variables that the ranks inherit. Variables in it are not changed, except by
            options that the user passed.

    Raises:
        ConfigurationError: if the request cannot be launched.
        PlanError: if the instance cannot run this number of ranks.
    """
    check_request(request)
    noted = remarks(request, host, decision, environment)  # first, since it raises an error for invalid variables
    settings = [
        setting
        for setting in (
            _threads(request, host),
            _use_cpu(request, decision),
            _loopback(request, host),
            _interface(request, host),
            _nccl_interface(request, decision),
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
    why = "--cpu" if request.cpu else "no accelerator; without it, each rank of Accelerate trains by itself"
    return Setting(name="ACCELERATE_USE_CPU", value="true", why=why, binding=request.cpu)


def _loopback(request: LaunchRequest, host: Host) -> Setting | None:
    if request.nnodes > 1 or host.loopback is None:
        return None
    why = "all ranks are on this machine: their gloo groups listen on the loopback only"
    return Setting(name="GLOO_SOCKET_IFNAME", value=host.loopback, why=why)


def _interface(request: LaunchRequest, host: Host) -> Setting | None:
    if request.socket_interface is None:
        why = "the name of this machine resolves to the loopback; this interface is the one towards the rendezvous"
        return Setting(name="GLOO_SOCKET_IFNAME", value=host.interface, why=why) if host.interface else None
    why = "--socket-interface"
    return Setting(name="GLOO_SOCKET_IFNAME", value=request.socket_interface, why=why, binding=True)


def _nccl_interface(request: LaunchRequest, decision: Decision) -> Setting | None:
    if request.socket_interface is None or decision.device != "cuda":
        return None
    why = "--socket-interface"
    return Setting(name="NCCL_SOCKET_IFNAME", value=request.socket_interface, why=why, binding=True)


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
    """Checks the parts of a request that do not depend on the machine.

    Raises:
        ConfigurationError: if the request cannot be launched.
    """
    for rule in RULES:
        rule.apply(request)
    if request.module:
        _check_module(request.target)
    else:
        _check_script(request.target)
    if request.log_dir and os.path.isfile(request.log_dir):
        raise ConfigurationError(
            f"{request.log_dir} is a file.",
            where="--log-dir",
            why="the output of each rank is written to a folder in it",
            fix="pass a folder; it is created if it does not exist",
        )


def _check_script(target: str) -> None:
    if os.path.isfile(target):  # unlike Path.is_file, also for a name that is too long
        return
    what = "is a folder" if os.path.isdir(target) else "does not exist"
    folder = Path(target).parent if os.path.isdir(os.path.dirname(target)) else Path()
    nearby = [str(folder / file.name) if folder != Path() else file.name for file in folder.glob("*.py")]
    fix = did_you_mean(target, nearby) if len(nearby) <= 20 else "check the path"
    if not nearby:
        fix = "check the path; for an importable module pass --module"
    raise ConfigurationError(
        f"{target or 'The script'} {what}.", where=f"the script to launch, relative to {os.getcwd()}", fix=fix
    )


def _check_module(target: str) -> None:
    package = target.partition(".")[0]
    if not all(target.split(".")) or os.path.isfile(target):
        raise ConfigurationError(
            f"{target!r} is not a valid module name.",
            where="--module",
            why="a module name consists of identifiers separated by dots, starting with the top-level package",
            fix="pass my_package.train for my_package/train.py, or leave --module out to pass a file",
        )
    with contextlib.suppress(ValueError):  # raised for __main__
        if PathFinder.find_spec(package, [os.getcwd()]) or importlib.util.find_spec(package):
            return
    raise ConfigurationError(
        f"There is no module {package!r}.",
        where="--module",
        fix="install it, or run from the folder that contains it; for a file leave --module out",
    )


# ---- Settings and checks for ranks that run on Trainium, or are planned for it ---------------------------------------
def instance_of(request: LaunchRequest, host: Host, environment: Mapping[str, str]) -> Instance | None:
    """The instance of ``--instance`` or the environment, else that of this machine; None if it is not recognised.

    Raises:
        ConfigurationError: if the given instance type is not known.
    """
    if request.instance is not None:
        return find_instance(request.instance, "--instance")
    named = environment.get(INSTANCE_VARIABLE, "").strip()
    if named:
        return find_instance(named, INSTANCE_VARIABLE)
    return find_instance(host.instance) if host.instance else None


def most_ranks(request: LaunchRequest, host: Host, decision: Decision, environment: Mapping[str, str]) -> int:
    """The number of ranks of ``--nproc-per-node auto``: logical cores of the Trainium instance, GPUs, or CPU cores.

    Raises:
        ConfigurationError: if the number of cores is not known.
    """
    instance = instance_of(request, host, environment)
    if instance is not None and (request.instance or runs_on_neuron(host, decision)):
        return instance.cores(request.lnc) // instance.hosts
    if runs_on_neuron(host, decision):
        raise ConfigurationError(
            "The number of cores of this instance is not known.",
            where="--nproc-per-node auto",
            why="the instance is not recognised",
            fix="pass the number of ranks, or --instance",
        )
    if decision.device == "cuda":
        import torch

        return torch.cuda.device_count()
    return host.cores


def runs_on_neuron(host: Host, decision: Decision) -> bool:
    """Whether ranks will run on Neuron devices."""
    return decision.device == "neuron" or (decision.device == "xla" and host.neuron)


def neuron_settings(
    request: LaunchRequest, host: Host, decision: Decision, environment: Mapping[str, str]
) -> tuple[Setting, ...]:
    """Environment variables for the Neuron runtime, network, compiler and compile cache.

    Raises:
        PlanError: if the instance cannot run this number of ranks.
        ConfigurationError: if an option contradicts the environment, or has no effect.
    """
    instance = instance_of(request, host, environment)
    if instance is not None:
        _check_ranks_of_instance(request, instance)
    found = []
    if instance is not None and (request.instance or environment.get(INSTANCE_VARIABLE)):
        why = "the plan is checked for this instance"
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
    """Notes on the machine, and on environment variables that are set already.

    Raises:
        ConfigurationError: if a variable has an invalid value.
    """
    compiles = decision.device == "xla"
    said = []
    if request.alone:
        said.append(
            f"this machine is part of {request.alone}, but trains by itself: pass --nnodes and --master-addr (or set "
            "MASTER_ADDR) to train on all machines together"
        )
    if host.interface == "":
        said.append(
            "the name of this machine resolves to the loopback, where other machines do not reach its ranks: pass "
            "--socket-interface"
        )
    if runs_on_neuron(host, decision):
        way = "xla" if compiles else "native"
        said += [f"{remark.name}={remark.value}: {remark.text}" for remark in review(environment, way)]  # type: ignore[arg-type]
        said += _remark_on_instance(request, host, environment)
    elif request.instance:
        said += _on_the_instance(request, host, environment)
    if compiles:
        said += [f"{flags.VARIABLE}: {text}" for text in flags.remarks(environment.get(flags.VARIABLE, ""))]
        said += [f"--compiler-flags: {t}" for t in flags.remarks(request.compiler_flags, "--compiler-flags")]
        place = remark_on_place(request.cache_dir or location_of(environment), host.mounts, host.name)
        said += [place] if place is not None else []
    return tuple(said)


def _remark_on_instance(request: LaunchRequest, host: Host, environment: Mapping[str, str]) -> list[str]:
    instance = instance_of(request, host, environment)
    product = (
        f"the product name of this machine is {host.product!r}" if host.product else "this machine has no product name"
    )
    if instance is None:
        return [
            f"instance not recognised: {product}; the numbers of ranks and groups are not checked, and logical cores "
            "are not configured; pass --instance"
        ]
    is_variant = instance.name == host.instance and host.product not in (None, instance.name)
    return [f"{product}; assuming a {instance.name}, pass --instance for another"] if is_variant else []


def _on_the_instance(request: LaunchRequest, host: Host, environment: Mapping[str, str]) -> list[str]:
    """What a launch on the instance would say and set, for one elsewhere.

    Raises:
        ConfigurationError: if a variable has an invalid value.
    """
    instance = find_instance(request.instance or "", "--instance")
    xla = host.torch_xla or bool(request.compiler_flags) or instance.family.startswith("trn1")
    said = [f"{each.name}={each.value}: {each.text}" for each in review(environment, "xla" if xla else "native")]
    runtime = RuntimeOptions(lnc=request.lnc, socket_interface=request.socket_interface)  # type: ignore[arg-type]
    found = runtime.settings(instance, nnodes=request.nnodes, native=not xla, kernel=None)
    options = _options(request, _compiled_lnc(request, instance) if xla else None)
    elsewhere = {name: value for name, value in environment.items() if name not in (URL_VARIABLE, NATIVE_VARIABLE)}
    found += compile_settings(options, request.cache, elsewhere, native=not xla)
    new = (f"{each.name}={each.value}" for each in found if each.name not in environment or each.binding)
    path = "torch_xla" if xla else "the native device"
    return [*said, f"on {instance.name} with {path}, launch would set {', '.join(new)}"]


def _options(request: LaunchRequest, lnc: int | None) -> CompilerOptions:
    extra = (request.compiler_flags,) if request.compiler_flags else ()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # flags are checked in `remarks`
        return CompilerOptions(extra=extra, lnc=lnc)  # type: ignore[arg-type]


def _compiled_lnc(request: LaunchRequest, instance: Instance | None) -> int | None:
    """The logical core configuration for the compiler; None if the instance has only one, or is not recognised."""
    if instance is None:
        return request.lnc
    return instance.logical(request.lnc) if len(instance.lnc) > 1 else None


def _check_ranks_of_instance(request: LaunchRequest, instance: Instance) -> None:
    hardware = instance.hardware(request.lnc)
    hardware.check_ranks(request.nproc_per_node * request.nnodes)
    full = instance.cores(request.lnc) // instance.hosts
    if request.nnodes > 1 and request.nproc_per_node != full:
        raise ConfigurationError(
            f"{request.nproc_per_node} ranks on each of {request.nnodes} {instance.name} are not possible.",
            where="--nproc-per-node",
            why="with several machines, every core has to run a rank",
            fix=f"pass {full}, or use one machine",
        )


def _refuse_without_neuron(request: LaunchRequest, decision: Decision) -> None:
    if request.lnc is not None and not request.instance:
        raise ConfigurationError(
            "--lnc has no effect here.",
            where=f"device {decision.device}: {decision.reason}",
            why="only Trainium has logical cores",
            fix="leave it out, or pass the --instance to plan for",
        )
    if decision.device == "xla" or request.instance:  # planned for another machine
        return
    for option, value in (("--compiler-flags", request.compiler_flags), ("--cache-dir", request.cache_dir)):
        if value:
            raise ConfigurationError(
                f"{option} has no effect here.",
                where=f"device {decision.device}: {decision.reason}",
                why="nothing is compiled on this device",
                fix="leave it out, or choose the xla backend",
            )
