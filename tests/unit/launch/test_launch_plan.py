"""Settings and notes of a launch, and errors for invalid requests, without starting ranks."""

from __future__ import annotations

import dataclasses
import os
import shlex
import socket
from unittest import mock

import pytest

from neuron_accel.backends.select import Decision
from neuron_accel.cli.launch import _note_unknown_address, launch
from neuron_accel.cli.main import main
from neuron_accel.errors import CommunicationError, ConfigurationError
from neuron_accel.launch.agent import run_ranks
from neuron_accel.launch.host import Host, count_cores, count_neuron_devices, memory_bytes
from neuron_accel.launch.plan import check_request, plan_launch
from neuron_accel.launch.request import LaunchRequest

CPU = Decision(backend="torch", device="cpu", reason="no accelerator can be used")
NEURON = Decision(backend="torch", device="neuron", reason="torch has a native neuron device")
XLA = Decision(backend="xla", device="xla", reason="this is Neuron hardware")
HOST = Host(cores=8, loopback="lo", torch_xla=False)


@pytest.fixture
def script(tmp_path):
    path = tmp_path / "train.py"
    path.write_text("")
    return str(path)


def settings(request, *, host=HOST, decision=CPU, environment=None):
    plan = plan_launch(request, host, decision, environment or {})
    return {setting.name: setting.value for setting in plan.settings}


@pytest.mark.parametrize(("cores", "ranks", "threads"), [(8, 4, "2"), (2, 4, "1"), (8, 1, "8"), (7, 2, "3")])
def test_cores_are_shared_between_ranks(script, cores, ranks, threads):
    request = LaunchRequest(target=script, nproc_per_node=ranks)
    host = dataclasses.replace(HOST, cores=cores)
    assert settings(request, host=host)["OMP_NUM_THREADS"] == threads


def test_what_the_user_has_set_is_left_alone(script):
    environment = {"OMP_NUM_THREADS": "5", "GLOO_SOCKET_IFNAME": "eth0", "ACCELERATE_USE_CPU": "true"}
    assert settings(LaunchRequest(target=script, nproc_per_node=2), environment=environment) == {}


def test_the_cpu_option_overrules_the_environment(script):
    request = LaunchRequest(target=script, cpu=True)
    assert settings(request, environment={"ACCELERATE_USE_CPU": "false"})["ACCELERATE_USE_CPU"] == "true"


def test_accelerators_are_left_to_their_backend(script):
    request = LaunchRequest(target=script, nproc_per_node=2)
    assert not {"ACCELERATE_USE_CPU", "USE_TORCH_XLA"} & set(settings(request, decision=NEURON))


def test_gloo_groups_of_one_machine_listen_on_the_loopback_beside_any_device(script):
    for decision in (CPU, NEURON, XLA):
        found = settings(LaunchRequest(target=script, nproc_per_node=4), decision=decision)
        assert found["GLOO_SOCKET_IFNAME"] == "lo"


def test_several_machines_do_not_meet_on_the_loopback(script):
    request = LaunchRequest(target=script, nnodes=2, master_addr="10.0.0.1")
    assert "GLOO_SOCKET_IFNAME" not in settings(request)


CUDA = Decision(backend="torch", device="cuda", reason="torch sees a CUDA device")


@pytest.mark.parametrize(
    ("decision", "names"),
    [
        (CPU, {"GLOO_SOCKET_IFNAME"}),
        (CUDA, {"GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"}),
        (NEURON, {"GLOO_SOCKET_IFNAME", "CCOM_SOCKET_IFNAME"}),
    ],
)
def test_machines_meet_over_the_interface_that_was_asked_for(script, decision, names):
    request = LaunchRequest(target=script, nnodes=2, master_addr="10.0.0.1", socket_interface="eth1")
    found = settings(request, decision=decision, environment=dict.fromkeys(names, "eth0"))
    assert {name for name, value in found.items() if value == "eth1"} == names


def test_an_interface_that_does_not_exist_is_refused_before_anything_starts(script):
    request = LaunchRequest(target=script, nnodes=2, master_addr="127.0.0.1", node_rank=1, socket_interface="nope0")
    with pytest.raises(ConfigurationError, match="no network interface 'nope0'") as error:
        launch(plan_launch(request, HOST, CPU, {}))
    assert "lo" in error.value.fix


@pytest.mark.parametrize(("decision", "value"), [(CPU, "false"), (XLA, None)])
def test_accelerate_is_kept_from_an_xla_that_the_run_does_not_use(script, decision, value):
    host = dataclasses.replace(HOST, torch_xla=True)
    assert settings(LaunchRequest(target=script), host=host, decision=decision).get("USE_TORCH_XLA") == value


def test_the_plan_says_what_it_sets_and_why(script):
    text = plan_launch(LaunchRequest(target=script, nproc_per_node=4), HOST, CPU, {}).explain()
    assert text.startswith(f"4 ranks of {script} on this machine; device cpu: no accelerator can be used")
    assert "OMP_NUM_THREADS=2" in text
    assert "8 / 4" in text
    assert "--tee" in text


def test_ranks_of_one_machine_meet_at_a_free_port_unless_one_is_named(script):
    free = plan_launch(LaunchRequest(target=script), HOST, CPU, {})
    named = plan_launch(LaunchRequest(target=script, master_port=1234), HOST, CPU, {})
    several = plan_launch(LaunchRequest(target=script, nnodes=2, master_addr="10.0.0.1"), HOST, CPU, {})
    elastic = plan_launch(LaunchRequest(target=script, nnodes=4, min_nnodes=2, rdzv_endpoint="a:1"), HOST, CPU, {})
    assert (free.is_loopback, free.endpoint, free.heartbeat) == (True, "127.0.0.1:0", 0)
    assert (named.is_loopback, named.endpoint) == (True, "127.0.0.1:1234")
    assert (several.backend, several.endpoint, several.world_size) == ("static", "10.0.0.1:29500", 2)
    assert (several.is_elastic, several.heartbeat) == (False, 30)
    assert (elastic.backend, elastic.endpoint, elastic.is_elastic, elastic.fewest) == ("c10d", "a:1", True, 2)


def test_options_that_there_were_name_the_new_ones(script, capsys):
    for option, value, new in (("--min-nnodes", "1", "--nnodes MIN:MAX"), ("--min_nproc_per_node", "1", "keep_batch")):
        with pytest.raises(SystemExit):
            main(["launch", option, value, script])
        assert new in capsys.readouterr().err
    assert main(["launch", "--nnodes", "two", script]) == 2
    assert "--nnodes two is not a number of machines" in capsys.readouterr().err


def test_a_host_name_that_is_the_loopback_is_not_used_by_gloo(script):
    request = LaunchRequest(target=script, nnodes=2, master_addr="10.0.0.1")
    found = settings(request, host=dataclasses.replace(HOST, interface="eth3"))
    assert found["GLOO_SOCKET_IFNAME"] == "eth3"
    assert "GLOO_SOCKET_IFNAME" not in settings(request)
    plan = plan_launch(request, dataclasses.replace(HOST, interface=""), CPU, {})
    assert "--socket-interface" in plan.remarks[0]


@pytest.mark.parametrize(
    ("change", "where"),
    [
        ({"nproc_per_node": 0}, "--nproc-per-node"),
        ({"nnodes": 0}, "--nnodes"),
        ({"node_rank": 1}, "--node-rank"),
        ({"nnodes": 2, "node_rank": -1}, "--node-rank"),
        ({"nnodes": 2}, "--master-addr"),
        ({"master_port": 70000}, "--master-port"),
        ({"socket_interface": "eth0"}, "--socket-interface"),
        ({"nnodes": 2, "master_addr": "10.0.0.1", "socket_interface": " "}, "--socket-interface"),
        ({"max_restarts": -1}, "--max-restarts"),
        ({"grace": -1.0}, "--grace"),
        ({"grace": float("nan")}, "--grace"),
        ({"grace": float("inf")}, "--grace"),
        ({"heartbeat": 1.0}, "--heartbeat"),
        ({"heartbeat": float("nan")}, "--heartbeat"),
        ({"nnodes": 2, "master_addr": ""}, "--master-addr"),
        ({"nnodes": 2, "min_nnodes": 3, "master_addr": "10.0.0.1"}, "--nnodes"),
        ({"nnodes": 2, "min_nnodes": 1, "master_addr": "a", "rdzv_backend": "static"}, "--rdzv-backend"),
    ],
)
def test_impossible_numbers_are_refused_by_the_option_they_came_from(script, change, where):
    with pytest.raises(ConfigurationError) as error:
        check_request(LaunchRequest(target=script, **change))
    assert error.value.where == where
    assert error.value.fix


def test_a_missing_script_names_the_nearest_one(script):
    with pytest.raises(ConfigurationError, match="does not exist") as error:
        check_request(LaunchRequest(target=script.replace("train.py", "trian.py")))
    assert "train.py" in error.value.fix


def test_a_folder_is_no_script(tmp_path):
    with pytest.raises(ConfigurationError, match="is a folder"):
        check_request(LaunchRequest(target=str(tmp_path)))


def test_a_missing_module_is_refused_and_one_in_this_folder_found(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    request = LaunchRequest(target="some_package.train", module=True)
    with pytest.raises(ConfigurationError, match="no module 'some_package'"):
        check_request(request)
    (tmp_path / "some_package").mkdir()
    (tmp_path / "some_package" / "__init__.py").write_text("raise RuntimeError('the launcher must not import it')")
    check_request(request)


@pytest.mark.parametrize("name", ["", "train.py", "package..train", ".train"])
def test_what_cannot_be_a_module_is_refused(script, name, monkeypatch):
    monkeypatch.chdir(os.path.dirname(script))
    with pytest.raises(ConfigurationError, match="not a valid module name"):
        check_request(LaunchRequest(target=name, module=True))


@pytest.mark.parametrize("name", ["", "x" * 300, "x" * 300 + "/train.py"])
def test_what_cannot_be_a_file_does_not_exist(name):
    with pytest.raises(ConfigurationError, match="does not exist"):
        check_request(LaunchRequest(target=name))


@pytest.mark.parametrize("folder", ["below", "x" * 300])
def test_logs_need_a_folder_that_can_be_made(script, folder):
    plan = plan_launch(LaunchRequest(target=script, log_dir=f"{script}/{folder}"), HOST, CPU, {})
    with pytest.raises(ConfigurationError, match="cannot be written") as error:
        launch(plan)
    assert error.value.where == "--log-dir"


@pytest.mark.parametrize(("address", "said"), [("127.0.0.1", False), ("x" * 64 + ".example", True)])
def test_a_name_without_an_address_is_waited_for_and_said(script, address, said, capsys):
    _note_unknown_address(plan_launch(LaunchRequest(target=script, nnodes=2, master_addr=address), HOST, CPU, {}))
    assert ("(--master-addr) cannot be resolved" in capsys.readouterr().err) is said


def test_logs_cannot_go_into_a_file(script):
    with pytest.raises(ConfigurationError, match="is a file") as error:
        check_request(LaunchRequest(target=script, log_dir=script))
    assert error.value.where == "--log-dir"


def test_a_port_in_use_is_refused_before_anything_starts(script):
    with socket.socket() as taken:
        taken.bind(("", 0))
        taken.listen()
        port = taken.getsockname()[1]
        plan = plan_launch(LaunchRequest(target=script, master_port=port), HOST, CPU, {})
        with pytest.raises(ConfigurationError, match=f"Port {port}") as error:
            launch(plan)
    assert error.value.where == "--master-port"


def test_dry_run_prints_the_command_and_starts_nothing(script, capsys):
    assert main(["launch", "--nproc_per_node", "3", "--cpu", "--dry-run", script, "--epochs", "2"]) == 0
    out = capsys.readouterr().out
    assert out.startswith("3 ranks of")
    *_, rank, pid, kind, path, option, value = shlex.split(out.rstrip().rpartition("\n")[2])
    assert rank.endswith("_rank.py")
    assert (pid, kind, path, option, value) == ("LAUNCHER_PID", "script", script, "--epochs", "2")


def test_neuron_devices_are_counted_by_their_driver_files(tmp_path):
    for name in ("neuron0", "neuron11", "neuron_something", "neuron", "null"):
        (tmp_path / name).touch()
    assert count_neuron_devices(tmp_path) == 2


def test_the_machine_has_cores_and_memory():
    assert count_cores() >= 1
    assert memory_bytes() > 2**28


def test_one_machine_is_not_asked_about_others_if_its_rendezvous_fails(script):
    """As when the limit of open files is too low for a store; here somebody has taken the port meanwhile."""
    with socket.socket() as taken, mock.patch.dict(os.environ, {"LOGLEVEL": "ERROR"}):
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        request = LaunchRequest(target=script, nproc_per_node=1, master_port=taken.getsockname()[1])
        with pytest.raises(CommunicationError, match="cannot be used") as raised:
            run_ranks(plan_launch(request, HOST, CPU, {}))
    assert "how many files a process may have open (ulimit -n)" in str(raised.value)
    assert "--node-rank" not in str(raised.value)
