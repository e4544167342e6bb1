"""Slurm on this machine: its own controller, three nodes and munge, which the tests start and stop (as root)."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import pytest

NODES = ("n1", "n2", "n3")
DAEMONS = ("slurmctld", "slurmd", "sbatch", "munged", "unshare")

CONFIGURATION = """\
ClusterName=tests
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={port}
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge/socket
CredType=cred/munge
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool/%n
SlurmctldPidFile={folder}/state/pid
SlurmdPidFile={folder}/spool/%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/linear
SwitchType=switch/none
MpiDefault=none
ReturnToService=1
SlurmdTimeout=30
KillWait=5
JobRequeue=1
SlurmdParameters=config_overrides
NodeName={nodes} NodeAddr=127.0.0.1 NodeHostname={host} Port=[{first}-{last}] CPUs=1 State=UNKNOWN
PartitionName=all Nodes={nodes} Default=YES MaxTime=INFINITE State=UP
"""

# The nodes have names that only they know: a mount namespace with a hosts file of its own.
START = """\
set -e
cp /etc/hosts hosts && echo "127.0.0.1 {names}" >> hosts && mount --bind hosts /etc/hosts
munged --foreground --key-file=$PWD/munge/key --socket=$PWD/munge/socket --pid-file=$PWD/munge/pid \
  --log-file=$PWD/munge/log --seed-file=$PWD/munge/seed --force &
until [ -S munge/socket ]; do sleep 0.1; done
slurmctld -D & for node in {names}; do slurmd -D -N $node & done
wait
"""


class Cluster:
    """Commands of Slurm, in the environment of the cluster.

    Args:
        environ: names its configuration.
    """

    def __init__(self, environ: dict[str, str]) -> None:
        self._environ = environ

    def run(self, *words: str, cwd: Path | None = None, environ: Mapping[str, str] | None = None) -> str:
        """Returns what a command prints."""
        env = self._environ if environ is None else {**environ, "SLURM_CONF": self._environ["SLURM_CONF"]}
        done = subprocess.run(words, env=env, cwd=cwd, capture_output=True, text=True, timeout=60, check=False)
        assert done.returncode == 0, f"{words}: {done.stderr}"
        return done.stdout.strip()

    def submit(self, *words: str, cwd: Path, environ: Mapping[str, str] | None = None) -> str:
        """Submits a batch file, whose job gets these variables. Returns the job's number."""
        return self.run("sbatch", "--parsable", *words, cwd=cwd, environ=environ)

    def job(self, number: str) -> dict[str, str]:
        """Returns what is known of a job."""
        text = self.run("scontrol", "--oneliner", "show", "job", number).splitlines()[0]
        return dict(pair.partition("=")[::2] for pair in text.split() if "=" in pair)

    def wait(self, until: Callable[[], bool], what: str, seconds: float = 90.0) -> None:
        deadline = time.monotonic() + seconds * float(os.environ["NEURON_ACCEL_TIMEOUT_FACTOR"])
        while not until():
            assert time.monotonic() < deadline, f"no {what}: {self.run('squeue', '--long')}"
            time.sleep(0.2)

    def end(self, number: str, seconds: float = 150.0) -> dict[str, str]:
        """Waits until a job has ended. Returns what is known of it."""
        running = ("PENDING", "RUNNING", "COMPLETING", "CONFIGURING", "REQUEUED")
        self.wait(lambda: self.job(number)["JobState"] not in running, f"end of job {number}", seconds)
        return self.job(number)

    def start_at_once(self, number: str) -> None:
        """Waits until a job is queued again, and starts it: Slurm lets two minutes pass by default."""
        self.wait(lambda: self.job(number)["Restarts"] != "0", "requeue")
        self.wait(lambda: self.job(number)["JobState"] == "PENDING", "requeued job")
        self.run("scontrol", "update", f"JobId={number}", "StartTime=now")


def free_ports(count: int) -> range:
    """Neighbouring ports that nothing listens on."""
    for first in range(17000, 30000, count):
        with_sockets = [socket.socket() for _ in range(count)]
        try:
            for index, probe in enumerate(with_sockets):
                probe.bind(("127.0.0.1", first + index))
        except OSError:
            continue
        finally:
            for probe in with_sockets:
                probe.close()
        return range(first, first + count)
    raise OSError("no free ports")


@pytest.fixture(scope="session")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    missing = [name for name in DAEMONS if shutil.which(name) is None]
    if missing or os.getuid() != 0 or not os.environ.get("NEURON_ACCEL_SLURM"):
        pytest.skip("starts Slurm's daemons as root: nox -s slurm (Debian: slurmctld slurmd slurm-client munge)")
    folder = tmp_path_factory.mktemp("slurm")
    for name in ("munge", "state", *(f"spool/{node}" for node in NODES)):
        (folder / name).mkdir(parents=True, mode=0o700)
    (folder / "munge" / "key").write_bytes(os.urandom(1024))
    (folder / "munge" / "key").chmod(0o400)
    controller, *ports = free_ports(1 + len(NODES))
    configuration = folder / "slurm.conf"
    nodes = f"n[1-{len(NODES)}]"
    places = {"folder": folder, "host": socket.gethostname(), "nodes": nodes}
    configuration.write_text(CONFIGURATION.format(port=controller, first=ports[0], last=ports[-1], **places))
    environ = {name: value for name, value in os.environ.items() if not name.startswith("SLURM_")}
    environ["SLURM_CONF"] = str(configuration)
    start = START.format(names=" ".join(NODES))
    with (folder / "output.log").open("w") as output:
        daemons = subprocess.Popen(
            ["unshare", "--mount-proc", "--pid", "--fork", "--kill-child", "bash", "-c", start],
            cwd=folder,
            env=environ,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
        )
    found = Cluster(environ)
    try:
        found.wait(lambda: _idle(environ) == len(NODES), "nodes")
        yield found
    finally:
        daemons.kill()  # and with it everything in its process namespace
        daemons.wait()


def _idle(environ: dict[str, str]) -> int:
    words = ["sinfo", "--noheader", "--Node", "--states=idle"]
    done = subprocess.run(words, env=environ, capture_output=True, text=True, timeout=60)
    return len(done.stdout.split("\n")) - 1 if done.returncode == 0 else 0
