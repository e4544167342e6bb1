"""What a launch sets and checks because ranks run on Trainium, or are planned for it. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from neuron_accel.backends.select import Decision
from neuron_accel.cli.host import Host
from neuron_accel.engine.errors import ConfigurationError
from neuron_accel.neuron.compiler import CompilerOptions
from neuron_accel.neuron.environment import (
    INSTANCE_VARIABLE,
    RuntimeOptions,
    check_visible_cores,
    compile_settings,
)
from neuron_accel.neuron.instances import Instance, find_instance
from neuron_accel.neuron.settings import Setting
from neuron_accel.neuron.variables import review

if TYPE_CHECKING:
    from neuron_accel.cli.launch_plan import LaunchRequest


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
        _check_ranks(request, instance)
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
    runtime = RuntimeOptions(lnc=request.lnc)  # type: ignore[arg-type]
    if instance is not None:
        found += runtime.settings(instance, nnodes=request.nnodes, native=native, kernel=host.kernel)
    found += compile_settings(
        _options(request, None if native else instance), request.cache, environment, native=native
    )
    return tuple(found)


def remarks(host: Host, decision: Decision, environment: Mapping[str, str]) -> tuple[str, ...]:
    """What is worth saying about variables that are set already.

    Raises:
        ConfigurationError: for a value that no version understands.
    """
    if not runs_on_neuron(host, decision):
        return ()
    way = "native" if decision.device == "neuron" else "xla"
    return tuple(f"{remark.name}={remark.value}: {remark.text}" for remark in review(environment, way))  # type: ignore[arg-type]


def _options(request: LaunchRequest, instance: Instance | None) -> CompilerOptions:
    extra = (request.compiler_flags,) if request.compiler_flags else ()
    has_choice = instance is not None and len(instance.lnc) > 1
    lnc = instance.logical(request.lnc) if has_choice else None  # type: ignore[union-attr]
    return CompilerOptions(extra=extra, lnc=lnc)  # type: ignore[arg-type]


def _check_ranks(request: LaunchRequest, instance: Instance) -> None:
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
