"""Settings, checks and batch files of a launch on Trainium, without starting ranks."""

from __future__ import annotations

import dataclasses
import os
import re
import shlex
import shutil
import stat
import subprocess

import pytest

from neuron_accel.backends.select import Decision
from neuron_accel.cli.main import main
from neuron_accel.errors import ConfigurationError, PlanError
from neuron_accel.launch.host import Host, kernel_version, read_mounts
from neuron_accel.launch.plan import plan_launch
from neuron_accel.launch.request import LaunchRequest
from neuron_accel.neuron import CompileCache
from neuron_accel.neuron.environment import hardware_of_run

CPU = Decision(backend="torch", device="cpu", reason="no accelerator can be used")
NEURON = Decision(backend="torch", device="neuron", reason="torch has a native neuron device")
XLA = Decision(backend="xla", device="xla", reason="this is Neuron hardware")
TRN1 = Host(cores=128, loopback="lo", torch_xla=True, neuron=True, instance="trn1.32xlarge", kernel=(5, 10))
TRN2 = dataclasses.replace(TRN1, instance="trn2.48xlarge", kernel=(6, 8))
LAPTOP = Host(cores=8, loopback="lo", torch_xla=False)


@pytest.fixture
def script(tmp_path):
    path = tmp_path / "train.py"
    path.write_text("")
    return str(path)


def plan(script, host, decision, environment=None, **options):
    return plan_launch(LaunchRequest(target=script, **options), host, decision, environment or {})


def settings(*args, **options):
    return {s.name: s.value for s in plan(*args, **options).settings if s.name != "OMP_NUM_THREADS"}


def test_one_trn1(script):
    assert settings(script, TRN1, XLA, nproc_per_node=32) == {
        "GLOO_SOCKET_IFNAME": "lo",
        "NEURON_RT_EXEC_TIMEOUT": "600",
        "NEURON_FUSE_SOFTMAX": "1",
        "MALLOC_ARENA_MAX": "64",
    }


def test_four_trn1_on_an_old_kernel(script):
    found = settings(script, TRN1, XLA, nproc_per_node=32, nnodes=4, master_addr="10.0.0.1")
    assert {name: value for name, value in found.items() if name.startswith("FI_")} == {
        "FI_PROVIDER": "efa",
        "FI_EFA_USE_DEVICE_RDMA": "1",
        "FI_EFA_FORK_SAFE": "1",
    }


UNKNOWN = dataclasses.replace(TRN1, instance=None, product="trn9.48xlarge")


def test_machines_of_an_unknown_kind_meet_over_efa_and_are_named(script):
    found = settings(script, UNKNOWN, XLA, nproc_per_node=32, nnodes=2, master_addr="10.0.0.1")
    assert {name for name in found if name.startswith("FI_")} == {
        "FI_PROVIDER",
        "FI_EFA_USE_DEVICE_RDMA",
        "FI_EFA_FORK_SAFE",
    }
    assert found["NEURON_RT_EXEC_TIMEOUT"] == "600"
    text = plan(script, UNKNOWN, XLA, nproc_per_node=32).explain()
    assert "instance not recognised: the product name of this machine is 'trn9.48xlarge'" in text
    assert "pass --instance" in text
    assert "not recognised" not in plan(script, UNKNOWN, XLA, nproc_per_node=32, instance="trn1.32xlarge").explain()
    assert "not recognised" not in plan(script, LAPTOP, CPU).explain()


def test_an_unknown_kind_takes_the_logical_cores_that_are_asked_for(script):
    found = settings(script, UNKNOWN, XLA, nproc_per_node=4, lnc=1)
    assert (found["NEURON_LOGICAL_NC_CONFIG"], found["NEURON_CC_FLAGS"]) == ("1", "-lnc=1")


def test_a_variant_of_a_known_kind_is_said(script):
    host = dataclasses.replace(TRN2, instance="trn3.48xlarge", product="trn3sn.48xlarge")
    assert "assuming a trn3.48xlarge" in plan(script, host, XLA, nproc_per_node=64).explain()
    same = dataclasses.replace(TRN2, product="trn2.48xlarge")
    assert "taken for" not in plan(script, same, XLA, nproc_per_node=64).explain()


def test_elsewhere_a_launch_for_an_instance_shows_and_checks_what_it_would_set_there(script):
    options = {"nproc_per_node": 2, "instance": "trn1.2xlarge"}
    (said,) = plan(script, LAPTOP, CPU, **options).remarks
    assert said == "on trn1.2xlarge with torch_xla, launch would set NEURON_RT_EXEC_TIMEOUT=600, NEURON_FUSE_SOFTMAX=1"
    (said,) = plan(script, LAPTOP, CPU, nproc_per_node=4, instance="trn2.3xlarge").remarks
    assert "on trn2.3xlarge with the native device, launch would set NEURON_LOGICAL_NC_CONFIG=2" in said
    assert (
        "removed in runtime 2.34"
        in plan(script, LAPTOP, CPU, {"NEURON_RT_ASYNC_EXEC_MAX_INFLIGHT_REQUESTS": "7"}, **options).explain()
    )
    for name, value in (("NEURON_CC_FLAGS", "--cache_size=10GB"), ("NEURON_RT_EXEC_TIMEOUT", "soon")):
        with pytest.raises(ConfigurationError, match=value.partition("=")[0]):
            plan(script, LAPTOP, CPU, {name: value}, **options)


def test_where_a_contradiction_of_caches_is(script):
    options = {"nproc_per_node": 2, "instance": "trn1.2xlarge", "cache_dir": "/tmp/b"}
    with pytest.raises(ConfigurationError, match="contradict") as caught:
        plan(script, TRN1, XLA, {"NEURON_COMPILE_CACHE_URL": "/tmp/a"}, **options)
    assert caught.value.where == "environment variable NEURON_COMPILE_CACHE_URL; --cache-dir"
    plan(script, LAPTOP, CPU, {"NEURON_COMPILE_CACHE_URL": "/tmp/a"}, **options)  # that of this machine


def test_two_jobs_on_one_machine_do_not_meet(script):
    values = set()
    for cores in ("0-7", "8-15"):
        found = settings(script, TRN1, XLA, {"NEURON_RT_VISIBLE_CORES": cores}, nproc_per_node=8)
        values.add(found["NEURON_RT_ROOT_COMM_ID"])
    assert len(values) == 2
    native = settings(script, TRN2, NEURON, {"NEURON_RT_VISIBLE_CORES": "0-7"}, nproc_per_node=8)
    assert "NEURON_RT_ROOT_COMM_ID" not in native
    given = {"NEURON_RT_VISIBLE_CORES": "0-7", "NEURON_RT_ROOT_COMM_ID": "10.0.0.1:46820"}
    assert "NEURON_RT_ROOT_COMM_ID" not in settings(script, TRN1, XLA, given, nproc_per_node=8)


def test_flags_that_may_be_a_slip_and_shared_caches_are_said(script):
    host = dataclasses.replace(TRN1, mounts=(("/", "ext4"), ("/fsx", "lustre")), name="trn-1")
    environment = {"NEURON_CC_FLAGS": "-O1 -O2"}
    text = plan(
        script, host, XLA, environment, nproc_per_node=32, cache_dir="/fsx/cache", compiler_flags="--verbse=3"
    ).explain()
    for words in ("-O1 is overridden by -O2", "did you mean --verbose?", "the compile cache /fsx/cache is on lustre"):
        assert words in text
    own = plan(script, host, XLA, nproc_per_node=32, cache_dir="/fsx/trn-1").explain()
    assert "lustre" not in own


def test_file_systems_are_read_below_any_root(tmp_path):
    (tmp_path / "proc").mkdir()
    (tmp_path / "proc" / "mounts").write_text("fs-1:/ /my\\040efs nfs4 rw 0 0\nbroken\n")
    assert read_mounts(tmp_path) == (("/my efs", "nfs4"),)
    assert read_mounts(tmp_path / "nowhere") == ()


def test_trn2_tells_runtime_and_compiler_the_same(script):
    for lnc in (None, 1):
        found = settings(script, TRN2, XLA, nproc_per_node=64, lnc=lnc)
        assert found["NEURON_LOGICAL_NC_CONFIG"] == str(lnc or 2)
        assert found["NEURON_CC_FLAGS"] == f"-lnc={lnc or 2}"
    native = settings(script, TRN2, NEURON, nproc_per_node=64)
    assert native["NEURON_LOGICAL_NC_CONFIG"] == "2"
    assert "NEURON_CC_FLAGS" not in native


def test_what_is_set_stays_and_flags_are_merged(script):
    environment = {"NEURON_RT_EXEC_TIMEOUT": "30", "NEURON_CC_FLAGS": "--model-type transformer"}
    cache = {"cache_dir": "/fsx/cache", "retry_failed_compilation": True}
    found = settings(script, TRN1, XLA, environment, nproc_per_node=32, **cache, compiler_flags="-O1")
    assert "NEURON_RT_EXEC_TIMEOUT" not in found
    assert found["NEURON_CC_FLAGS"] == (
        "--model-type=transformer -O1 --cache_dir=/fsx/cache --retry_failed_compilation"
    )
    assert found["NEURON_COMPILE_CACHE_URL"] == "/fsx/cache"


def test_why_is_said_and_remarks_are_made(script):
    environment = {"NEURON_RT_ASYNC_EXEC_MAX_INFLIGHT_REQUESTS": "7", "XLA_USE_BF16": "1"}
    text = plan(script, TRN1, XLA, environment, nproc_per_node=32).explain()
    assert "MALLOC_ARENA_MAX=64" in text
    assert "host memory" in text
    assert "NEURON_RT_ASYNC_EXEC_MAX_INFLIGHT_REQUESTS=7: removed in runtime 2.34" in text
    assert "XLA_USE_BF16=1: deprecated" in text
    assert "note" not in plan(script, LAPTOP, CPU, environment).explain()


def test_a_rehearsal_on_a_laptop_keeps_the_limits_of_the_instance(script):
    found = settings(script, LAPTOP, CPU, nproc_per_node=8, instance="trn1.32xlarge")
    assert found["NEURON_ACCEL_INSTANCE"] == "trn1.32xlarge"
    assert "NEURON_RT_EXEC_TIMEOUT" not in found
    with pytest.raises(PlanError, match="start 2 or 8 ranks"):
        plan(script, LAPTOP, CPU, nproc_per_node=4, instance="trn1.32xlarge")


@pytest.mark.parametrize(
    ("host", "decision", "environment", "options", "words"),
    [
        (LAPTOP, CPU, {}, {"instance": ""}, ["'' is not a known Trainium instance", "--instance"]),
        (LAPTOP, CPU, {}, {"instance": "trn1.32x"}, ["'trn1.32x' is not a known Trainium instance", "trn1.32xlarge"]),
        (LAPTOP, CPU, {"NEURON_ACCEL_INSTANCE": "p4d"}, {}, ["'p4d' is not a known Trainium", "NEURON_ACCEL_INSTANCE"]),
        (TRN1, XLA, {}, {"nproc_per_node": 16}, ["16 ranks cannot run on trn1.32xlarge", "start 8 or 32 ranks"]),
        (
            TRN1,
            XLA,
            {},
            {"nproc_per_node": 16, "nnodes": 2, "master_addr": "a"},
            ["16 ranks on each of 2 trn1.32xlarge", "pass 32"],
        ),
        (TRN1, XLA, {}, {"nproc_per_node": 32, "lnc": 2}, ["does not exist on trn1.32xlarge"]),
        (TRN1, XLA, {"NEURON_CC_FLAGS": "-O2"}, {"compiler_flags": "-O1", "nproc_per_node": 32}, ["-O2 and -O1"]),
        (TRN1, XLA, {"NEURON_CC_FLAGS": "--auto-cast"}, {"nproc_per_node": 32}, ["--auto-cast has no value"]),
        (
            TRN2,
            XLA,
            {"NEURON_LOGICAL_NC_CONFIG": "1"},
            {"nproc_per_node": 64},
            ["NEURON_LOGICAL_NC_CONFIG=1", "-lnc=2"],
        ),
        (TRN1, XLA, {"NEURON_RT_VISIBLE_CORES": "0-3"}, {"nproc_per_node": 8}, ["4 cores are visible to 8 ranks"]),
        (TRN1, XLA, {"NEURON_RT_EXEC_TIMEOUT": "soon"}, {"nproc_per_node": 32}, ["NEURON_RT_EXEC_TIMEOUT=soon"]),
        (TRN2, NEURON, {}, {"nproc_per_node": 64, "compiler_flags": "-O1"}, ["-O1 has no effect on the native"]),
        (LAPTOP, CPU, {}, {"compiler_flags": "-O1"}, ["--compiler-flags has no effect here"]),
        (LAPTOP, CPU, {}, {"cache_dir": "/x"}, ["--cache-dir has no effect here"]),
        (LAPTOP, CPU, {}, {"lnc": 2}, ["--lnc has no effect here"]),
    ],
)
def test_what_cannot_be_is_refused(script, host, decision, environment, options, words):
    with pytest.raises((ConfigurationError, PlanError)) as caught:
        plan(script, host, decision, environment, **options)
    for word in words:
        assert word in str(caught.value)
    assert caught.value.fix


def test_a_cache_that_cannot_be_written_stops_the_launch(script, tmp_path, capsys, monkeypatch):
    for name in ("ACCELERATE_USE_CPU", "USE_TORCH_XLA"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("NEURON_ACCEL_BACKEND", "xla")
    monkeypatch.setattr("neuron_accel.cli.launch.Machine", WithXla)
    (tmp_path / "file").write_text("")
    assert main(["launch", "--cache-dir", str(tmp_path / "file"), script]) == 2
    assert "compile cache cannot be written" in capsys.readouterr().err


def test_a_cache_that_is_switched_off_need_not_be_writable(tmp_path):
    (tmp_path / "file").write_text("")
    cache = CompileCache(location=str(tmp_path / "file"))
    cache.check_writable({"NEURON_CC_FLAGS": "--no_cache"})
    with pytest.raises(ConfigurationError, match="cannot be written"):
        cache.check_writable({})


def test_a_cache_below_the_home_folder(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    cache = CompileCache(location="~/cache")
    assert cache.location == str(tmp_path / "cache")
    assert cache.flags()[0].value == cache.location


class WithXla:
    native_neuron = xla_neuron = neuron_hardware = cuda = False
    torch_xla = True
    native_problem = None

    def __init__(self, *, apart=False):
        pass


def test_versions_of_linux():
    assert kernel_version("5.10.224-212.876.amzn2.x86_64") == (5, 10)
    assert kernel_version("6.8.0-1021-aws") == (6, 8)
    assert kernel_version("unknown") is None


def test_the_hardware_of_a_run(tmp_path):
    product = tmp_path / "product_name"
    product.write_text("trn2.48xlarge\n")
    assert hardware_of_run({}, CPU, product) is None
    assert hardware_of_run({"PJRT_DEVICE": "CPU"}, XLA, product) is None
    assert hardware_of_run({}, XLA, product).full == 64
    assert hardware_of_run({"NEURON_LOGICAL_NC_CONFIG": "1"}, NEURON, product).full == 128
    assert hardware_of_run({"NEURON_ACCEL_INSTANCE": "trn1.2xlarge"}, CPU, product).full == 2
    with pytest.raises(ConfigurationError, match="NEURON_LOGICAL_NC_CONFIG"):
        hardware_of_run({"NEURON_LOGICAL_NC_CONFIG": "3"}, NEURON, product)


# ---- Slurm -----------------------------------------------------------------------------------------------------------
FAKE_SRUN = """#!/bin/bash
# runs the task once for each node, as srun with one task a node does
echo "srun $1 $2" >> "$RECORD"
shift 2
for node in $(seq 0 $((SLURM_NNODES - 1))); do SLURM_NODEID=$node "$@" || exit $?; done
"""
FAKE_SCONTROL = """#!/bin/bash
[ "$1" = "requeue" ] && { echo "requeue $2" >> "$RECORD"; exit; }
[ "$1 $2" = "show hostnames" ] && [ "$3" = "trn[1-2]" ] && printf 'trn1\\ntrn2\\n'
"""
FAKE_COMMAND = """#!/bin/bash
printf '%s\\n' "$@" >> "$RECORD"
echo end >> "$RECORD"
exit "${FAKE_EXIT:-0}"
"""


@pytest.fixture
def cluster(tmp_path):
    """A folder of fake commands, and a function that runs a batch file among them."""
    tools = tmp_path / "tools"
    tools.mkdir()
    for name, text in (("srun", FAKE_SRUN), ("scontrol", FAKE_SCONTROL), ("neuron-accel", FAKE_COMMAND)):
        (tools / name).write_text(text)
        (tools / name).chmod(0o755)
    record = tmp_path / "record"

    def run(path, ends_with=0, restarts=0):
        record.write_text("")
        job = {"SLURM_JOB_NODELIST": "trn[1-2]", "SLURM_NNODES": "2", "SLURM_JOB_ID": "2042"}
        environment = {"PATH": f"{tools}:{os.environ['PATH']}", "RECORD": str(record), **job}
        environment |= {"FAKE_EXIT": str(ends_with), "SLURM_RESTART_COUNT": str(restarts)}
        done = subprocess.run([str(path)], env=environment, capture_output=True, text=True)
        assert done.returncode == ends_with, done.stderr
        first, *rest = record.read_text().splitlines()
        assert re.fullmatch(r"srun --wait=\d+ --export=ALL", first)
        return [part.split("\n") for part in "\n".join(rest).removesuffix("\nend").split("\nend\n")]

    return run


@pytest.mark.skipif(shutil.which("bash") is None, reason="there is no bash")
def test_batch_files_are_ready(script, tmp_path, capsys, cluster):
    path = tmp_path / "train.sbatch"
    options = ["--nproc-per-node", "32", "--nnodes", "2", "--instance", "trn1.32xlarge", "--max-restarts", "1"]
    assert main(["launch", *options, "--slurm", str(path), script, "--name", "it's $HOME; `x`"]) == 0
    assert f"sbatch --parsable {shlex.quote(str(tmp_path / 'train_compile.sbatch'))}) &&" in capsys.readouterr().out
    compiling = tmp_path / "train_compile.sbatch"
    for file in (path, compiling):
        assert subprocess.run(["bash", "-n", str(file)]).returncode == 0
        assert file.stat().st_mode & stat.S_IXUSR
        text = file.read_text()
        assert "#SBATCH --nodes=2" in text
        assert "#SBATCH --ntasks-per-node=1" in text
    rest = ["--master-addr", "trn1", "--master-port", "29542", "--nproc-per-node=32", "--max-restarts=1"]
    rest += ["--instance=trn1.32xlarge", script, "--name", "it's $HOME; `x`"]
    for machine, words in enumerate(cluster(path)):
        assert words == ["launch", "--nnodes", "2", "--node-rank", str(machine), *rest]
    for machine, words in enumerate(cluster(compiling)):
        start = ["precompile", "--", "neuron-accel", "launch", "--nnodes", "2", "--node-rank", str(machine)]
        assert words == [*start, *rest]


@pytest.mark.skipif(shutil.which("bash") is None, reason="there is no bash")
@pytest.mark.parametrize(
    ("given", "written"),
    [("it's $HOME", "it's $HOME/{host}"), ("/local/{host}/x", "/local/{host}/x"), ("s3://bucket/x", "s3://bucket/x")],
)
def test_machines_of_a_batch_have_a_cache_each_and_the_tool_fills_it(script, tmp_path, capsys, cluster, given, written):
    path = tmp_path / "train.sbatch"
    options = ["--nproc-per-node", "32", "--nnodes", "2", "--instance", "trn1.32xlarge", "--cache-dir", given]
    assert main(["launch", *options, "--slurm", str(path), script]) == 0
    assert ("--nodelist" in capsys.readouterr().out) is ("{host}" in written)
    for words in cluster(path):
        assert f"--cache-dir={written}" in words
    for words in cluster(tmp_path / "train_compile.sbatch"):
        assert words[:5] == ["precompile", f"--cache-dir={written}", "--", "neuron-accel", "launch"]
        assert words.count(f"--cache-dir={written}") == 2


@pytest.mark.skipif(shutil.which("bash") is None, reason="there is no bash")
def test_a_job_that_sigterm_or_a_lost_machine_ended_is_queued_again(script, tmp_path, capsys, cluster):
    path = tmp_path / "train.sbatch"
    options = ["--nproc-per-node", "32", "--nnodes", "2", "--grace", "90", "--requeue", "--slurm", str(path), script]
    assert main(["launch", "--instance", "trn1.32xlarge", *options]) == 0
    assert "#SBATCH --requeue\n#SBATCH --open-mode=append\n#SBATCH --signal=TERM@120\n# Trains" in path.read_text()
    assert "requeue" not in (tmp_path / "train_compile.sbatch").read_text()
    for ends_with, queued_again in ((0, False), (1, False), (143, True), (75, True)):
        last = cluster(path, ends_with)[-1]
        assert (last == ["requeue 2042"]) is queued_again
    assert cluster(path, 75, restarts=99)[-1] == ["requeue 2042"]
    assert cluster(path, 75, restarts=100)[-1] != ["requeue 2042"]
    assert main(["launch", "--requeue", script]) == 2
    assert "--requeue has no effect without --slurm" in capsys.readouterr().err


def test_batch_files_that_are_only_shown(script, tmp_path, capsys):
    assert main(["launch", "--dry-run", "--slurm", str(tmp_path), script]) == 0
    shown = capsys.readouterr().out
    for name in ("run.slurm", "compile.slurm"):
        assert f"# would be written to {tmp_path / name}\n#!/bin/bash\n" in shown
        assert not (tmp_path / name).exists()


def test_a_batch_file_takes_the_place_of_an_earlier_one_and_of_nothing_else(script, tmp_path, capsys):
    path = tmp_path / "my run.sbatch"
    for nodes in ("1", "2"):
        assert main(["launch", "--nnodes", nodes, "--slurm", str(path), script]) == 0
    assert "#SBATCH --job-name=my_run\n#SBATCH --nodes=2\n" in path.read_text()
    assert f"next: sbatch '{path}'" in capsys.readouterr().out
    (tmp_path / "own.py").write_text("import torch\n")
    assert main(["launch", "--slurm", str(tmp_path / "own.py"), script]) == 2
    assert "would be overwritten" in capsys.readouterr().err
    assert (tmp_path / "own.py").read_text() == "import torch\n"
    assert not (tmp_path / "own_compile.py").exists()


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--slurm", ""], "The path is empty"),
        (["--slurm", "x.sbatch", "--master-port", "64536"], "Port 64536 is too high"),
        (["--slurm", "x.sbatch", "--nnodes", "2:4"], "is not possible in a batch file"),
        (["--slurm", "x.sbatch", "--instance", "trn9"], "not a known Trainium instance"),
    ],
)
def test_a_batch_file_that_could_not_work_is_refused(script, tmp_path, capsys, monkeypatch, options, words):
    monkeypatch.chdir(tmp_path)
    assert main(["launch", *options, script]) == 2
    assert words in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["train.py"]


def test_a_batch_file_that_cannot_be_written(script, tmp_path, capsys):
    assert main(["launch", "--slurm", str(tmp_path / "nowhere" / "x.sbatch"), script]) == 2
    assert "cannot be written" in capsys.readouterr().err
