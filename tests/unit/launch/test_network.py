"""``neuron-accel env --network`` on a machine whose ``sys``, ``proc`` and ``opt`` are below a temporary folder."""

from __future__ import annotations

import json
from types import SimpleNamespace

import pytest

from neuron_accel.cli.main import main
from neuron_accel.launch import host
from neuron_accel.launch.network import collect_network
from neuron_accel.neuron import find_instance

TRN1 = find_instance("trn1.32xlarge")
FI_INFO = "#!/bin/sh\nprintf 'provider: efa\\n    fabric: efa\\nprovider: efa\\n'\n"


@pytest.fixture
def root(tmp_path):
    """The files of a trn1.32xlarge with its eight EFA devices, on which every check passes."""
    drivers = tmp_path / "sys" / "bus" / "drivers"
    for driver in ("efa", "mlx5_core"):
        (drivers / driver).mkdir(parents=True)
    for number in range(8):
        add_device(tmp_path, f"rdmap{number}s0", "efa")
    add_device(tmp_path, "mlx5_0", "mlx5_core")
    for name, state in (("lo", "unknown"), ("eth0", "up"), ("docker0", "up"), ("eth9", "down")):
        write(tmp_path / "sys" / "class" / "net" / name / "operstate", f"{state}\n")
    write(tmp_path / "proc/sys/net/ipv4/ip_local_port_range", "32768\t60999\n")
    write(tmp_path / "opt/amazon/efa/bin/fi_info", FI_INFO)
    (tmp_path / "opt/amazon/efa/bin/fi_info").chmod(0o755)
    return tmp_path


def write(path, text):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


def add_device(root, name, driver):
    device = root / "sys" / "class" / "infiniband" / name
    write(device / "ports" / "1" / "state", "4: ACTIVE\n")
    (device / "device").mkdir()
    (device / "device" / "driver").symlink_to(root / "sys" / "bus" / "drivers" / driver)


def checks(root, environ=None, instance=TRN1, **options):
    found = collect_network(environ or {"PATH": ""}, instance, root, **options)
    return {check["name"]: check for check in found}


def test_all_checks_pass_on_a_machine_that_is_set_up(root):
    found = checks(root)
    assert found["EFA devices"] == {
        "name": "EFA devices",
        "ok": True,
        "found": "8 EFA devices; a trn1.32xlarge has 8",
        "fix": "",
    }
    assert found["libfabric (fi_info -p efa)"]["found"] == "2 endpoints of provider efa"
    assert all(found[name]["ok"] for name in found if name not in ("locked memory", "security group"))
    assert found["network interfaces"]["found"] == "docker0, eth0"
    assert "--socket-interface eth0" in found["network interfaces"]["fix"]
    assert found["security group"]["ok"] is None
    assert "all traffic from and to itself" in found["security group"]["found"]


def test_missing_and_inactive_devices_fail_the_check(root, tmp_path):
    devices = root / "sys" / "class" / "infiniband"
    write(devices / "rdmap3s0" / "ports" / "1" / "state", "1: DOWN\n")
    assert "not active: rdmap3s0" in checks(root)["EFA devices"]["found"]
    (devices / "rdmap3s0").rename(root / "gone")
    few = checks(root)["EFA devices"]
    assert few["ok"] is False
    assert few["found"] == "7 EFA devices; a trn1.32xlarge has 8"
    assert checks(root, instance=None)["EFA devices"]["ok"] is True
    none = checks(tmp_path / "elsewhere")["EFA devices"]
    assert none["ok"] is False
    assert "EFA driver" in none["fix"]


@pytest.mark.parametrize(
    ("script", "words"),
    [
        ("#!/bin/sh\necho 'fi_getinfo: -61' >&2; exit 61\n", "no provider efa: fi_getinfo: -61"),
        ("#!/bin/sh\necho 'provider: tcp'\n", "no provider efa: provider: tcp"),
        (None, "cannot be run"),
    ],
)
def test_libfabric_without_its_efa_provider_fails_the_check(root, script, words):
    path = root / "opt/amazon/efa/bin/fi_info"
    path.unlink()
    if script:
        write(path, script)
        path.chmod(0o755)
    found = checks(root)["libfabric (fi_info -p efa)"]
    assert found["ok"] is False
    assert words in found["found"]
    assert found["fix"]


def test_variables_that_override_the_launcher_fail_the_check(root):
    found = checks(root, {"PATH": "", "FI_PROVIDER": "tcp", "FI_EFA_USE_DEVICE_RDMA": "1"})["variables"]
    assert (found["ok"], found["found"]) == (False, "FI_PROVIDER=tcp")


@pytest.mark.parametrize(
    ("ports", "reserved", "ok"),
    [
        ("32768\t60999", "", True),
        ("1024\t65000", "", False),
        ("1024\t65000", "46820,62182", True),
        ("1024\t65000", "62100-62200", True),
        ("1024\t65000", "62183-62200", False),
        ("", "", None),
    ],
)
def test_the_runtime_port_must_not_be_an_ephemeral_port_unless_it_is_reserved(root, ports, reserved, ok):
    folder = root / "proc/sys/net/ipv4"
    write(folder / "ip_local_port_range", f"{ports}\n")
    write(folder / "ip_local_reserved_ports", f"{reserved}\n")
    assert checks(root)["runtime port"]["ok"] is ok


def test_env_checks_the_machine_below_the_hardware_root(root, capsys, monkeypatch):
    """NEURON_ACCEL_HARDWARE_ROOT selects the files of the checks, the Neuron devices and the instance type."""
    write(root / "sys/devices/virtual/dmi/id/product_name", "trn1.32xlarge\n")
    write(root / "dev/neuron0", "")
    monkeypatch.setenv("NEURON_ACCEL_HARDWARE_ROOT", str(root))
    main(["env", "--json", "--network"])
    report = json.loads(capsys.readouterr().out)
    found = {check["name"]: check["found"] for check in report["network"]}
    assert found["EFA devices"] == "8 EFA devices; a trn1.32xlarge has 8"
    assert found["network interfaces"] == "docker0, eth0"
    assert report["system"]["neuron_devices"] == 1


def test_env_runs_the_checks_with_the_option_only(capsys):
    codes = {option: main(["env", "--json", *option]) for option in ((), ("--network",))}
    text = capsys.readouterr().out
    plain, asked = (json.loads(part + "}") for part in text.strip().removesuffix("}").split("\n}\n"))
    assert "network" not in plain
    assert {check["name"] for check in asked["network"]} >= {"EFA devices", "security group"}
    failed = any(check["ok"] is False for check in asked["network"])
    assert codes[("--network",)] == (1 if failed else codes[()])
    main(["env", "--network"])
    shown = " ".join(capsys.readouterr().out.split())
    assert "network EFA devices" in shown
    assert "all traffic from and to itself" in shown


@pytest.mark.parametrize(
    ("own_name", "store", "expected"),
    [
        ("unknown", "here", True),
        ("unknown", "there", False),  # torch would raise, since it looks up the own name
        ("unknown", "unknown", None),
        ("unknown", "127.0.0.1", None),
        ("other", "here", True),
        ("here", "here.example", None),
        ("here", "there", None),
    ],
)
def test_where_the_store_is_where_torch_does_not_find_out(monkeypatch, own_name, store, expected):
    known = {"here": ["10.0.0.1"], "here.example": ["10.0.0.1"], "there": ["10.0.0.2"], "other": ["10.0.0.3"]}
    monkeypatch.setattr(host, "_resolve", lambda name: known.get(name, []))
    monkeypatch.setattr(host.socket, "gethostname", lambda: own_name)
    monkeypatch.setattr(host.psutil, "net_if_addrs", lambda: {"eth0": [SimpleNamespace(address="10.0.0.1")]})
    assert host.must_host(store) is expected
