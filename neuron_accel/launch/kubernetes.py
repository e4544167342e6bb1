# SPDX-License-Identifier: Apache-2.0
"""A JobSet of Kubernetes for a launch: one pod for each machine, which runs the launcher.

JobSet (jobset.x-k8s.io/v1alpha2) gives each pod an index and a host name, and creates all of them again after a
failure; the script goes on from its latest checkpoint.
"""

from __future__ import annotations

import math
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

from neuron_accel.errors import ConfigurationError
from neuron_accel.launch.plan import LaunchPlan
from neuron_accel.launch.request import DEFAULT_MASTER_PORT
from neuron_accel.neuron.cache import is_s3
from neuron_accel.neuron.instances import Instance, find_instance

GROUP = "machines"
"""Name of the pods' replicated job, which is part of their host names."""
NEURON, EFA = "aws.amazon.com/neuron", "vpc.amazonaws.com/efa"
"""Resources of the device plugins: a Trainium chip, and a network interface."""
INSTANCE_LABEL = "node.kubernetes.io/instance-type"
ROOM_SECONDS = 30
"""Time between the end of ``--grace`` and the end of a pod."""


def describe_job_set(plan: LaunchPlan, image: str | None, claim: str | None) -> dict[str, Any]:
    """Returns a JobSet.

    Args:
        plan: the launch.
        image: the container image, with this package and the script.
        claim: a PersistentVolumeClaim for ``--cache-dir`` and ``--log-dir``, which must be below ``/data``.

    Raises:
        ConfigurationError: if there is no image, if the number of machines varies, or if a folder is not on the volume.
    """
    request = plan.request
    if not image:
        raise ConfigurationError(
            "The pods need a container image.", where="--image", fix="pass the image that has the script"
        )
    if plan.is_elastic:
        raise ConfigurationError(
            f"--nnodes {plan.fewest}:{request.nnodes} is not possible in a JobSet.",
            where="--emit kubernetes",
            why="it has a fixed number of pods, and creates all of them again if one is lost",
            fix="pass one number of machines, and --max-restarts",
        )
    for option, place in (("--cache-dir", request.cache_dir), ("--log-dir", request.log_dir)):
        if claim and place and not is_s3(place) and not f"{place}/".startswith("/data/"):
            raise ConfigurationError(
                f"{option} {place} is not on the volume {claim}.",
                where=option,
                why="the volume is mounted at /data, and what a pod writes elsewhere goes with it",
                fix="pass a folder below /data, or an s3:// location of the cache",
            )
    name = _name(request.target)
    instance = find_instance(request.instance) if request.instance else None
    words = replace(request, max_restarts=0).words()
    if request.nnodes > 1:
        first, port = f"{name}-{GROUP}-0-0.{name}", request.master_port or DEFAULT_MASTER_PORT
        words = [f"--nnodes={request.nnodes}", f"--master-addr={first}", f"--master-port={port}", *words]
    container: dict[str, Any] = {
        "name": "launcher",
        "image": image,
        "command": ["neuron-accel", "launch", *words],
        "volumeMounts": [{"name": "shared-memory", "mountPath": "/dev/shm"}],
    }
    volumes: list[dict[str, Any]] = [{"name": "shared-memory", "emptyDir": {"medium": "Memory"}}]
    if claim:
        container["volumeMounts"].append({"name": "data", "mountPath": "/data"})
        volumes.append({"name": "data", "persistentVolumeClaim": {"claimName": claim}})
    pod: dict[str, Any] = {
        "restartPolicy": "Never",
        "terminationGracePeriodSeconds": math.ceil(request.grace) + ROOM_SECONDS,
        "containers": [container],
        "volumes": volumes,
    }
    if instance is not None:
        pod["nodeSelector"] = {INSTANCE_LABEL: instance.name}
        container["resources"] = {"limits": _devices(instance, request.nnodes)}
    job = {
        "completionMode": "Indexed",
        "completions": request.nnodes,
        "parallelism": request.nnodes,
        "backoffLimit": 0,
        "template": {"spec": pod},
    }
    return {
        "apiVersion": "jobset.x-k8s.io/v1alpha2",
        "kind": "JobSet",
        "metadata": {"name": name},
        "spec": {
            "network": {"enableDNSHostnames": True, "publishNotReadyAddresses": True},
            "failurePolicy": {"maxRestarts": request.max_restarts},
            "replicatedJobs": [{"name": GROUP, "replicas": 1, "template": {"spec": job}}],
        },
    }


def _name(target: str) -> str:
    """A name for a service of Kubernetes: lower-case letters, digits and dashes, of which the first is a letter."""
    name = re.sub(r"[^a-z0-9]+", "-", Path(target).stem.lower())[:40].strip("-")
    return name if name[:1].isalpha() else f"train-{name}".strip("-")


def _devices(instance: Instance, nnodes: int) -> dict[str, int]:
    found = {NEURON: instance.chips // instance.hosts}
    if nnodes > 1 and instance.efa_interfaces:
        found[EFA] = instance.efa_interfaces
    return found
