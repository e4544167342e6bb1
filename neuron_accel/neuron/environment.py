# SPDX-License-Identifier: Apache-2.0
"""Environment variables of the ranks for an instance type, with reasons, and the instance that a run is planned for."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from neuron_accel.errors import ConfigurationError
from neuron_accel.neuron.cache import NATIVE_VARIABLE, URL_VARIABLE, CompileCache
from neuron_accel.neuron.compiler import CompilerOptions
from neuron_accel.neuron.flags import VARIABLE
from neuron_accel.neuron.instances import (
    OLDEST_RUNTIME,
    Instance,
    detect_instance,
    find_instance,
)
from neuron_accel.neuron.variables import Setting, visible_cores

if TYPE_CHECKING:
    from neuron_accel.backends.select import Decision
    from neuron_accel.engine.plan.hardware import Hardware


FORK_SAFE_KERNEL = (5, 15)
"""The first kernel on which EFA supports fork without FI_EFA_FORK_SAFE."""

INSTANCE_VARIABLE = "NEURON_ACCEL_INSTANCE"
"""Variable with the instance type to plan for; overrides the detected one."""


@dataclass(frozen=True, kw_only=True)
class RuntimeOptions:
    """Options of the Neuron runtime.

    Args:
        lnc: number of physical cores in a logical core; None: the instance's default. Always 1 on Trn1.
        stochastic_rounding: whether to round fp32 to bf16 stochastically, for training with bf16 weights. Not useful
            with fp32 master weights or autocast, whose weights are fp32.
        rounding_seed: seed of stochastic rounding.
        exec_timeout: time limit of an execution, in seconds; None: the runtime's default.
        socket_interface: network interface for the rendezvous of ranks, if the runtime detects the wrong one (in
            containers).

    Raises:
        ConfigurationError: if ``rounding_seed`` is given without ``stochastic_rounding``, or ``exec_timeout`` is less
            than 1.
    """

    lnc: Literal[1, 2] | None = None
    stochastic_rounding: bool = False
    rounding_seed: int | None = None
    exec_timeout: int | None = 600
    socket_interface: str | None = None

    def __post_init__(self) -> None:
        if self.rounding_seed is not None and not self.stochastic_rounding:
            raise ConfigurationError(
                "rounding_seed has no effect without stochastic_rounding.", where="RuntimeOptions", fix="leave it out"
            )
        if self.exec_timeout is not None and self.exec_timeout < 1:
            raise ConfigurationError(
                f"exec_timeout is {self.exec_timeout}.", where="RuntimeOptions", fix="pass at least 1 second"
            )

    def settings(
        self, instance: Instance | None, *, nnodes: int, native: bool, kernel: tuple[int, int] | None = None
    ) -> list[Setting]:
        """The environment variables for the runtime and the network.

        Args:
            instance: instance type of every machine; None if it is not known.
            nnodes: number of machines.
            native: True for the native device, False for the XLA path.
            kernel: major and minor version of Linux; None if it is not known.

        Raises:
            ConfigurationError: if the instance does not support ``lnc``.
        """
        found = self._logical_cores(instance)
        if nnodes > 1:
            found += self._network(kernel)
        if self.stochastic_rounding:
            why = "bf16 weights: small updates are not always rounded away"
            found.append(Setting(name="NEURON_RT_STOCHASTIC_ROUNDING_EN", value="1", why=why))
        if self.rounding_seed is not None:
            name = "NEURON_RT_STOCHASTIC_ROUNDING_SEED"
            found.append(Setting(name=name, value=str(self.rounding_seed), why="rounding_seed"))
        if self.exec_timeout is not None:
            why = "seconds; the first execution waits for ranks that still load their graph"
            found.append(Setting(name="NEURON_RT_EXEC_TIMEOUT", value=str(self.exec_timeout), why=why))
        if not native:
            why = "softmax as one operation, as in the Llama scripts of the SDK"
            found.append(Setting(name="NEURON_FUSE_SOFTMAX", value="1", why=why))
        if instance is None or instance.chips > 1:
            why = "with many processes, glibc's default arenas exhaust host memory"
            found.append(Setting(name="MALLOC_ARENA_MAX", value="64", why=why))
        return found

    def _logical_cores(self, instance: Instance | None) -> list[Setting]:
        lnc = self.lnc if instance is None else instance.logical(self.lnc)
        if lnc is None or (instance is not None and len(instance.lnc) == 1):
            return []
        why = "--lnc" if instance is None else f"{instance.name} has {instance.cores(lnc)} logical cores of {lnc}"
        return [Setting(name="NEURON_LOGICAL_NC_CONFIG", value=str(lnc), why=why)]

    def _network(self, kernel: tuple[int, int] | None) -> list[Setting]:
        found = [
            Setting(name="FI_PROVIDER", value="efa", why="groups across instances use EFA"),
            Setting(name="FI_EFA_USE_DEVICE_RDMA", value="1", why="RDMA to device memory, which the runtime requires"),
        ]
        if kernel is not None and kernel < FORK_SAFE_KERNEL:
            why = f"Linux {kernel[0]}.{kernel[1]} is older than 5.15"
            found.append(Setting(name="FI_EFA_FORK_SAFE", value="1", why=why))
        if self.socket_interface:
            why = "--socket-interface"
            found.append(Setting(name="CCOM_SOCKET_IFNAME", value=self.socket_interface, why=why, binding=True))
        return found


ROOT_PORT = 62182
"""Port at which ranks of the Neuron runtime meet on the XLA path, unless :data:`ROOT_VARIABLE` sets another."""
ROOT_VARIABLE = "NEURON_RT_ROOT_COMM_ID"


def root_address(environ: Mapping[str, str], *, address: str | None, port: int | None) -> Setting | None:
    """The address at which the runtime's ranks meet (XLA path), which has to differ between jobs on one machine.

    Args:
        environ: environment variables.
        address: address of machine 0; None if there is one machine.
        port: port of the rendezvous, if one was given; the runtime uses the next one.

    Returns:
        the variable; None if the default can be used. The native device uses a free port.

    Raises:
        ConfigurationError: if ``port`` is larger than 65534.
    """
    visible = environ.get("NEURON_RT_VISIBLE_CORES", "").strip()
    if port is None and (not visible or address is not None):
        return None
    if port is not None and port + 1 > 65535:
        raise ConfigurationError(
            f"Port {port} leaves no port for the Neuron runtime.",
            where="--master-port",
            why="the runtime uses the port after it",
            fix="pass a number up to 65534",
        )
    taken = port + 1 if port is not None else ROOT_PORT + visible_cores(visible)[0]
    value = with_host(f":{taken}", address or "127.0.0.1")
    why = f"each job on a machine needs its own port; reserve it (sysctl net.ipv4.ip_local_reserved_ports={taken})"
    return Setting(name=ROOT_VARIABLE, value=value, why=why)


def with_host(address: str, host: str) -> str:
    """An address ``host:port`` with another host."""
    host = f"[{host}]" if ":" in host and not host.startswith("[") else host
    return f"{host}:{address.rpartition(':')[2]}"


def compile_settings(
    options: CompilerOptions, cache: CompileCache, environ: Mapping[str, str], *, native: bool
) -> list[Setting]:
    """The environment variables for the compiler and the compile cache; those that do not change are left out.

    Args:
        options: compiler options.
        cache: the compile cache.
        environ: environment variables.
        native: True for the native device, False for the XLA path.

    Raises:
        ConfigurationError: if options contradict the environment, or have no effect on the native device.
    """
    _check_place(cache, environ, NATIVE_VARIABLE if native else URL_VARIABLE)
    found = [
        Setting(name=name, value=value, why="--cache-dir and options of the compile cache", binding=True)
        for name, value in cache.environment(native=native).items()
    ]
    if native:
        if options.flags():
            raise ConfigurationError(
                f"{options.flags()[0].text} has no effect on the native device.",
                where="compiler options",
                why=f"only the XLA path reads {VARIABLE}",
                fix="leave it out, or pass options to torch.compile",
            )
        return found
    merged = options.merge(environ, cache.flags())
    if merged and merged != environ.get(VARIABLE, ""):
        why = "from the environment, with options added" if environ.get(VARIABLE, "").strip() else "from options"
        found.append(Setting(name=VARIABLE, value=merged, why=why, binding=True))
    return found


def _check_place(cache: CompileCache, environ: Mapping[str, str], variable: str) -> None:
    named = environ.get(variable, "").strip()
    if cache.location is not None and named and named.rstrip("/") != cache.location.rstrip("/"):
        raise ConfigurationError(
            f"{variable}={named} and the cache at {cache.location} contradict each other.",
            where=f"environment variable {variable}; --cache-dir",
            why="graphs in one of them would be compiled again",
            fix="set only one of them",
        )


def check_visible_cores(environ: Mapping[str, str], ranks: int) -> None:
    """Checks NEURON_RT_VISIBLE_CORES, if it is set.

    Args:
        environ: environment variables.
        ranks: number of ranks on this machine.

    Raises:
        ConfigurationError: if it does not contain one core per rank, or does not begin at a multiple of their number.
    """
    value = environ.get("NEURON_RT_VISIBLE_CORES", "").strip()
    if not value:
        return
    cores = visible_cores(value)
    where = f"NEURON_RT_VISIBLE_CORES={value}"
    if len(cores) != ranks:
        raise ConfigurationError(
            f"{len(cores)} cores are visible to {ranks} ranks.",
            where=where,
            why="every rank uses one core",
            fix=f"set it to {ranks} cores, or unset it",
        )
    if cores[0] % ranks:
        raise ConfigurationError(
            f"A job of {ranks} cores cannot begin at core {cores[0]}.",
            where=where,
            why="the runtime places jobs at multiples of their size",
            fix=f"begin at {cores[0] // ranks * ranks}",
        )


# ---- The hardware that a run is planned for --------------------------------------------------------------------------
def hardware_of_run(
    environ: Mapping[str, str], decision: Decision, product_name: Path | None = None
) -> Hardware | None:
    """The hardware limits that the plan of a run is checked against.

    They are those of the instance in NEURON_ACCEL_INSTANCE, on any device, so that a plan can be checked before an
    instance is rented; without it, on a Neuron device, those of the instance that this machine is.

    Args:
        environ: environment variables.
        decision: the chosen backend.
        product_name: the file with the product name of this machine, for tests.

    Returns:
        the limits; None if there are none.

    Raises:
        ConfigurationError: if the instance is not known, or does not support NEURON_LOGICAL_NC_CONFIG.
    """
    named = environ.get(INSTANCE_VARIABLE, "").strip()
    instance: Instance | None = None
    if named:
        instance = find_instance(named, INSTANCE_VARIABLE)
    elif decision.device in ("neuron", "xla") and environ.get("PJRT_DEVICE", "NEURON") == "NEURON":
        instance = detect_instance(product_name)
    if instance is None:
        return None
    runtime = OLDEST_RUNTIME if decision.device == "xla" else instance.runtime(version("torch"))
    return instance.hardware(_lnc(environ) if len(instance.lnc) > 1 else None, runtime)


def _lnc(environ: Mapping[str, str]) -> int | None:
    name = "NEURON_LOGICAL_NC_CONFIG"
    text = environ.get(name, "").strip()
    if text and not text.isdecimal():
        raise ConfigurationError(
            f"{name}={text} is not a number.", where=f"environment variable {name}", fix="set it to 1 or 2"
        )
    return int(text) if text else None
