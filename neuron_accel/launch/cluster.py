# SPDX-License-Identifier: Apache-2.0
"""The machines of a launch, from the environment variables of a cluster's scheduler. Pure functions.

Schedulers start one process on each machine (a task, a pod, a container) and set environment variables with its index.
Each function reads the variables of one scheduler. Options of the command line take precedence over them.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass

from neuron_accel.errors import ConfigurationError

JOB_PORTS = 1000
"""Number of rendezvous ports: a job uses the first port plus its number modulo this, so that two jobs on a machine
rarely use the same one."""


@dataclass(frozen=True, kw_only=True)
class Machines:
    """The machines of a launch, according to a scheduler.

    Args:
        count: number of machines; None if the scheduler does not set it.
        rank: index of this machine, from 0.
        address: address of machine 0; None if the scheduler does not set it.
        port: port of the rendezvous; None for the default.
        fewest: the smallest number of machines, if their number varies.
        endpoint: address and port of torch's rendezvous, if the scheduler sets it.
        source: the scheduler and its variables, for messages.
    """

    count: int | None
    rank: int
    address: str | None = None
    port: int | None = None
    fewest: int | None = None
    endpoint: str | None = None
    source: str


def find_machines(environ: Mapping[str, str], first_port: int) -> Machines | None:
    """Finds the machines of a launch in the variables of SageMaker, Kubernetes, Slurm or MPI.

    Args:
        environ: environment variables.
        first_port: port to which the number of a Slurm job is added.

    Returns:
        the machines; None without a scheduler, or if its variables do not describe several machines.

    Raises:
        ConfigurationError: if a variable has an invalid value, or the scheduler starts several processes on a machine.
    """
    for find in (_sagemaker, _operator, lambda environ: _slurm(environ, first_port), _mpi, _indexed_job):
        found = find(environ)
        if found is not None:
            return found
    return None


def _sagemaker(environ: Mapping[str, str]) -> Machines | None:
    """SageMaker: SM_HOSTS is a JSON list of all hosts, SM_CURRENT_HOST the name of this one."""
    text, own = environ.get("SM_HOSTS", "").strip(), environ.get("SM_CURRENT_HOST", "").strip()
    if not text or not own:
        return None
    try:
        hosts = json.loads(text)
    except ValueError:
        hosts = None
    if not isinstance(hosts, list) or own not in hosts:
        raise ConfigurationError(
            f"SM_HOSTS={text} does not contain this host, {own}.",
            where="environment variables SM_HOSTS and SM_CURRENT_HOST",
            why="SageMaker sets them to a JSON list of host names and to one of these names",
            fix="unset both, or pass --nnodes, --node-rank and --master-addr",
        )
    hosts = sorted(map(str, hosts), key=lambda name: [int(p) if p.isdecimal() else p for p in re.split(r"(\d+)", name)])
    source = "SageMaker (SM_HOSTS, SM_CURRENT_HOST)"
    return Machines(count=len(hosts), rank=hosts.index(own), address=hosts[0], source=source)


def _operator(environ: Mapping[str, str]) -> Machines | None:
    """PyTorchJob and TrainJob of Kubeflow: torchrun's options as PET_ variables, which torchrun reads outside of pods,
    too, or WORLD_SIZE and RANK of pods."""
    if "LOCAL_RANK" in environ:  # set for ranks, not for pods
        return None
    fewest, colon, most = environ.get("PET_NNODES", "").strip().partition(":")
    if colon:  # an elastic PyTorchJob
        return Machines(
            count=_number({"PET_NNODES": most}, "PET_NNODES"),
            rank=0,
            address=environ.get("PET_MASTER_ADDR") or environ.get("MASTER_ADDR") or None,
            port=_port(environ, "PET_MASTER_PORT") or _port(environ, "MASTER_PORT"),
            fewest=_number({"PET_NNODES": fewest}, "PET_NNODES"),
            endpoint=environ.get("PET_RDZV_ENDPOINT") or None,
            source="the Kubernetes operator (PET_NNODES, PET_RDZV_ENDPOINT)",
        )
    of_pods = (("WORLD_SIZE", "RANK", ""),) if "KUBERNETES_SERVICE_HOST" in environ else ()
    for count, rank, prefix in (("PET_NNODES", "PET_NODE_RANK", "PET_"), *of_pods):
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
    """A Slurm step (srun) with one task on each machine; not the batch script, which runs on the first machine only."""
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
    """The first host of a Slurm node list: ``trn07`` for ``trn[07-09,12],head``."""
    found = re.match(r"([^\[,]*)(?:\[([^\],-]*)[^\]]*\])?([^,\[]*)", nodes.strip())
    return "".join(part or "" for part in found.groups()) if found else nodes


def _mpi(environ: Mapping[str, str]) -> Machines | None:
    """Open MPI, MPICH and Intel MPI, with one process on each machine."""
    kinds = (
        ("Open MPI", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_LOCAL_SIZE"),
        ("MPI", "PMI_SIZE", "PMI_RANK", "MPI_LOCALNRANKS"),
    )
    for name, count, rank, local in kinds:
        if (
            _number(environ, count) > 1 and rank in environ and local in environ
        ):  # srun sets PMI_SIZE and PMI_RANK as well
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
    """An Indexed Job of Kubernetes, which sets the index of a pod but not the number of pods."""
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
            f"{name} starts several launchers on one machine.",
            where="neuron-accel launch",
            why="one launcher starts all ranks of its machine (--nproc-per-node)",
            fix=f"start one launcher on each machine: {fix}",
        )


def _number(environ: Mapping[str, str], name: str) -> int:
    text = environ.get(name, "").strip()
    if text and not text.isdecimal():
        raise ConfigurationError(
            f"{name}={text} is not a number.",
            where=f"environment variable {name}",
            why="the machines of a launch are determined from it",
            fix="unset it, or pass --nnodes, --node-rank and --master-addr",
        )
    return int(text or 0)


def _port(environ: Mapping[str, str], name: str) -> int | None:
    return _number(environ, name) or None
