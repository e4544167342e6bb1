"""``launch --emit kubernetes``: a JobSet with the fields of the published schemas, whose launchers meet."""

from __future__ import annotations

import argparse
import re

import pytest
import yaml

from neuron_accel.cli.launch import add_arguments, request_of
from neuron_accel.cli.main import main
from neuron_accel.cli.parser import Parser
from neuron_accel.launch.cluster import find_machines
from neuron_accel.launch.kubernetes import _name

SCHEMA = {
    "apiVersion": str,
    "kind": str,
    "metadata": {"name": str},
    "spec": {
        "network": {"enableDNSHostnames": bool, "subdomain": str, "publishNotReadyAddresses": bool},
        "failurePolicy": {"maxRestarts": int, "rules": list, "restartStrategy": str},
        "successPolicy": {"operator": str, "targetReplicatedJobs": list},
        "startupPolicy": {"startupPolicyOrder": str},
        "suspend": bool,
        "ttlSecondsAfterFinished": int,
        "managedBy": str,
        "coordinator": {"replicatedJob": str, "jobIndex": int, "podIndex": int},
        "volumeClaimPolicies": list,
        "replicatedJobs": [{"name": str, "groupName": str, "replicas": int, "dependsOn": list, "template": dict}],
    },
}
"""The fields of jobset.x-k8s.io/v1alpha2 (api/jobset/v1alpha2/jobset_types.go of kubernetes-sigs/jobset), without its
status; those of the job template are Kubernetes' own."""


def check(value, schema, path="jobset"):
    if isinstance(schema, dict):
        assert isinstance(value, dict), path
        assert set(value) <= set(schema), path
        for name, inner in value.items():
            check(inner, schema[name], f"{path}.{name}")
    elif isinstance(schema, list):
        for index, inner in enumerate(value):
            check(inner, schema[0], f"{path}[{index}]")
    else:
        assert isinstance(value, schema), path
        assert not (schema is int and isinstance(value, bool)), path


@pytest.fixture
def emit(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "My_train.py").write_text("")

    def run(*options):
        code = main(["launch", "--emit", "kubernetes", *options, "My_train.py", "--lr", "1e-4"])
        text = capsys.readouterr()
        return code, yaml.safe_load(text.out), text.err

    return run


TRN1 = ["--nproc-per-node", "32", "--instance", "trn1.32xlarge", "--image", "registry/train:1"]


def job_of(found):
    (replicated,) = found["spec"]["replicatedJobs"]
    return replicated["template"]["spec"]


def test_a_job_set_has_the_fields_of_its_schema(emit):
    code, found, _ = emit(
        *TRN1, "--nnodes", "2", "--max-restarts", "3", "--claim", "data", "--cache-dir", "/data/cache"
    )
    assert code == 0
    check(found, SCHEMA)
    job, pod = job_of(found), job_of(found)["template"]["spec"]
    assert (job["completionMode"], job["completions"], job["parallelism"]) == ("Indexed", 2, 2)
    assert found["spec"]["failurePolicy"] == {"maxRestarts": 3}
    (container,) = pod["containers"]
    assert container["resources"]["limits"] == {"aws.amazon.com/neuron": 16, "vpc.amazonaws.com/efa": 8}
    assert pod["nodeSelector"] == {"node.kubernetes.io/instance-type": "trn1.32xlarge"}
    assert pod["terminationGracePeriodSeconds"] > 30
    mounts = {volume["name"] for volume in pod["volumes"]}
    assert {mount["name"] for mount in container["volumeMounts"]} == mounts == {"shared-memory", "data"}


def test_kubernetes_accepts_the_job(emit):
    validate = pytest.importorskip("kubernetes_validate", reason="kubernetes-validate is not installed").validate
    _, found, _ = emit(*TRN1, "--nnodes", "2", "--claim", "data", "--cache-dir", "/data/cache")
    job = {"apiVersion": "batch/v1", "kind": "Job", "metadata": found["metadata"], "spec": job_of(found)}
    validate(job, "1.34", strict=True)


def test_the_launchers_of_the_pods_meet(emit):
    """As JobSet names pods: the set, the job, its index and theirs, in a subdomain with the name of the set."""
    _, found, _ = emit(*TRN1, "--nnodes", "2", "--max-restarts", "3")
    command = job_of(found)["template"]["spec"]["containers"][0]["command"]
    assert command[:2] == ["neuron-accel", "launch"]
    parser = Parser(prog="launch")
    add_arguments(parser)
    for index in ("0", "1"):
        args: argparse.Namespace = parser.parse_args(command[2:])
        environ = {"JOB_COMPLETION_INDEX": index, "KUBERNETES_SERVICE_HOST": "10.0.0.1"}
        assert find_machines(environ, 29500).rank == int(index)
        request = request_of(args, environ)
        assert (request.nnodes, request.node_rank, request.nproc_per_node) == (2, int(index), 32)
        assert request.master_addr == "my-train-machines-0-0.my-train"
        assert (request.max_restarts, request.arguments) == (0, ("--lr", "1e-4"))


def test_one_machine_needs_no_address(emit):
    _, found, _ = emit(*TRN1)
    check(found, SCHEMA)
    container = job_of(found)["template"]["spec"]["containers"][0]
    assert container["resources"]["limits"] == {"aws.amazon.com/neuron": 16}
    assert not [word for word in container["command"] if word.startswith(("--master", "--nnodes"))]


@pytest.mark.parametrize(
    ("target", "name"),
    [("My_train.py", "my-train"), ("runs/2_b.py", "train-2-b"), ("_.py", "train"), ("a" * 39 + "_b.py", "a" * 39)],
)
def test_the_name_is_one_that_a_service_may_have(target, name):
    assert _name(target) == name
    assert re.fullmatch(r"[a-z]([-a-z0-9]*[a-z0-9])?", name)


@pytest.mark.parametrize(
    ("options", "what"),
    [
        (["--instance", "trn1.32xlarge", "--nproc-per-node", "32"], "need a container image"),
        ([*TRN1, "--claim", "data", "--cache-dir", "cache"], "--cache-dir cache is not on the volume data"),
        ([*TRN1, "--claim", "data", "--log-dir", "logs"], "--log-dir logs is not on the volume data"),
        ([*TRN1, "--nnodes", "2:4"], "is not possible in a JobSet"),
        ([*TRN1, "--slurm", "train.sbatch"], "--slurm and --emit exclude each other"),
    ],
)
def test_what_a_job_set_cannot_be_is_an_error(emit, options, what):
    code, _, error = emit(*options)
    assert code == 2
    assert what in " ".join(error.split())


@pytest.mark.parametrize("option", ["--image", "--claim"])
def test_options_of_a_job_set_need_one(tmp_path, capsys, option):
    (tmp_path / "train.py").write_text("")
    assert main(["launch", option, "x", str(tmp_path / "train.py")]) == 2
    assert f"{option} has no effect without --emit" in capsys.readouterr().err
