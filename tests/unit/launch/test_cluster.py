"""The machines of a launch, from the environment variables of schedulers."""

from __future__ import annotations

import pytest

from neuron_accel.cli.main import main
from neuron_accel.errors import ConfigurationError
from neuron_accel.launch.cluster import find_machines, first_host

SAGEMAKER = {"SM_HOSTS": '["algo-1", "algo-10", "algo-2"]', "SM_CURRENT_HOST": "algo-2"}
SLURM = {
    "SLURM_JOB_ID": "2042",
    "SLURM_JOB_NODELIST": "trn[01-04]",
    "SLURM_STEP_NUM_NODES": "2",
    "SLURM_STEP_NUM_TASKS": "2",
    "SLURM_STEP_NODELIST": "trn[03-04]",
    "SLURM_NODEID": "1",
}
POD = {"KUBERNETES_SERVICE_HOST": "10.0.0.1"}
OPERATOR = {**POD, "WORLD_SIZE": "4", "RANK": "3", "MASTER_ADDR": "job-master-0", "MASTER_PORT": "23456"}
TORCHRUN = {**OPERATOR, "WORLD_SIZE": "128", "PET_NNODES": "4", "PET_NODE_RANK": "2", "PET_MASTER_ADDR": "job-0-0.job"}
OPEN_MPI = {"OMPI_COMM_WORLD_SIZE": "2", "OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_LOCAL_SIZE": "1"}
HYDRA = {"PMI_SIZE": "3", "PMI_RANK": "2", "MPI_LOCALNRANKS": "1", "MASTER_ADDR": "head"}
INDEXED = {**POD, "JOB_COMPLETION_INDEX": "1"}


@pytest.mark.parametrize(
    ("environ", "expected"),
    [
        (SAGEMAKER, (3, 1, "algo-1", None, "SageMaker")),
        (SLURM, (2, 1, "trn03", 29542, "Slurm")),
        (OPERATOR, (4, 3, "job-master-0", 23456, "RANK")),
        (TORCHRUN, (4, 2, "job-0-0.job", 23456, "PET_NODE_RANK")),
        (
            {name: TORCHRUN[name] for name in TORCHRUN if name.startswith("PET_")},
            (4, 2, "job-0-0.job", None, "PET_NODE"),
        ),
        (OPEN_MPI, (2, 1, None, None, "Open MPI")),
        ({**OPEN_MPI, "MASTER_ADDR": "head", "MASTER_PORT": "1234"}, (2, 1, "head", 1234, "Open MPI")),
        (HYDRA, (3, 2, "head", None, "MPI (PMI_SIZE")),
        (INDEXED, (None, 1, None, None, "Indexed Job")),
        ({**SAGEMAKER, **OPEN_MPI}, (3, 1, "algo-1", None, "SageMaker")),
    ],
)
def test_what_schedulers_say(environ, expected):
    found = find_machines(environ, 29500)
    assert (found.count, found.rank, found.address, found.port) == expected[:4]
    assert expected[4] in found.source


def test_an_elastic_job_of_the_operator():
    found = find_machines({**POD, "PET_NNODES": "2:4", "PET_RDZV_ENDPOINT": "job-0:23456"}, 29500)
    assert (found.fewest, found.count, found.endpoint) == (2, 4, "job-0:23456")


@pytest.mark.parametrize(
    "environ",
    [
        {},
        {"WORLD_SIZE": "4", "RANK": "1", "MASTER_ADDR": "a"},  # left over in a shell
        {**OPERATOR, "LOCAL_RANK": "1"},  # a rank, not a pod
        {**SLURM, "SLURM_STEP_NUM_NODES": "1", "SLURM_STEP_NUM_TASKS": "1"},
        {"SLURM_NNODES": "4", "SLURM_NODEID": "0", "SLURM_JOB_NODELIST": "trn[1-4]"},  # the batch script itself
        {"PMI_SIZE": "4", "PMI_RANK": "1"},  # srun's tasks on one machine
        {"OMPI_COMM_WORLD_SIZE": "1", "OMPI_COMM_WORLD_RANK": "0", "OMPI_COMM_WORLD_LOCAL_SIZE": "1"},
    ],
)
def test_one_machine_is_not_mistaken_for_several(environ):
    assert find_machines(environ, 29500) is None


@pytest.mark.parametrize(
    ("environ", "words"),
    [
        ({**SLURM, "SLURM_STEP_NUM_TASKS": "64"}, "Slurm starts several launchers on one machine"),
        ({**OPEN_MPI, "OMPI_COMM_WORLD_LOCAL_SIZE": "32"}, "Open MPI starts several launchers"),
        ({**HYDRA, "MPI_LOCALNRANKS": "2"}, "MPI starts several launchers"),
        ({**SAGEMAKER, "SM_CURRENT_HOST": "algo-7"}, "does not contain this host, algo-7"),
        ({**SAGEMAKER, "SM_HOSTS": "algo-1,algo-2"}, "does not contain this host"),
        ({**TORCHRUN, "PET_NNODES": "1:x"}, "PET_NNODES=x is not a number"),
    ],
)
def test_what_cannot_be_is_refused(environ, words):
    with pytest.raises(ConfigurationError, match=words) as caught:
        find_machines(environ, 29500)
    assert caught.value.fix


@pytest.mark.parametrize(
    ("nodes", "first"),
    [
        ("trn1", "trn1"),
        ("trn1,trn2", "trn1"),
        ("trn[07-09,12],head", "trn07"),
        ("trn[3,5]", "trn3"),
        ("q-dy-[1-4]-x", "q-dy-1-x"),
        ("head,trn[1-2]", "head"),
    ],
)
def test_the_first_host_of_a_list(nodes, first):
    assert first_host(nodes) == first


@pytest.fixture
def planned(tmp_path, monkeypatch, capsys):
    """The output of a dry run in an environment."""
    script = tmp_path / "train.py"
    script.write_text("")

    def plan(environ, *options):
        for name in (*SAGEMAKER, *SLURM, *TORCHRUN, *OPEN_MPI, *HYDRA, *INDEXED):
            monkeypatch.delenv(name, raising=False)
        for name, value in environ.items():
            monkeypatch.setenv(name, value)
        code = main(["launch", "--cpu", "--dry-run", *options, str(script)])
        out, err = capsys.readouterr()
        assert (code == 0) == bool(out)
        return " ".join((out or err).split())

    return plan


def test_machines_are_found_and_said_in_a_line(planned):
    text = planned(SLURM, "--nproc-per-node", "2")
    assert text.startswith("4 ranks of")
    assert "2 machines, this is 1;" in text
    assert "machine 1 of 2 according to Slurm (SLURM_STEP_NUM_NODES" in text
    assert "rendezvous trn03:29542" in text


def test_options_replace_what_was_found(planned):
    text = planned(SLURM, "--master-addr", "10.0.0.9", "--master-port", "30000")
    assert "rendezvous 10.0.0.9:30000" in text
    assert "this is 1;" in text
    alone = planned(SLURM, "--nnodes", "1")
    assert "on this machine" in alone
    assert "Slurm" not in alone
    whole = planned(SLURM, "--nnodes", "2", "--node-rank", "0", "--master-addr", "a", "--master-port", "30000")
    assert "according to" not in whole


def test_pods_of_an_indexed_job_are_told_apart_by_their_index(planned):
    text = planned(INDEXED, "--nnodes", "4", "--master-addr", "job-0.job")
    assert "4 machines, this is 1;" in text
    assert "rendezvous job-0.job:29500" in text
    alone = planned(INDEXED)
    assert "on this machine" in alone
    assert "trains by itself: pass --nnodes and --master-addr" in alone


def test_an_address_that_no_scheduler_says_is_asked_for(planned):
    assert "2 machines need the address of machine 0" in planned(OPEN_MPI)
