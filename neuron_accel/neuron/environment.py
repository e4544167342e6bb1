"""What the ranks' environment has to say on a kind of instance, and why."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from neuron_accel.errors import ConfigurationError
from neuron_accel.neuron.cache import NATIVE_VARIABLE, URL_VARIABLE, CompileCache
from neuron_accel.neuron.compiler import CompilerOptions
from neuron_accel.neuron.flags import VARIABLE
from neuron_accel.neuron.instances import Instance, detect_instance, find_instance
from neuron_accel.neuron.variables import Setting, visible_cores

if TYPE_CHECKING:
    from neuron_accel.backends.select import Decision
    from neuron_accel.engine.plan.hardware import Hardware


FORK_SAFE_KERNEL = (5, 15)
"""From this kernel on EFA is safe beside fork without being told."""

INSTANCE_VARIABLE = "NEURON_ACCEL_INSTANCE"
"""Names the instance to plan for, on machines that do not say what they are."""


@dataclass(frozen=True, kw_only=True)
class RuntimeOptions:
    """What the Neuron runtime of a run is to do.

    Args:
        lnc: physical cores in a logical one; None for the instance's default. Trn1 has no choice.
        stochastic_rounding: round fp32 to bf16 stochastically, for training in bf16 throughout. Not with fp32 master
            weights or autocast, whose fp32 weights lose nothing.
        rounding_seed: makes it reproducible.
        exec_timeout: seconds that an execution may take before the runtime gives up; None leaves it alone.
        socket_interface: network interface that ranks meet over, where the runtime finds the wrong one (containers).
    """

    lnc: Literal[1, 2] | None = None
    stochastic_rounding: bool = False
    rounding_seed: int | None = None
    exec_timeout: int | None = 600
    socket_interface: str | None = None

    def __post_init__(self) -> None:
        if self.rounding_seed is not None and not self.stochastic_rounding:
            raise ConfigurationError(
                "rounding_seed does nothing without stochastic_rounding.", where="RuntimeOptions", fix="drop it"
            )
        if self.exec_timeout is not None and self.exec_timeout < 1:
            raise ConfigurationError(
                f"exec_timeout is {self.exec_timeout}.", where="RuntimeOptions", fix="give seconds"
            )

    def settings(
        self, instance: Instance | None, *, nnodes: int, native: bool, kernel: tuple[int, int] | None = None
    ) -> list[Setting]:
        """The variables that the run-time and the network need.

        Args:
            instance: what every machine of the run is; None where that is not known.
            nnodes: number of machines.
            native: whether the run goes through the native device.
            kernel: major and minor version of Linux; None where it is not known.

        Raises:
            ConfigurationError: if the instance does not know the logical configuration.
        """
        found = self._logical_cores(instance)
        if nnodes > 1:
            found += self._network(kernel)
        if self.stochastic_rounding:
            why = "bf16 throughout: what is rounded away would be lost"
            found.append(Setting(name="NEURON_RT_STOCHASTIC_ROUNDING_EN", value="1", why=why))
        if self.rounding_seed is not None:
            name = "NEURON_RT_STOCHASTIC_ROUNDING_SEED"
            found.append(Setting(name=name, value=str(self.rounding_seed), why="asked for"))
        if self.exec_timeout is not None:
            why = "seconds; a first execution waits for ranks that still load"
            found.append(Setting(name="NEURON_RT_EXEC_TIMEOUT", value=str(self.exec_timeout), why=why))
        if not native:
            why = "softmax as one operation, as the SDK's Llama scripts do"
            found.append(Setting(name="NEURON_FUSE_SOFTMAX", value="1", why=why))
        if instance is None or instance.chips > 1:
            why = "many processes; glibc's default arenas exhaust host memory"
            found.append(Setting(name="MALLOC_ARENA_MAX", value="64", why=why))
        return found

    def _logical_cores(self, instance: Instance | None) -> list[Setting]:
        lnc = self.lnc if instance is None else instance.logical(self.lnc)
        if lnc is None or (instance is not None and len(instance.lnc) == 1):
            return []
        why = "asked for" if instance is None else f"{instance.name} has {instance.cores(lnc)} logical cores of {lnc}"
        return [Setting(name="NEURON_LOGICAL_NC_CONFIG", value=str(lnc), why=why)]

    def _network(self, kernel: tuple[int, int] | None) -> list[Setting]:
        found = [
            Setting(name="FI_PROVIDER", value="efa", why="groups between instances go over EFA"),
            Setting(
                name="FI_EFA_USE_DEVICE_RDMA", value="1", why="straight to device memory, which the runtime requires"
            ),
        ]
        if kernel is not None and kernel < FORK_SAFE_KERNEL:
            why = f"Linux {kernel[0]}.{kernel[1]} is older than 5.15"
            found.append(Setting(name="FI_EFA_FORK_SAFE", value="1", why=why))
        if self.socket_interface:
            why = "the interface that was asked for"
            found.append(Setting(name="CCOM_SOCKET_IFNAME", value=self.socket_interface, why=why, binding=True))
        return found


ROOT_PORT = 62182
"""Where torch_xla lets the ranks of Neuron's runtime meet unless NEURON_RT_ROOT_COMM_ID says otherwise."""


def root_address(environ: Mapping[str, str], *, address: str | None, port: int | None) -> Setting | None:
    """Where the runtime's ranks meet (XLA path), if that has to differ between jobs on one machine; None where the
    default will do. The native device takes a free port.

    Args:
        environ: environment variables.
        address: of machine 0; None: there is one machine.
        port: of the rendezvous, if one was named. The one after it is the heartbeat's.

    Raises:
        ConfigurationError: if there is no port after those two.
    """
    visible = environ.get("NEURON_RT_VISIBLE_CORES", "").strip()
    if port is None and (not visible or address is not None):
        return None
    if port is not None and port + 2 > 65535:
        raise ConfigurationError(
            f"Port {port} leaves none for Neuron's runtime.",
            where="--master-port",
            why="the heartbeat takes the port after it, and the runtime's ranks meet at the next",
            fix="give a number up to 65533",
        )
    taken = port + 2 if port is not None else ROOT_PORT + visible_cores(visible)[0]
    host = address or "127.0.0.1"
    host = f"[{host}]" if ":" in host and not host.startswith("[") else host
    why = f"own port for each job on a machine; reserve it (sysctl net.ipv4.ip_local_reserved_ports={taken})"
    return Setting(name="NEURON_RT_ROOT_COMM_ID", value=f"{host}:{taken}", why=why)


def compile_settings(
    options: CompilerOptions, cache: CompileCache, environ: Mapping[str, str], *, native: bool
) -> list[Setting]:
    """The variables that tell compiler and compile cache what to do; those that nothing changes are left out.

    Raises:
        ConfigurationError: for options that contradict the environment (both are named), or that the native device has
            no use for.
    """
    _check_place(cache, environ, NATIVE_VARIABLE if native else URL_VARIABLE)
    found = [
        Setting(name=name, value=value, why="the compile cache that was asked for", binding=True)
        for name, value in cache.environment(native=native).items()
    ]
    if native:
        if options.flags():
            raise ConfigurationError(
                f"{options.flags()[0].text} does nothing on the native device.",
                where="compiler options",
                why=f"{VARIABLE} is read by the XLA path",
                fix="leave it out, or give options to torch.compile",
            )
        return found
    merged = options.merge(environ, cache.flags())
    if merged and merged != environ.get(VARIABLE, ""):
        why = "yours and what was asked for" if environ.get(VARIABLE, "").strip() else "what was asked for"
        found.append(Setting(name=VARIABLE, value=merged, why=why, binding=True))
    return found


def _check_place(cache: CompileCache, environ: Mapping[str, str], variable: str) -> None:
    named = environ.get(variable, "").strip()
    if cache.location is not None and named and named.rstrip("/") != cache.location.rstrip("/"):
        raise ConfigurationError(
            f"{variable}={named} and the cache at {cache.location} contradict each other.",
            where=f"environment variable {variable}; CompileCache.location (--cache-dir)",
            why="graphs would be compiled again that are in the other one",
            fix="name one place",
        )


def check_visible_cores(environ: Mapping[str, str], ranks: int) -> None:
    """Raises :class:`ConfigurationError` if NEURON_RT_VISIBLE_CORES does not name one core for each rank of this
    machine, or begins where such a group cannot."""
    value = environ.get("NEURON_RT_VISIBLE_CORES", "").strip()
    if not value:
        return
    cores = visible_cores(value)
    where = f"NEURON_RT_VISIBLE_CORES={value}"
    if len(cores) != ranks:
        raise ConfigurationError(
            f"{len(cores)} cores are visible to {ranks} ranks.",
            where=where,
            why="every rank takes one of them",
            fix=f"name {ranks} cores, or unset it",
        )
    if cores[0] % ranks:
        raise ConfigurationError(
            f"A job of {ranks} cores cannot begin at core {cores[0]}.",
            where=where,
            why="the runtime places jobs at multiples of their size",
            fix=f"begin at {cores[0] // ranks * ranks}",
        )


# ---- What the planner receives about the machines of a run -----------------------------------------------------------
def hardware_of_run(
    environ: Mapping[str, str], decision: Decision, product_name: Path | None = None
) -> Hardware | None:
    """The limits of the instance that NEURON_ACCEL_INSTANCE names, on any device, so that a plan can be tried before
    one is rented; else, on a Neuron device, of the instance that this is. None where there are none to keep.

    Raises:
        ConfigurationError: for an instance or a logical configuration that does not exist.
    """
    named = environ.get(INSTANCE_VARIABLE, "").strip()
    instance: Instance | None = None
    if named:
        instance = find_instance(named, INSTANCE_VARIABLE)
    elif decision.device in ("neuron", "xla") and environ.get("PJRT_DEVICE", "NEURON") == "NEURON":
        instance = detect_instance(product_name)
    return None if instance is None else instance.hardware(_lnc(environ) if len(instance.lnc) > 1 else None)


def _lnc(environ: Mapping[str, str]) -> int | None:
    name = "NEURON_LOGICAL_NC_CONFIG"
    text = environ.get(name, "").strip()
    if text and not text.isdecimal():
        raise ConfigurationError(
            f"{name}={text} is not a number.", where=f"environment variable {name}", fix="give 1 or 2"
        )
    return int(text) if text else None
