"""A save that fails leaves nothing behind, the next one is tried, and two runs do not save into one folder."""

from __future__ import annotations

import errno
import logging
import os
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch.testing._internal.two_tensor import TwoTensor

from neuron_accel import NeuronAccelerator
from neuron_accel.checkpoint.format.files import Files
from neuron_accel.checkpoint.format.manifest import NAME, read_manifest
from neuron_accel.checkpoint.state import save as save_module
from neuron_accel.checkpoint.state.lock import NAME as LOCK
from neuron_accel.checkpoint.state.lock import SaveLock
from neuron_accel.checkpoint.state.save import SaveAttempt
from neuron_accel.checkpoint.state.session import Session
from neuron_accel.checkpoint.tools.report import verify
from neuron_accel.errors import CheckpointError, CommunicationError
from neuron_accel.testing import run_ranks
from tests.distributed.checkpoint.checkpoint_support import BATCHES, TP2, Trained, assert_equal


class Failing(Files):
    """A file system on which the nth operation fails, and those after it if ``stays``."""

    def __init__(self, after: float, *, stays: bool) -> None:
        self.left, self.stays, self.failed = after, stays, False

    def operation(self, name: str, path: Path) -> None:
        if name == "remove":  # possible on a full disk
            return
        self.left -= 1
        if self.left == -1 or (self.left < 0 and self.stays):
            self.failed = True
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))


def tree(folder: Path) -> dict[str, bytes | None]:
    return {str(p.relative_to(folder)): p.read_bytes() if p.is_file() else None for p in folder.rglob("*")}


def save(session: Session, folder: Path, background: bool, *, quiet: bool = True) -> bool:
    """Whether a save has succeeded, on every rank or on none."""
    try:
        session.save(str(folder), async_save=background)
        session.wait()
    except CheckpointError:
        if not quiet:
            raise
        return False
    return True


def lose_the_other_rank_after_the_manifest(folder):
    """A rank whose connection closes at the end of a save cannot know whether the main process has placed the
    manifest."""
    trained, calls = Trained("llama", TP2), []
    agreed = save_module.agreed

    def cut_off(run, work):
        calls.append(work)
        result = agreed(run, work)
        if len(calls) == 3 and run.backend.rank == 1:  # entered, written, committed
            raise CommunicationError("a peer has most likely ended")
        return result

    save_module.agreed = cut_off
    try:
        trained.accelerator.save_state(folder)
    except CommunicationError:
        assert trained.accelerator.run.backend.rank == 1
    finally:
        save_module.agreed = agreed
    assert len(calls) == 3
    trained.accelerator.run.backend.barrier()
    assert verify(Path(folder)) == []


def test_a_rank_that_loses_the_others_removes_nothing_that_a_manifest_lists(tmp_path):
    run_ranks(lose_the_other_rank_after_the_manifest, 2, str(tmp_path / "checkpoint"))


def any_failed(accelerator: NeuronAccelerator, files: Failing) -> bool:
    run = accelerator.run
    return any(run.backend.all_gather_object(files.failed, run.world))


def _fail_at_every_operation(root: str, faulty: int, background: bool) -> int:
    trained = Trained("gpt2-tied", [TP2])
    accelerator = trained.accelerator
    folder = Path(root, "checkpoints", "c")
    before: dict[str, bytes | None] = {}
    for number in range(0, 1000, 3 if background else 1):
        files = Failing(number if accelerator.state.process_index == faulty else 1e9, stays=number % 2 == 0)
        succeeded = save(Session(accelerator._source(), files), folder, background)
        accelerator.wait_for_everyone()
        after = tree(folder.parent) if folder.parent.exists() else {}
        accelerator.wait_for_everyone()
        if succeeded and not any_failed(accelerator, files):
            return number
        complete = after.get(f"c/{NAME}") != before.get(f"c/{NAME}")
        if complete:  # what failed is what follows the manifest
            assert verify(folder) == []
            assert [name for name in after if "/." in name] == []
            before = after
        assert after == before, set(after) ^ set(before)
    raise AssertionError


@pytest.mark.parametrize("faulty", [0, 1])
@pytest.mark.parametrize("background", [False, True])
def test_a_save_that_fails_at_any_operation_leaves_nothing_behind(tmp_path, faulty, background):
    failures = run_ranks(_fail_at_every_operation, 2, str(tmp_path), faulty, background)
    assert failures[0] == failures[1]
    assert failures[0] >= (20 if faulty == 0 else 5)


def _save_on_a_small_disk(folder: str) -> None:
    trained = Trained("gpt2-tied", [])
    ballast = torch.nn.Linear(600, 600)
    trained.accelerator.register_for_checkpointing(ballast)
    free = os.statvfs(folder).f_bfree
    for background in (False, True):
        with pytest.raises(CheckpointError, match="No space left"):
            save(trained.accelerator._session, Path(folder, "c"), background, quiet=False)
        assert os.listdir(folder) == []
        assert os.statvfs(folder).f_bfree == free


def test_a_disk_that_is_full_is_as_empty_as_before(tmp_path):
    disk = tmp_path / "disk"
    disk.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=1m", "none", str(disk)]
    if subprocess.run(command, capture_output=True).returncode:
        pytest.skip("mounting is not allowed here")
    try:
        run_ranks(_save_on_a_small_disk, 1, str(disk))
    finally:
        subprocess.run(["umount", "-l", str(disk)], check=True)


def _save_after_a_failure(root: str) -> None:
    trained = Trained("gpt2-tied", [TP2])
    accelerator = trained.accelerator
    trained.step(BATCHES[0])
    said: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("neuron_accel.checkpoint.state.session").addHandler(handler)
    files = Failing(2 if accelerator.state.process_index == 1 else 1e9, stays=False)
    session = Session(accelerator._source(), files)
    session.save(root + "/first", async_save=True)
    session.save(root + "/second", async_save=True)
    session.wait()
    assert any_failed(accelerator, files)
    assert os.listdir(root) == ["second"]
    assert verify(Path(root, "second")) == []
    if accelerator.is_main_process:
        assert len([text for text in said if "The checkpoint before this one was not saved" in text]) == 1
    saved = trained.contents()
    trained.step(BATCHES[1])
    accelerator.load_state(root + "/second")
    assert_equal(saved, trained.contents())


def test_after_a_failure_in_the_background_the_next_save_is_tried(tmp_path):
    run_ranks(_save_after_a_failure, 2, str(tmp_path))


def _save_beside_another_run(folder: str) -> None:
    trained = Trained("gpt2-tied", [TP2])
    accelerator, is_main = trained.accelerator, trained.accelerator.is_main_process
    lock, manifest = SaveLock(Path(folder), Files()), Path(folder, NAME)
    trained.step(BATCHES[0])
    accelerator.save_state(folder)
    before = tree(Path(folder))

    def told(what: str, **options: bool) -> None:
        accelerator.wait_for_everyone()
        with pytest.raises(CheckpointError, match=what):
            accelerator.save_state(folder, **options)
        accelerator.wait_for_everyone()

    if is_main:
        lock.acquire()
    for background in (False, True):
        told("process .* is saving into this folder", async_save=background)
    if is_main:
        lock.release()
        assert tree(Path(folder)) == before
        saved = read_manifest(Path(folder))
        other = {"saved_by": {"host": "another", "pid": 7}, "save": "another's"}
        manifest.write_bytes(replace(saved, info={**saved.info, **other}).to_bytes())
    told("Another run, process 7 on another, has saved into this folder since this run did")
    accelerator.load_state(folder)  # it may be loaded
    accelerator.save_state(folder + "-own")


def test_a_second_run_that_saves_into_the_same_folder_is_told(tmp_path):
    run_ranks(_save_beside_another_run, 2, str(tmp_path / "c"))


class TakenOver(Files):
    """Another run takes the folder over, before the main process writes the manifest, and writes a file of the same
    name."""

    def __init__(self, folder: Path, theirs: Path) -> None:
        self.mark, self.theirs = folder / LOCK, theirs

    def operation(self, name: str, path: Path) -> None:
        if name == "fsync" and path == self.theirs.parent and self.mark.exists():
            self.mark.unlink()
            self.theirs.unlink()
            self.theirs.write_bytes(b"theirs")


def _save_into_a_folder_that_is_taken_over(folder: Path) -> None:
    theirs = folder / "config.json"
    accelerator = Trained("gpt2-tied", []).accelerator  # the source does not keep it
    session = Session(accelerator._source(), TakenOver(folder, theirs))
    with pytest.raises(CheckpointError, match="taken this folder over"):
        session.save(str(folder))
    assert theirs.read_bytes() == b"theirs"


def test_a_save_whose_folder_was_taken_over_removes_no_file_of_the_other_run(tmp_path):
    run_ranks(_save_into_a_folder_that_is_taken_over, 1, tmp_path / "c")


class Entering(Session):
    """Saves that are entered in the background, and go no further by themselves."""

    attempt: SaveAttempt

    def _go_on_in_background(self, attempt: SaveAttempt) -> None:
        self.attempt = attempt


def _save_while_ranks_of_an_earlier_start_write(folder: Path) -> None:
    accelerator = Trained("gpt2-tied", ["zero1"]).accelerator
    earlier, next_start = Entering(accelerator._source(), Files()), Session(accelerator._source(), Files())
    earlier.save(str(folder), async_save=True)
    if accelerator.is_main_process:
        earlier.attempt.write()
        (folder / LOCK).unlink()
    accelerator.wait_for_everyone()
    next_start.save(str(folder))
    before = tree(folder)
    accelerator.wait_for_everyone()
    if not accelerator.is_main_process:  # it was cut off, and notices nothing
        earlier.attempt.write()
    earlier.attempt.abandon(alone=True)
    accelerator.wait_for_everyone()
    after = tree(folder)
    assert {name: after.get(name) for name in before} == before
    assert verify(folder) == []


def test_ranks_of_an_earlier_start_that_still_write_change_no_file_of_the_next(tmp_path):
    run_ranks(_save_while_ranks_of_an_earlier_start_write, 2, tmp_path / "c")


class Quantized(torch.optim.SGD):
    """Stands for optimizers whose state is made of several tensors, as in torchao."""

    def step(self, closure=None):
        for group in self.param_groups:
            for parameter in group["params"]:
                self.state[parameter]["exp_avg"] = TwoTensor(torch.zeros_like(parameter), torch.zeros_like(parameter))
        return super().step(closure)


def test_state_that_is_made_of_several_tensors_is_refused_before_anything_is_written(tmp_path):
    accelerator = NeuronAccelerator(cpu=True)
    model = torch.nn.Linear(2, 1)
    model, optimizer = accelerator.prepare(model, Quantized(model.parameters(), lr=0.1))
    accelerator.backward(model(torch.ones(1, 2)).sum())
    optimizer.step()
    with pytest.raises(CheckpointError, match="an entry is a TwoTensor"):
        accelerator.save_state(str(tmp_path / "here"))
    assert not [path for path in tmp_path.rglob("*") if path.is_file()]
    accelerator.save_model(model, str(tmp_path / "model"))
    assert (tmp_path / "model" / "model.safetensors").is_file()
