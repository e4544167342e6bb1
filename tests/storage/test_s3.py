"""Checkpoints on a real S3 server: every way of saving, kills at every request, and errors in bounded time."""

from __future__ import annotations

import importlib.util
import os
import re
import signal
import subprocess
import sys
import traceback
import urllib.request

import fsspec
import pytest
import torch
from accelerate.utils import ProjectConfiguration

from neuron_accel.checkpoint.format.manifest import NAME, read_manifest
from neuron_accel.checkpoint.state.session import Session
from neuron_accel.checkpoint.tools.report import verify
from neuron_accel.cli.main import main
from neuron_accel.errors import CheckpointError
from neuron_accel.storage import location
from neuron_accel.testing import run_ranks
from tests.distributed.checkpoint.checkpoint_support import BATCHES, TP2, Trained, assert_equal

MISSING = [name for name in ("s3fs", "moto") if importlib.util.find_spec(name) is None]
pytestmark = pytest.mark.skipif(bool(MISSING), reason=f"{', '.join(MISSING)} not installed: nox -s storage")

URL = "s3://bucket/runs"
PARTS = 11 << 20  # bytes of a file that is uploaded in several parts


def client():
    import boto3

    return boto3.client("s3")


def objects(folder: str) -> set[str]:
    prefix = folder.removeprefix("s3://bucket/") + "/"
    found = client().list_objects_v2(Bucket="bucket", Prefix=prefix).get("Contents", [])
    return {entry["Key"].removeprefix(prefix) for entry in found}


def uploads() -> list[dict]:
    return client().list_multipart_uploads(Bucket="bucket").get("Uploads", [])


def expected(folder: str) -> set[str]:
    return {*read_manifest(location(folder)).files, NAME}


# ---- saving and loading ----------------------------------------------------------------------------------------------
def _save_and_load() -> dict[str, torch.Tensor]:
    project = ProjectConfiguration(project_dir=URL, automatic_checkpoint_naming=True, total_limit=2)
    trained = Trained("gpt2-tied", [TP2], project_config=project)
    accelerator = trained.accelerator
    for step in range(3):
        trained.step(BATCHES[step])
        accelerator.save_state(async_save=step != 1)
    accelerator._session.wait()
    saved = trained.contents()
    trained.step(BATCHES[3])
    assert accelerator.load_state(resume="latest").folder == f"{URL}/checkpoints/checkpoint_2"
    assert_equal(saved, trained.contents())
    accelerator.save_model(trained.model, f"{URL}/model")
    return saved


def _load(folder: str) -> dict[str, torch.Tensor]:
    trained = Trained("gpt2-tied", [], seed=1)
    trained.accelerator.load_state(folder)
    return trained.contents()


@pytest.mark.timeout(300)
def test_what_two_ranks_save_loads_in_one_process_and_tools_read_it(server, tmp_path):
    saved = run_ranks(_save_and_load, 2)[0]
    last = f"{URL}/checkpoints/checkpoint_2"
    assert {name.split("/")[0] for name in objects(f"{URL}/checkpoints")} == {"checkpoint_1", "checkpoint_2"}
    assert objects(last) == expected(last)
    server.requests.clear()
    assert_equal(saved, run_ranks(_load, 1, last)[0])
    reads = [r for r in server.requests if r["PATH_INFO"].endswith(".safetensors")]
    assert {r["REQUEST_METHOD"] for r in reads} == {"HEAD", "GET"}
    assert all(r["HTTP_RANGE"] for r in reads if r["REQUEST_METHOD"] == "GET")
    for command in (
        ["verify", last],
        ["inspect", last],
        ["consolidate", "-q", last, f"{URL}/full"],
        ["consolidate", "-q", last, str(tmp_path / "full")],
    ):
        assert main(command) == 0, command
    from safetensors.torch import load

    body = client().get_object(Bucket="bucket", Key="runs/full/model.safetensors")["Body"].read()
    assert body == (tmp_path / "full/model.safetensors").read_bytes()
    for name, value in load(body).items():
        assert torch.equal(value, saved[name])
    assert objects(f"{URL}/model") == objects(f"{URL}/full")
    assert uploads() == []


# ---- kills at every request ------------------------------------------------------------------------------------------
def _kill_at_every_request(when: str) -> tuple[int, int, int]:
    """A save over an older checkpoint is killed before (or after) each request in turn. Returns the number of requests,
    after how many kills the new checkpoint was there, and how many uploads were left."""
    folder, finished, left, known = f"{URL}/c", 0, 0, set()
    fsspec.config.conf["s3"] = {"default_block_size": 5 << 20}  # of parts; the least that S3 allows
    trained = Trained("gpt2-tied", [])
    accelerator = trained.accelerator
    ballast = torch.nn.Linear(1024, PARTS // 4096)
    accelerator.register_for_checkpointing(ballast)
    trained.step(BATCHES[0])
    accelerator.save_state(folder)
    old = trained.contents()
    for number in range(1000):
        trained.step(BATCHES[number % 7])
        ballast.weight.data.fill_(number)
        trained.model.config.eos_token_id = 5 + number  # an auxiliary file changes as well
        new, before = trained.contents(), read_manifest(location(folder))
        pid = os.fork()
        if pid == 0:
            try:
                control = f"{os.environ['AWS_ENDPOINT_URL']}/-/kill?when={when}&at={number}&pid="
                urllib.request.urlopen(f"{control}{os.getpid()}", timeout=20).read()
                Session(accelerator._source()).save(folder)
                urllib.request.urlopen(f"{control}0", timeout=20).read()
                os._exit(0)
            except BaseException:
                traceback.print_exc()
                os._exit(1)
        _, status = os.waitpid(pid, 0)
        assert verify(location(folder)) == []
        is_new = read_manifest(location(folder)).info["save"] != before.info["save"]
        mine = {upload["UploadId"] for upload in uploads()}
        assert len(mine - known) <= 1  # the upload of the save that was killed, and none that another has left
        left, known = left + len(mine - known), mine
        if os.WIFEXITED(status):
            assert os.WEXITSTATUS(status) == 0
            assert is_new
            assert objects(folder) == expected(folder)
            assert mine == set()
            return number, finished, left
        assert os.WTERMSIG(status) == signal.SIGKILL
        finished += is_new
        ballast.weight.data.fill_(-1)
        accelerator.load_state(folder)
        assert_equal(new if is_new else old, trained.contents())
        old = new if is_new else old
        if number % 8 == 7:  # the next save removes and aborts what the killed ones have left
            Session(accelerator._source()).save(folder)
            assert objects(folder) == expected(folder)
            assert uploads() == []
            known = set()
    raise AssertionError


@pytest.mark.timeout(600)
@pytest.mark.parametrize("when", ["before", "after"])
def test_a_save_that_is_killed_at_any_request_leaves_the_old_or_the_new_checkpoint(server, when, record_property):
    requests, finished, left = run_ranks(_kill_at_every_request, 1, when, timeout=580)[0]
    record_property("requests killed at", requests)
    record_property("of these, the new checkpoint was there", finished)
    record_property("uploads left, and aborted by a later save", left)
    assert requests > 30
    assert 1 <= finished < requests
    assert left >= 3


def _abort_own_uploads_only() -> None:
    s3 = client()
    s3.create_multipart_upload(Bucket="bucket", Key="runs/c/training_state-g0-abc.safetensors")
    s3.create_multipart_upload(Bucket="bucket", Key="runs/c/optimizer/rank_00-g0-abc.safetensors")
    others = ["runs/c/notes.bin", "runs/c2/training_state-g0-abc.safetensors", "runs/c/optimizer/x.bin", "else.bin"]
    for key in others:
        s3.create_multipart_upload(Bucket="bucket", Key=key)
    Trained("gpt2-tied", []).accelerator.save_state(f"{URL}/c")
    assert sorted(upload["Key"] for upload in uploads()) == sorted(others)
    for upload in uploads():
        s3.abort_multipart_upload(Bucket="bucket", Key=upload["Key"], UploadId=upload["UploadId"])


def test_a_save_aborts_uploads_of_interrupted_saves_and_no_others(server):
    run_ranks(_abort_own_uploads_only, 1)


# ---- errors ----------------------------------------------------------------------------------------------------------
def _errors() -> list[str]:
    trained = Trained("gpt2-tied", [])
    found = []

    def attempt(call) -> None:
        with pytest.raises(CheckpointError) as caught:
            call()
        found.append(str(caught.value))

    save, load = trained.accelerator.save_state, trained.accelerator.load_state
    attempt(lambda: save("s3://misspelt/c"))
    attempt(lambda: load("s3://misspelt/c"))
    from s3fs import S3FileSystem

    for name, value in (("AWS_ACCESS_KEY_ID", None), ("AWS_ENDPOINT_URL", "http://localhost:1")):
        keep = os.environ.pop(name)
        if value is not None:
            os.environ[name] = value
        S3FileSystem.clear_instance_cache()
        attempt(lambda: save(f"{URL}/c"))
        attempt(lambda: load(f"{URL}/c", resume="latest"))
        os.environ[name] = keep
    return found


def test_errors_name_the_cause(server):
    found = run_ranks(_errors, 1, timeout=110)[0]
    causes = ["s3://misspelt does not exist", "does not exist", "credentials", "credentials", "connect", "connect"]
    for text, cause in zip(found, causes, strict=True):
        assert re.search(cause, text), text
    assert "misspelt" not in [bucket["Name"] for bucket in client().list_buckets()["Buckets"]]


# ---- the end of the program ------------------------------------------------------------------------------------------
PROGRAM = """
import sys, time
from neuron_accel.checkpoint.format.files import Files
from neuron_accel.checkpoint.state.session import Session
from tests.distributed.checkpoint.checkpoint_support import BATCHES, Trained

class Slow(Files):
    def operation(self, name, path):
        if name == "open" and "optimizer" in str(path):
            time.sleep(12)  # longer than the address of the server is remembered

trained = Trained("gpt2-tied", [])
trained.step(BATCHES[0])
Session(trained.accelerator._source(), Slow()).save(sys.argv[1], async_save=True)
"""


def test_a_program_that_ends_during_a_save_completes_it(server):
    done = subprocess.run([sys.executable, "-c", PROGRAM, f"{URL}/c"], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert verify(location(f"{URL}/c")) == []
    assert objects(f"{URL}/c") == expected(f"{URL}/c")
