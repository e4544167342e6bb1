"""Which machine of a launch this is, from what a cluster's scheduler sets. Pure.

Schedulers start one process on each machine (a task, a pod, a container) and tell it by variables which one it is. Each
function here reads those of one of them; what the user says with an option goes before.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass

from neuron_accel.errors import ConfigurationError

JOB_PORTS = 1000
"""Jobs that share a machine meet at different ports: the first one plus the job's number, modulo this."""


@dataclass(frozen=True, kw_only=True)
class Machines:
    """The machines of a launch, as a scheduler tells them.

    Args:
        count: how many; None where the scheduler does not say it.
        rank: which one this is, from 0.
        address: of machine 0; None where the scheduler does not say it.
        port: where they meet; None for the default.
        source: whose variables these are, and which.
    """

    count: int | None
    rank: int
    address: str | None = None
    port: int | None = None
    source: str


def find_machines(environ: Mapping[str, str], first_port: int) -> Machines | None:
    """What the scheduler says; None without one, or if it runs several independent processes for all it says.

    Args:
        environ: environment variables.
        first_port: from which ports are counted where a scheduler numbers its jobs.

    Raises:
        ConfigurationError: for variables that cannot be, or a scheduler that starts several processes on a machine.
    """
    for find in (_sagemaker, _operator, lambda environ: _slurm(environ, first_port), _mpi, _indexed_job):
        found = find(environ)
        if found is not None:
            return found
    return None


def _sagemaker(environ: Mapping[str, str]) -> Machines | None:
    """SageMaker: all hosts as JSON, and the name of this one."""
    text, own = environ.get("SM_HOSTS", "").strip(), environ.get("SM_CURRENT_HOST", "").strip()
    if not text or not own:
        return None
    try:
        hosts = json.loads(text)
    except ValueError:
        hosts = None
    if not isinstance(hosts, list) or own not in hosts:
        raise ConfigurationError(
            f"SM_HOSTS={text} does not name this host, {own}.",
            where="environment variables SM_HOSTS and SM_CURRENT_HOST",
            why="SageMaker sets them to a list of host names in JSON and to one of those",
            fix="unset both, or give --nnodes, --node-rank and --master-addr",
        )
    hosts = sorted(map(str, hosts), key=lambda name: [int(p) if p.isdecimal() else p for p in re.split(r"(\d+)", name)])
    source = "SageMaker (SM_HOSTS, SM_CURRENT_HOST)"
    return Machines(count=len(hosts), rank=hosts.index(own), address=hosts[0], source=source)


def _operator(environ: Mapping[str, str]) -> Machines | None:
    """PyTorchJob and TrainJob of Kubeflow: torchrun's options as PET_ variables, or ranks that are pods."""
    if "KUBERNETES_SERVICE_HOST" not in environ or "LOCAL_RANK" in environ:  # a rank has a LOCAL_RANK, a pod has none
        return None
    for count, rank, prefix in (("PET_NNODES", "PET_NODE_RANK", "PET_"), ("WORLD_SIZE", "RANK", "")):
        if environ.get(count, "").strip() and environ.get(rank, "").strip():
            return Machines(
                count=_number(environ, count),
                rank=_number(environ, rank),
                address=environ.get(f"{prefix}MASTER_ADDR") or environ.get("MASTER_ADDR") or None,
                port=_port(environ, f"{prefix}MASTER_PORT") or _port(environ, "MASTER_PORT"),
                source=f"the Kubernetes operator ({count}, {rank})",
            )
    return None


def _slurm(environ: Mapping[str, str], first_port: int) -> Machines | None:
    """A step of Slurm (srun) with one task on each machine. The batch script itself runs on the first one only."""
    count, nodes = _number(environ, "SLURM_STEP_NUM_NODES"), environ.get("SLURM_STEP_NODELIST", "")
    nodes = nodes or environ.get("SLURM_JOB_NODELIST", "")
    if count <= 1 or not nodes:
        return None
    _check_one_each("Slurm", _number(environ, "SLURM_STEP_NUM_TASKS") or count, count, "srun --ntasks-per-node=1")
    return Machines(
        count=count,
        rank=_number(environ, "SLURM_NODEID"),
        address=first_host(nodes),
        port=first_port + _number(environ, "SLURM_JOB_ID") % JOB_PORTS,
        source="Slurm (SLURM_STEP_NUM_NODES, SLURM_NODEID, SLURM_STEP_NODELIST)",
    )


def first_host(nodes: str) -> str:
    """The first machine of a list as Slurm writes it: ``trn[07-09,12],head`` begins with ``trn07``."""
    found = re.match(r"([^\[,]*)(?:\[([^\],-]*)[^\]]*\])?([^,\[]*)", nodes.strip())
    return "".join(part or "" for part in found.groups()) if found else nodes


def _mpi(environ: Mapping[str, str]) -> Machines | None:
    """Open MPI, and those that start ranks through Hydra (MPICH, Intel MPI): one process on each machine."""
    kinds = (
        ("Open MPI", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_LOCAL_SIZE"),
        ("MPI", "PMI_SIZE", "PMI_RANK", "MPI_LOCALNRANKS"),
    )
    for name, count, rank, local in kinds:
        if _number(environ, count) > 1 and rank in environ and local in environ:  # srun sets PMI's first two, too
            _check_one_each(name, _number(environ, local), 1, "mpirun --map-by ppr:1:node, or -ppn 1")
            return Machines(
                count=_number(environ, count),
                rank=_number(environ, rank),
                address=environ.get("MASTER_ADDR") or None,
                port=_port(environ, "MASTER_PORT"),
                source=f"{name} ({count}, {rank})",
            )
    return None


def _indexed_job(environ: Mapping[str, str]) -> Machines | None:
    """An Indexed Job of Kubernetes: pods know their index, and not how many they are."""
    if not environ.get("JOB_COMPLETION_INDEX", "").strip():
        return None
    return Machines(
        count=None,
        rank=_number(environ, "JOB_COMPLETION_INDEX"),
        address=environ.get("MASTER_ADDR") or None,
        port=_port(environ, "MASTER_PORT"),
        source="a Kubernetes Indexed Job (JOB_COMPLETION_INDEX)",
    )


def _check_one_each(name: str, processes: int, expected: int, fix: str) -> None:
    if processes != expected:
        raise ConfigurationError(
            f"{name} starts several launchers on a machine.",
            where="neuron-accel launch",
            why="one launcher starts all ranks of its machine (--nproc-per-node)",
            fix=f"start one on each machine: {fix}",
        )


def _number(environ: Mapping[str, str], name: str) -> int:
    text = environ.get(name, "").strip()
    if text and not text.isdecimal():
        raise ConfigurationError(
            f"{name}={text} is not a number.",
            where=f"environment variable {name}",
            why="machines of a launch are found from it",
            fix="unset it, or give --nnodes, --node-rank and --master-addr",
        )
    return int(text or 0)


def _port(environ: Mapping[str, str], name: str) -> int | None:
    return _number(environ, name) or None
