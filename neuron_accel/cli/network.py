"""``neuron-accel env --network``: whether this machine can train with others, before several are started.

Collectives between Trainium instances go over the Elastic Fabric Adapter (EFA). What can be seen of it from one machine
is checked here; what cannot, the security group, is said.
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
"""How long ``fi_info`` may take."""
FI_INFO = "opt/amazon/efa/bin/fi_info"
"""Where AWS's installer puts it, below the root."""
SECURITY_GROUP = (
    "EFA needs a security group that allows all traffic from and to itself, in both directions, and machines in one "
    "subnet; neither can be seen from here. fi_pingpong -p efa between two machines shows it."
)


@dataclass(frozen=True, kw_only=True)
class Check:
    """What one look found.

    Args:
        name: of what was looked at.
        ok: whether it will do; None where that cannot be said.
        found: what there is.
        fix: what to do; empty where there is nothing to do.
    """

    name: str
    ok: bool | None
    found: str
    fix: str = ""


def collect_network(
    environ: Mapping[str, str], instance: Instance | None, root: Path = Path("/"), fi_info: str | None = None
) -> list[dict[str, Any]]:
    """The checks as plain data.

    Args:
        environ: environment variables.
        instance: what this machine is, where that is known.
        root: below which the files of the system are.
        fi_info: libfabric's command; by default that of the PATH, else that of AWS's installer below ``root``.
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
    """EFA devices are InfiniBand devices whose driver is efa."""
    folder = root / "sys" / "class" / "infiniband"
    found = sorted(path for path in folder.glob("*") if (path / "device" / "driver").resolve().name == "efa")
    down = [path.name for path in found if "ACTIVE" not in _read(path / "ports" / "1" / "state")]
    expected = instance.efa_interfaces if instance is not None else None
    text = f"{len(found)} EFA devices" + (f" of {expected} of a {instance.name}" if expected and instance else "")
    if not found:
        fix = "attach EFA network interfaces to the instance, and install AWS's EFA driver (in a container: give it "
        return Check(name="EFA devices", ok=False, found=text, fix=fix + "the devices /dev/infiniband/uverbs*)")
    if down:
        fix = "bring them up: ip link, and the instance's network interfaces"
        return Check(name="EFA devices", ok=False, found=f"{text}, not active: {', '.join(down)}", fix=fix)
    fix = "attach all of them: with fewer, groups between machines are slow or cannot be formed"
    enough = expected is None or len(found) >= expected
    return Check(name="EFA devices", ok=enough, found=text, fix="" if enough else fix)


def _provider(command: str) -> Check:
    """Whether libfabric finds its provider for EFA, which is what the runtime asks it for."""
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
    """Variables that keep the launcher's own settings from being made."""
    wanted = {"FI_PROVIDER": "efa", "FI_EFA_USE_DEVICE_RDMA": "1"}
    other = [f"{name}={environ[name]}" for name, value in wanted.items() if environ.get(name, value).strip() != value]
    if other:
        fix = "unset them: neuron-accel launch sets what several machines need"
        return Check(name="variables", ok=False, found=", ".join(other), fix=fix)
    return Check(name="variables", ok=True, found="none that stand in the way")


def _interfaces(root: Path) -> Check:
    """Where machines meet is an ordinary network interface."""
    folder = root / "sys" / "class" / "net"
    up = [path.name for path in sorted(folder.glob("*")) if path.name != "lo" and _read(path / "operstate") != "down"]
    virtual = [name for name in up if name.startswith(("docker", "veth", "br-", "cni", "virbr"))]
    real = [name for name in up if name not in virtual]
    fix = ""
    if virtual and real:
        fix = f"if machines do not find each other, give --socket-interface {real[0]}"
    return Check(name="network interfaces", ok=bool(real), found=", ".join(up) or "none but lo", fix=fix)


def _locked_memory() -> Check:
    """EFA registers memory, which is locked."""
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    if soft == resource.RLIM_INFINITY:
        return Check(name="locked memory", ok=True, found="unlimited")
    fix = "raise it: ulimit -l unlimited (limits.conf, LimitMEMLOCK of a service, --ulimit memlock=-1 of a container)"
    return Check(name="locked memory", ok=False, found=f"{soft // 1024} KiB", fix=fix)


def _root_port(root: Path) -> Check:
    """The port where the runtime's ranks meet must not be given to a connection that comes first."""
    name, folder = "port of the runtime", root / "proc" / "sys" / "net" / "ipv4"
    low, _, high = _read(folder / "ip_local_port_range").partition("\t")
    if not (low.isdecimal() and high.isdecimal()):
        return Check(name=name, ok=None, found=f"{ROOT_PORT}; the range of local ports cannot be read")
    reserved = _read(folder / "ip_local_reserved_ports")
    if int(low) <= ROOT_PORT <= int(high) and not _names(reserved, ROOT_PORT):
        fix = f"reserve it: sysctl net.ipv4.ip_local_reserved_ports={ROOT_PORT}"
        return Check(name=name, ok=False, found=f"{ROOT_PORT} is among the local ports {low} to {high}", fix=fix)
    return Check(name=name, ok=True, found=f"{ROOT_PORT} is not given to others")


def _names(ranges: str, port: int) -> bool:
    """Whether a list as ``46820,62182-62190`` names a port."""
    pairs = [part.partition("-") for part in ranges.split(",") if part]
    return any(int(first) <= port <= int(last or first) for first, _, last in pairs)


def _read(path: Path) -> str:
    try:
        return path.read_text(errors="replace").strip()
    except OSError:
        return ""


def format_network(checks: list[dict[str, Any]]) -> list[tuple[str, str]]:
    """Pairs of a name and what was found, with what to do below it."""
    marks = {True: "ok", False: "not ok", None: "?"}
    return [
        (check["name"], f"{marks[check['ok']]}: {check['found']}" + (f"; {check['fix']}" if check["fix"] else ""))
        for check in checks
    ]
