"""Checkpoints at URLs, with ranks: what is saved loads anywhere, a rank reads its slices only, and a save that fails or
is killed at any request leaves the old or the new checkpoint."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import traceback
from pathlib import Path

import pytest
import torch
from accelerate.utils import ProjectConfiguration

from neuron_accel.checkpoint.format.manifest import NAME, read_manifest
from neuron_accel.checkpoint.state import lock as lock_module
from neuron_accel.checkpoint.state.session import Session
from neuron_accel.checkpoint.tools.report import verify
from neuron_accel.cli.main import main
from neuron_accel.errors import CheckpointError, NeuronAccelError, UsageError
from neuron_accel.storage import location
from neuron_accel.testing import run_ranks
from tests.distributed.checkpoint.checkpoint_support import BATCHES, TP2, Trained, assert_equal
from tests.object_store import ObjectStore, contents_of, make_bucket, register, uploads_of

LARGE = 9 << 20  # a file of this size is uploaded in several parts


def listed(bucket: Path, folder: str = "c") -> set[str]:
    return {name for name in contents_of(bucket) if name.startswith(f"{folder}/")}


def expected(url: str) -> set[str]:
    """The objects of a complete checkpoint: what the manifest lists, and the manifest."""
    folder = location(url)
    return {f"{folder.name}/{name}" for name in (*read_manifest(folder).files, NAME)}


# ---- saving and loading ----------------------------------------------------------------------------------------------
def _save_in_all_ways(url: str, bucket: str) -> dict[str, torch.Tensor]:
    register()
    project = ProjectConfiguration(project_dir=url, automatic_checkpoint_naming=True, total_limit=2)
    trained = Trained("gpt2-tied", [TP2], project_config=project)
    accelerator = trained.accelerator
    assert not accelerator.load_state(resume="latest")
    for step in range(4):
        trained.step(BATCHES[step])
        returned = accelerator.save_state(async_save=step % 2 == 0)
        assert returned == f"{url}/checkpoints/checkpoint_{step}"
    accelerator._session.wait()
    saved = trained.contents()
    if accelerator.is_main_process:
        found = {name.split("/")[1] for name in contents_of(Path(bucket)) if name.startswith("checkpoints/")}
        assert found == {"checkpoint_2", "checkpoint_3"}
        for folder in found:
            assert verify(location(f"{url}/checkpoints/{folder}")) == []
    accelerator.wait_for_everyone()
    trained.step(BATCHES[4])
    resumed = accelerator.load_state(resume="latest")
    assert resumed.folder == f"{url}/checkpoints/checkpoint_3"
    assert_equal(saved, trained.contents())
    accelerator.save_model(trained.model, f"{url}/model")
    with pytest.raises(UsageError, match="save_model"):
        accelerator.unwrap_model(trained.model).save_pretrained(f"{url}/model")
    return saved


def _load(url: str, plugins: list) -> dict[str, torch.Tensor]:
    register()
    trained = Trained("gpt2-tied", plugins, seed=1)
    trained.accelerator.load_state(f"{url}/checkpoints", resume="latest")
    return trained.contents()


def test_every_way_of_saving_loads_on_another_mesh_and_tools_read_it(tmp_path, capsys):
    register()
    bucket, url = make_bucket(tmp_path)
    saved = run_ranks(_save_in_all_ways, 2, url, str(bucket))[0]
    assert_equal(saved, run_ranks(_load, 1, url, [])[0])
    last = f"{url}/checkpoints/checkpoint_3"
    assert main(["verify", last]) == 0
    assert main(["inspect", last]) == 0
    assert main(["inspect", f"{last}/tensor_parallel_shards", "--json"]) == 0
    from safetensors.torch import load_file

    for output in (f"{url}/full", str(tmp_path / "full")):
        assert main(["consolidate", "-q", last, output]) == 0
    assert main(["consolidate", "-q", "-f", "pytorch", last, f"{url}/pickled"]) == 0
    (tmp_path / "pickled.bin").write_bytes(contents_of(bucket)["pickled/pytorch_model.bin"])
    unpickled = torch.load(tmp_path / "pickled.bin", weights_only=True)
    whole = contents_of(bucket)["full/model.safetensors"]
    assert whole == (tmp_path / "full/model.safetensors").read_bytes()
    full = load_file(tmp_path / "full/model.safetensors")
    assert full.keys() == unpickled.keys()
    (tmp_path / "saved.safetensors").write_bytes(contents_of(bucket)["model/model.safetensors"])
    for name, value in load_file(tmp_path / "saved.safetensors").items():
        assert torch.equal(value, full[name])
        assert torch.equal(value, unpickled[name])
        assert torch.equal(value, saved[name])
    assert "model/config.json" in contents_of(bucket)


# ---- reading by ranges -----------------------------------------------------------------------------------------------
def _wide(hidden: int = 1024) -> torch.nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {"hidden_size": hidden, "intermediate_size": 2 * hidden, "num_hidden_layers": 1, "vocab_size": 96}
    return LlamaForCausalLM(LlamaConfig(**sizes, num_attention_heads=8, num_key_value_heads=8))


def _count_bytes(url: str) -> tuple[int, int, set[str]]:
    """Bytes of the model's shard on this rank, bytes read of the model's files, and from which files."""
    store = register()
    from neuron_accel import NeuronAccelerator

    accelerator = NeuronAccelerator(config={"plugins": [TP2]})
    torch.manual_seed(accelerator.state.process_index)
    model = accelerator.prepare(_wide())
    accelerator.save_state(url)
    store.requests.clear()
    accelerator.load_state(url, verify=False)
    held = sum(p.numel() * 4 for p in model.parameters())
    reads = [(key, size) for name, key, size in store.requests if name == "get" and "_shards/" in key]
    return held, sum(size for _, size in reads), {key for key, size in reads if size > 1 << 16}


def test_a_rank_reads_the_slices_that_it_needs(tmp_path):
    _, url = make_bucket(tmp_path)
    for rank, (held, read, files) in enumerate(run_ranks(_count_bytes, 2, f"{url}/c")):
        assert held > 16 << 20
        assert held <= read + (1 << 16)
        assert read < held + (20 << 16)  # headers, and a few small tensors beside each other
        assert len([name for name in files if f"tp_rank_{rank:02d}" in name]) == 1


# ---- failures --------------------------------------------------------------------------------------------------------
class Failure:
    """The nth request of this process fails, and those after it if ``stays``."""

    def __init__(self, after: float, *, stays: bool) -> None:
        self.left, self.stays, self.failed = after, stays, False

    def __call__(self, name: str, key: str) -> None:
        if name in ("delete", "abort upload"):
            return
        self.left -= 1
        if self.left == -1 or (self.left < 0 and self.stays):
            self.failed = True
            raise OSError("the network is down")


def _fail_at_every_request(url: str, faulty: int, background: bool) -> int:
    register()
    trained = Trained("gpt2-tied", [TP2])
    accelerator, run = trained.accelerator, trained.accelerator.run
    trained.step(BATCHES[0])
    bucket, folder = Path(url.removeprefix("objects://")), location(f"{url}/c")
    before: dict[str, bytes] = {}
    unknown = 0
    for number in range(1000):
        failure = Failure(number if accelerator.state.process_index == faulty else 1e9, stays=number % 2 == 0)
        ObjectStore.before_request = staticmethod(failure)
        session, succeeded = Session(accelerator._source()), True
        try:
            session.save(str(folder), async_save=background)
            session.wait()
        except CheckpointError:
            succeeded = False
        ObjectStore.before_request = staticmethod(lambda name, key: None)
        accelerator.wait_for_everyone()
        after = contents_of(bucket)
        accelerator.wait_for_everyone()
        if succeeded and not any(run.backend.all_gather_object(failure.failed, run.world)):
            names = {NAME, *read_manifest(folder).files}
            assert set(after) == {f"c/{name}" for name in names}, "also what an unknown end has left is removed"
            return number
        if after.get(f"c/{NAME}") != before.get(f"c/{NAME}"):
            assert verify(folder) == []
            assert not [name for name in after if ".saving." in name or ".rank_" in name]
            before = after
        if after != before:
            # The manifest was sent, the answer was lost, and so was the one to whether it is there: the files may be
            # those of a complete checkpoint, and stay.
            assert failure.stays, set(after) ^ set(before)
            assert faulty == 0
            assert set(before) < set(after)
            unknown += 1
            before = after
        assert unknown < 5
        accelerator.wait_for_everyone()
    raise AssertionError


@pytest.mark.parametrize(("faulty", "background"), [(0, False), (1, False), (0, True), (1, True)])
def test_a_save_that_fails_at_any_request_leaves_nothing_behind(tmp_path, faulty, background):
    _, url = make_bucket(tmp_path)
    failures = run_ranks(_fail_at_every_request, 2, url, faulty, background)
    assert failures[0] >= (20 if faulty == 0 else 2)


# ---- processes that are killed ---------------------------------------------------------------------------------------
class Killing:
    """Ends the process before its nth request."""

    def __init__(self, after: int) -> None:
        self.left = after

    def __call__(self, name: str, key: str) -> None:
        if not self.left:
            os.kill(os.getpid(), signal.SIGKILL)
        self.left -= 1


def _kill_at_every_request(url: str) -> tuple[int, int]:
    """Saves over an older checkpoint and is killed before each request in turn. Returns the number of requests, and
    after how many kills the new checkpoint was there."""
    register()
    bucket, folder = Path(url.removeprefix("objects://")), f"{url}/c"
    trained = Trained("gpt2-tied", [])
    accelerator = trained.accelerator
    ballast = torch.nn.Linear(1024, LARGE // 4096)  # its file is uploaded in several parts
    accelerator.register_for_checkpointing(ballast)
    states = []
    for step in range(2):
        trained.step(BATCHES[step])
        ballast.weight.data.fill_(step)
        states.append(trained.contents())
        if step == 0:
            accelerator.save_state(folder)
    trained.model.config.eos_token_id = 5  # an auxiliary file changes as well
    accelerator.save_state(f"{url}/new")
    old, finished, left_uploads = contents_of(bucket), 0, 0
    for number in range(1000):
        pid = os.fork()
        if pid == 0:
            try:
                ObjectStore.before_request = staticmethod(Killing(number))
                Session(accelerator._source()).save(folder)
                os._exit(0)
            except BaseException:
                traceback.print_exc()
                os._exit(1)
        _, status = os.waitpid(pid, 0)
        assert verify(location(folder)) == []
        if os.WIFEXITED(status):
            assert os.WEXITSTATUS(status) == 0
            assert listed(bucket) == expected(folder)
            assert finished
            assert left_uploads
            return number, finished
        assert os.WTERMSIG(status) == signal.SIGKILL
        is_new = read_manifest(location(folder)).generation == 1
        finished += is_new
        left_uploads += len(list(uploads_of(bucket).iterdir())) if uploads_of(bucket).exists() else 0
        if number % 5 == 4 or finished == 1:
            accelerator.load_state(folder)
            assert_equal(states[is_new], trained.contents())
            assert ballast.weight.eq(float(is_new)).all()
            accelerator.load_state(f"{url}/new")
            Session(accelerator._source()).save(folder)  # removes what the killed save has left
            assert listed(bucket) == expected(folder)
        for path in bucket.iterdir():
            path.unlink()
        for name, data in old.items():
            location(f"{url}/{name}").put(data)
        shutil.rmtree(uploads_of(bucket), ignore_errors=True)
    raise AssertionError


def test_a_save_that_is_killed_at_any_request_leaves_the_old_or_the_new_checkpoint(tmp_path, record_property):
    _, url = make_bucket(tmp_path)
    requests, finished = run_ranks(_kill_at_every_request, 1, url, timeout=110)[0]
    record_property("requests killed at", requests)
    record_property("of these, the new checkpoint was there", finished)
    assert requests > 25


# ---- two runs, one folder --------------------------------------------------------------------------------------------
OTHER = json.dumps({"host": "another", "pid": 7, "namespace": "", "token": "t"}).encode()


def _save_beside_another_run(url: str) -> None:
    register()
    lock_module.RENEW_S, lock_module.WAIT_S = 0.2, 1.0
    trained = Trained("gpt2-tied", [TP2])
    accelerator, is_main = trained.accelerator, trained.accelerator.is_main_process
    mark = location(f"{url}/c/{lock_module.NAME}")
    bucket = Path(url.removeprefix("objects://"))
    accelerator.save_state(f"{url}/c")
    before = contents_of(bucket)
    accelerator.wait_for_everyone()
    over = threading.Event()

    def renew() -> None:
        while not over.wait(0.02):
            mark.put(OTHER)

    thread = threading.Thread(target=renew)
    if is_main:
        mark.put(OTHER)
        thread.start()
    for background in (False, True):
        accelerator.wait_for_everyone()
        with pytest.raises(CheckpointError, match="process 7 on another is saving into this folder"):
            accelerator.save_state(f"{url}/c", async_save=background)
    accelerator.wait_for_everyone()
    if is_main:
        over.set()  # it has died
        thread.join()
        assert contents_of(bucket).keys() - before.keys() == {f"c/{lock_module.NAME}"}
    accelerator.wait_for_everyone()
    accelerator.save_state(f"{url}/c")
    if is_main:
        assert listed(bucket) == expected(f"{url}/c")
    accelerator.wait_for_everyone()


def test_a_second_run_that_saves_into_the_same_folder_is_told(tmp_path):
    _, url = make_bucket(tmp_path)
    run_ranks(_save_beside_another_run, 2, url)


def _take_over(url: str, after: str) -> str:
    """Another run takes the folder over while this one saves, and has saved itself. Returns this one's error."""
    register()
    bucket = Path(url.removeprefix("objects://"))
    trained = Trained("gpt2-tied", [])
    trained.accelerator.save_state(f"{url}/c")
    theirs = contents_of(bucket)

    def take(name: str, key: str) -> None:
        if name == "put" and after in key:
            ObjectStore.before_request = staticmethod(lambda name, key: None)
            for path in bucket.iterdir():
                if ".saving." in path.name:
                    path.unlink()

    ObjectStore.before_request = staticmethod(take)
    with pytest.raises(CheckpointError) as caught:
        trained.accelerator.save_state(f"{url}/c")
    assert contents_of(bucket) == theirs
    assert verify(location(f"{url}/c")) == []
    return str(caught.value)


@pytest.mark.parametrize("after", ["rank_00", "training_state"])
def test_a_save_whose_folder_was_taken_over_does_not_replace_the_manifest(tmp_path, after):
    _, url = make_bucket(tmp_path)
    assert "taken this folder over" in run_ranks(_take_over, 1, url, after)[0]


def _prune_beside_another_run(url: str) -> None:
    """Retention removes what an interrupted save has left, but not what another run is saving."""
    register()
    bucket = Path(url.removeprefix("objects://"))
    project = ProjectConfiguration(project_dir=url, automatic_checkpoint_naming=True, total_limit=1)
    trained = Trained("gpt2-tied", [], project_config=project)
    trained.accelerator.project_configuration.iteration = 3
    root = location(f"{url}/checkpoints")
    (root / "checkpoint_0/tensor_parallel_shards/rank_00-g0-abc.safetensors").put(b"left over")
    (root / "checkpoint_1/tensor_parallel_shards/rank_00-g0-def.safetensors").put(b"being written")
    (root / "checkpoint_1" / lock_module.NAME).put(OTHER)
    (root / "notes.txt").put(b"of another run")
    trained.accelerator.save_state()
    found = {name.split("/")[1] for name in contents_of(bucket)}
    assert found == {"checkpoint_1", "checkpoint_3", "notes.txt"}


def test_retention_removes_what_was_left_over_but_not_what_another_run_is_saving(tmp_path):
    _, url = make_bucket(tmp_path)
    run_ranks(_prune_beside_another_run, 1, url)


# ---- errors ----------------------------------------------------------------------------------------------------------
def _bad_urls(root: str) -> list[str]:
    register()
    trained = Trained("gpt2-tied", [TP2])
    before = trained.contents()
    messages = []
    for url in (f"objects://{root}/none.bucket/c", "nosuch://bucket/c"):
        for call in (
            lambda url=url: trained.accelerator.save_state(url),
            lambda url=url: trained.accelerator.save_state(url, async_save=True),
            lambda url=url: trained.accelerator.load_state(url),
        ):
            with pytest.raises(NeuronAccelError) as caught:
                call()
            messages.append(str(caught.value))
    assert not trained.accelerator.load_state(f"objects://{root}/none.bucket/c", resume="latest")
    ObjectStore.before_request = staticmethod(Failure(0, stays=True))
    if not trained.accelerator.is_main_process:
        ObjectStore.before_request = staticmethod(lambda name, key: None)
    with pytest.raises(CheckpointError, match="the network is down"):  # on every rank, not only where it failed
        trained.accelerator.load_state(f"objects://{root}/none.bucket/c", resume="latest")
    assert_equal(before, trained.contents())
    return messages


def test_an_address_that_does_not_work_is_an_error_on_every_rank(tmp_path):
    for messages in run_ranks(_bad_urls, 2, str(tmp_path)):
        assert all("does not exist" in text for text in messages[:3])
        assert all("nosuch" in text for text in messages[3:])


def _unreadable_manifest(url: str) -> None:
    register()
    bucket = Path(url.removeprefix("objects://"))
    trained = Trained("gpt2-tied", [])
    trained.accelerator.save_state(f"{url}/c")
    before = contents_of(bucket)

    def fail(name: str, key: str) -> None:
        if name == "get" and key.endswith(NAME):
            raise OSError("the network is down")

    ObjectStore.before_request = staticmethod(fail)
    for call in (
        lambda: trained.accelerator.save_state(f"{url}/c"),  # would take it for damaged, and remove it
        lambda: trained.accelerator.load_state(url, resume="latest"),  # would take an older one
        lambda: trained.accelerator.load_state(f"{url}/c"),
    ):
        with pytest.raises(CheckpointError, match="the network is down"):
            call()
        assert contents_of(bucket) == before


def test_a_manifest_that_cannot_be_read_at_the_moment_is_not_taken_for_damaged(tmp_path):
    _, url = make_bucket(tmp_path)
    run_ranks(_unreadable_manifest, 1, url)


# ---- the end of the program ------------------------------------------------------------------------------------------
PROGRAM = """
import sys
from tests.distributed.checkpoint.checkpoint_support import BATCHES, Trained
from tests.object_store import register
register()
trained = Trained("gpt2-tied", [])
trained.step(BATCHES[0])
trained.accelerator.save_state(sys.argv[1], async_save=True)
"""


def test_a_program_that_ends_during_a_save_completes_it(tmp_path):
    register()
    bucket, url = make_bucket(tmp_path)
    for folder, code in ((f"{url}/c", 0), (f"objects://{tmp_path}/none.bucket/c", 1)):
        done = subprocess.run([sys.executable, "-c", PROGRAM, folder], capture_output=True, text=True)
        assert done.returncode == code, done.stderr
    assert "does not exist" in done.stderr
    assert verify(location(f"{url}/c")) == []
    assert listed(bucket) == expected(f"{url}/c")
