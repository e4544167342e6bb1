# SPDX-License-Identifier: Apache-2.0
"""``neuron-accel env --network``: checks whether this machine is set up for training on several machines.

Collectives between Trainium instances use the Elastic Fabric Adapter (EFA). The checks cover what can be determined on
one machine; the security group, which cannot, is listed as unknown.
"""

from __future__ import annotations

import resource
import shutil
import subprocess
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from neuron_accel.neuron.environment import ROOT_PORT
from neuron_accel.neuron.instances import Instance

SECONDS = 20.0
"""Time limit of ``fi_info``."""
FI_INFO = "opt/amazon/efa/bin/fi_info"
"""Path to which AWS's installer writes ``fi_info``, relative to the root."""
SECURITY_GROUP = (
    "EFA requires a security group that allows all traffic from and to itself, in both directions, and machines in one "
    "subnet. This cannot be checked on one machine; test it with fi_pingpong -p efa between two machines."
)


@dataclass(frozen=True, kw_only=True)
class Check:
    """The result of one check.

    Args:
        name: what was checked.
        ok: whether the check passed; None if that cannot be determined.
        found: what was found.
        fix: how to fix it; empty if there is nothing to fix.
    """

    name: str
    ok: bool | None
    found: str
    fix: str = ""


def collect_network(
    environ: Mapping[str, str], instance: Instance | None, root: Path = Path("/"), fi_info: str | None = None
) -> list[dict[str, Any]]:
    """Runs all checks.

    Args:
        environ: environment variables.
        instance: the type of this instance; None if it is not known.
        root: the folder that contains the system's ``sys``, ``proc`` and ``opt``.
        fi_info: libfabric's ``fi_info``; None: the one on the PATH, else that of AWS's installer below ``root``.

    Returns:
        the fields of a :class:`Check` for each check, as dicts.
    """
    command = fi_info or shutil.which("fi_info", path=environ.get("PATH", "")) or str(root / FI_INFO)
    checks = [
        _devices(root, instance),
        _provider(command),
        _variables(environ),
        _interfaces(root),
        _locked_memory(),
        _root_port(root),
        Check(name="security group", ok=None, found=SECURITY_GROUP),
    ]
    return [asdict(check) for check in checks]


def _devices(root: Path, instance: Instance | None) -> Check:
    """Checks the number and state of EFA devices: InfiniBand devices whose driver is efa."""
    folder = root / "sys" / "class" / "infiniband"
    found = sorted(path for path in folder.glob("*") if (path / "device" / "driver").resolve().name == "efa")
    down = [path.name for path in found if "ACTIVE" not in _read(path / "ports" / "1" / "state")]
    expected = instance.efa_interfaces if instance is not None else None
    text = f"{len(found)} EFA devices" + (f"; a {instance.name} has {expected}" if expected and instance else "")
    if not found:
        fix = "attach EFA network interfaces to the instance, and install AWS's EFA driver (in a container: give it "
        return Check(name="EFA devices", ok=False, found=text, fix=fix + "the devices /dev/infiniband/uverbs*)")
    if down:
        fix = "activate them: see ip link, and the network interfaces of the instance"
        return Check(name="EFA devices", ok=False, found=f"{text}, not active: {', '.join(down)}", fix=fix)
    fix = "attach all of them: with fewer, collectives between machines are slower or fail"
    enough = expected is None or len(found) >= expected
    return Check(name="EFA devices", ok=enough, found=text, fix="" if enough else fix)


def _provider(command: str) -> Check:
    """Checks that libfabric finds its EFA provider, which the Neuron runtime uses."""
    name = "libfabric (fi_info -p efa)"
    try:
        done = subprocess.run([command, "-p", "efa"], capture_output=True, text=True, timeout=SECONDS)
    except subprocess.TimeoutExpired:
        return Check(name=name, ok=False, found=f"no answer in {SECONDS:g} s", fix="look for errors in dmesg")
    except OSError:
        fix = "install AWS's EFA software (aws-efa-installer), or put fi_info on the PATH"
        return Check(name=name, ok=False, found=f"{command} cannot be run", fix=fix)
    providers = sum(line.strip() == "provider: efa" for line in done.stdout.splitlines())
    if done.returncode or not providers:
        said = (done.stderr.strip() or done.stdout.strip() or "nothing").splitlines()[0]
        return Check(name=name, ok=False, found=f"no provider efa: {said}", fix="install or repair the EFA software")
    return Check(name=name, ok=True, found=f"{providers} endpoints of provider efa")


def _variables(environ: Mapping[str, str]) -> Check:
    """Checks for environment variables that override settings of the launcher."""
    wanted = {"FI_PROVIDER": "efa", "FI_EFA_USE_DEVICE_RDMA": "1"}
    other = [f"{name}={environ[name]}" for name, value in wanted.items() if environ.get(name, value).strip() != value]
    if other:
        fix = "unset them: neuron-accel launch sets the values that EFA requires"
        return Check(name="variables", ok=False, found=", ".join(other), fix=fix)
    return Check(name="variables", ok=True, found="no conflicting settings")


def _interfaces(root: Path) -> Check:
    """Checks for an ordinary network interface, which the rendezvous of the ranks uses."""
    folder = root / "sys" / "class" / "net"
    up = [path.name for path in sorted(folder.glob("*")) if path.name != "lo" and _read(path / "operstate") != "down"]
    virtual = [name for name in up if name.startswith(("docker", "veth", "br-", "cni", "virbr"))]
    real = [name for name in up if name not in virtual]
    fix = ""
    if virtual and real:
        fix = f"if the rendezvous fails, pass --socket-interface {real[0]}"
    return Check(name="network interfaces", ok=bool(real), found=", ".join(up) or "none but lo", fix=fix)


def _locked_memory() -> Check:
    """Checks the limit on locked memory: EFA registers memory, which locks it."""
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    if soft == resource.RLIM_INFINITY:
        return Check(name="locked memory", ok=True, found="unlimited")
    fix = "raise it: ulimit -l unlimited (limits.conf, LimitMEMLOCK of a service, --ulimit memlock=-1 of a container)"
    return Check(name="locked memory", ok=False, found=f"{soft // 1024} KiB", fix=fix)


def _root_port(root: Path) -> Check:
    """Checks that the kernel does not assign the port at which the runtime's ranks meet to another connection."""
    name, folder = "runtime port", root / "proc" / "sys" / "net" / "ipv4"
    low, _, high = _read(folder / "ip_local_port_range").partition("\t")
    if not (low.isdecimal() and high.isdecimal()):
        return Check(name=name, ok=None, found=f"{ROOT_PORT}; the range of ephemeral ports cannot be read")
    reserved = _read(folder / "ip_local_reserved_ports")
    if int(low) <= ROOT_PORT <= int(high) and not _contains(reserved, ROOT_PORT):
        fix = f"reserve it: sysctl net.ipv4.ip_local_reserved_ports={ROOT_PORT}"
        return Check(
            name=name, ok=False, found=f"{ROOT_PORT} is in the range of ephemeral ports, {low} to {high}", fix=fix
        )
    return Check(name=name, ok=True, found=f"{ROOT_PORT} is not assigned to other connections")


def _contains(ranges: str, port: int) -> bool:
    """Whether ``ranges``, such as ``46820,62182-62190``, contain a port."""
    pairs = [part.partition("-") for part in ranges.split(",") if part]
    return any(int(first) <= port <= int(last or first) for first, _, last in pairs)


def _read(path: Path) -> str:
    try:
        return path.read_text(errors="replace").strip()
    except OSError:
        return ""


def format_network(checks: list[dict[str, Any]]) -> list[tuple[str, str]]:
    """The name of each check, and its result with the fix, as text."""
    marks = {True: "ok", False: "not ok", None: "?"}
    return [
        (check["name"], f"{marks[check['ok']]}: {check['found']}" + (f"; {check['fix']}" if check["fix"] else ""))
        for check in checks
    ]
