"""Damaged checkpoints and interrupted saves: a damaged checkpoint always raises and never loads wrong values, and after
an interruption the latest checkpoint always loads."""

from __future__ import annotations

import errno
import os
import random
import shutil
import signal
import time
import traceback
from pathlib import Path

import pytest
import torch

from neuron_accel.checkpoint.format.files import Files
from neuron_accel.checkpoint.format.manifest import NAME, has_manifest, latest, numbered, read_manifest
from neuron_accel.checkpoint.state.session import Session
from neuron_accel.checkpoint.tools.report import verify
from neuron_accel.errors import CheckpointError
from neuron_accel.testing import run_ranks
from tests.distributed.checkpoint.checkpoint_support import BATCHES, TP2, Trained, assert_equal, train_and_save

MESH = [TP2, "zero1"]


# ---- damage ----------------------------------------------------------------------------------------------------------
def _damages(folder: Path):
    """Yields every damage of every file as a name and a context manager that undoes the damage at its end."""
    names = sorted(p.relative_to(folder).as_posix() for p in folder.rglob("*") if p.is_file())
    generator = random.Random(0)
    for name in names:
        path = folder / name
        contents = path.read_bytes()
        flipped = bytearray(contents)
        flipped[generator.randrange(len(contents))] ^= 1 << generator.randrange(8)
        other = (folder / generator.choice([n for n in names if n != name])).read_bytes()
        for what, damaged in (
            ("removed", None),
            ("emptied", b""),
            ("truncated", contents[: -1 - len(contents) // 3]),
            ("longer", contents + b"\0"),
            ("flipped", bytes(flipped)),
            ("swapped", other),
        ):
            if what == "flipped" and name == NAME and _same(bytes(flipped), contents):
                continue
            path.unlink()
            if damaged is not None:
                path.write_bytes(damaged)
            yield name, what
            path.write_bytes(contents)


def _same(a: bytes, b: bytes) -> bool:
    return a.split() == b.split()


def _try_every_damage(folder: str) -> int:
    trained = Trained("gpt2-tied", MESH, seed=1)
    accelerator, run = trained.accelerator, trained.accelerator.run
    trained.step(BATCHES[0])
    before, random_before = trained.contents(), torch.get_rng_state()
    count = 0
    damages = _damages(Path(folder)) if accelerator.is_main_process else None
    while True:
        damage = next(damages, None) if damages is not None else None
        damage = run.backend.broadcast_object(damage, run.world)
        if damage is None:
            break
        with pytest.raises(CheckpointError) as caught:
            accelerator.load_state(folder)
        assert Path(damage[0]).name in str(caught.value), damage
        count += 1
        accelerator.wait_for_everyone()
    assert_equal(before, trained.contents())
    assert torch.equal(torch.get_rng_state(), random_before)
    accelerator.load_state(folder)  # whole again
    return count


def test_every_damage_to_every_file_is_an_error_that_names_it(tmp_path):
    run_ranks(train_and_save, 4, str(tmp_path / "c"), "gpt2-tied", MESH)
    count = run_ranks(_try_every_damage, 4, str(tmp_path / "c"), timeout=110)[0]
    files = [p for p in (tmp_path / "c").rglob("*") if p.is_file()]
    assert count == 6 * len(files)
    assert len(files) >= 4 + 4 + 3  # model, optimizer, state and configuration and manifest


def _wrong_model(folder: str, into: str) -> None:
    trained = Trained(into, [], seed=1)
    before = trained.contents()
    with pytest.raises(CheckpointError):
        trained.accelerator.load_state(folder)
    assert_equal(before, trained.contents())


def test_the_checkpoint_of_another_model_is_refused(tmp_path):
    run_ranks(train_and_save, 1, str(tmp_path / "c"), "gpt2-tied", [])
    run_ranks(_wrong_model, 1, str(tmp_path / "c"), "llama")


# ---- interruptions ---------------------------------------------------------------------------------------------------
class Dying(Files):
    """Ends the process before its nth file operation."""

    def __init__(self, after: int) -> None:
        self.left = after
        self.done = 0

    def operation(self, name: str, path: Path) -> None:
        if self.left == 0:
            os._exit(42)
        self.left -= 1
        self.done += 1


def _count_operations(accelerator, folder: str) -> int:
    files = Dying(-1)
    Session(accelerator._source(), files).save(folder)
    return files.done


def _die_at_every_operation(folder: str) -> tuple[int, int]:
    """Saves over an older checkpoint and is interrupted at each file operation in turn. Returns the number of
    operations, and after how many of these interruptions the latest checkpoint was the new one."""
    trained = Trained("gpt2-tied", [], seed=0)
    accelerator = trained.accelerator
    trained.step(BATCHES[0])
    accelerator.save_state(folder)
    old = trained.contents()
    trained.step(BATCHES[1])
    new = trained.contents()
    trained.model.config.eos_token_id = 5  # an auxiliary file changes as well
    probe = Path(folder + "-probe")
    shutil.copytree(folder, probe)
    operations = _count_operations(accelerator, str(probe))
    finished = 0
    for number in range(operations + 1):
        work = Path(f"{folder}-{number}")
        shutil.copytree(folder, work)
        child = os.fork()
        if child == 0:
            try:
                Session(accelerator._source(), Dying(number)).save(str(work))
            except BaseException:
                traceback.print_exc()
                os._exit(1)
            os._exit(0)
        code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        assert code == (42 if number < operations else 0)
        assert verify(work) == []
        is_new = read_manifest(work).generation == 1
        finished += is_new and code == 42
        assert is_new or code == 42
        if number % 6 == 0 or number == operations:
            accelerator.load_state(str(work))
            assert_equal(new if is_new else old, trained.contents())
            accelerator.save_state(str(work))  # the next save cleans up
            named = {*read_manifest(work).files, NAME}
            assert {p.relative_to(work).as_posix() for p in work.rglob("*") if p.is_file()} == named
            accelerator.load_state(str(probe))
    return operations, finished


def test_dying_at_any_operation_leaves_the_old_or_the_new_checkpoint(tmp_path, record_property):
    operations, finished = run_ranks(_die_at_every_operation, 1, str(tmp_path / "c"), timeout=110)[0]
    record_property("file operations died at", operations)
    record_property("of these, the new checkpoint was there", finished)
    assert operations >= 20
    assert 1 <= finished < operations


def _die_at_every_operation_of_a_numbered_save(root: str) -> tuple[int, int]:
    """Saves a third numbered checkpoint where two are kept. Returns the number of operations, and after how many
    interruptions the third was complete."""
    from accelerate.utils import ProjectConfiguration

    project = ProjectConfiguration(project_dir=root, automatic_checkpoint_naming=True, total_limit=2)
    trained = Trained("gpt2-tied", [], project_config=project)
    accelerator = trained.accelerator
    for batch in BATCHES[:2]:
        trained.step(batch)
        accelerator.save_state()
    saved, checkpoints = Path(root + "-saved"), Path(root, "checkpoints")
    shutil.copytree(checkpoints, saved)
    number = finished = 0
    while True:
        shutil.rmtree(checkpoints)
        shutil.copytree(saved, checkpoints)
        child = os.fork()
        if child == 0:
            try:
                Session(accelerator._source(), Dying(number)).save(None)
            except BaseException:
                traceback.print_exc()
                os._exit(1)
            os._exit(0)
        code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        complete = [path.name for path in numbered(checkpoints).values() if has_manifest(path)]
        newest = latest(checkpoints)
        assert verify(newest) == []
        if newest.name == "checkpoint_2":
            finished += code == 42
            assert "checkpoint_1" in complete
        else:  # nothing is given up before the new one is there
            assert complete == ["checkpoint_0", "checkpoint_1"]
        if code == 0:
            assert complete == ["checkpoint_1", "checkpoint_2"]
            return number, finished
        assert code == 42
        number += 1


def test_dying_at_any_operation_of_a_numbered_save_gives_up_nothing_too_early(tmp_path, record_property):
    operations, finished = run_ranks(_die_at_every_operation_of_a_numbered_save, 1, str(tmp_path), timeout=110)[0]
    record_property("file operations died at", operations)
    record_property("of these, the new checkpoint was there", finished)
    assert operations >= 20
    assert finished >= 4  # from the new manifest's on: durable names, and the removal of the oldest


def _save_until_killed(root: str, reported: str) -> None:
    from accelerate.utils import ProjectConfiguration

    project = ProjectConfiguration(project_dir=root, automatic_checkpoint_naming=True, total_limit=2)
    trained = Trained("gpt2-tied", [TP2], project_config=project)
    for index in range(10_000):
        trained.step(BATCHES[index % len(BATCHES)])
        folder = trained.accelerator.save_state(async_save=index % 2 == 1)
        if index % 2 == 0 and trained.accelerator.is_main_process:  # returned: it is durable
            with open(reported, "a") as file:  # a whole line at once: the kill may come between opening and writing
                file.write(f"{Path(folder).name}\n")
            if index == 0:
                Path(reported + ".started").touch()


def _kill_at_random(root: str, seed: int) -> None:
    """Runs in one of two ranks and kills both."""
    reported = Path(root, "reported")
    if int(os.environ["RANK"]) == 0:
        child = os.fork()
        if child == 0:
            while not Path(str(reported) + ".started").exists():
                time.sleep(0.01)
            time.sleep(random.Random(seed).uniform(0, 0.6))
            os.kill(os.getppid(), signal.SIGKILL)
            os._exit(0)
    _save_until_killed(root, str(reported))


def _load_latest(root: str) -> int:
    from accelerate.utils import ProjectConfiguration

    project = ProjectConfiguration(project_dir=root, automatic_checkpoint_naming=True, total_limit=2)
    trained = Trained("gpt2-tied", [], seed=1, project_config=project)
    assert trained.accelerator.load_state(resume="latest")
    trained.step(BATCHES[0])
    trained.accelerator.save_state()
    return len(list(Path(root, "checkpoints").iterdir()))


@pytest.mark.parametrize("seed", range(3))
def test_killed_at_a_random_moment_the_latest_loads_and_nothing_reported_is_lost(tmp_path, seed):
    from neuron_accel.testing import RanksError

    with pytest.raises(RanksError):
        run_ranks(_kill_at_random, 2, str(tmp_path), seed, timeout=60, grace=1)
    found = latest(tmp_path / "checkpoints")
    reported = (tmp_path / "reported").read_text().splitlines()[-1]
    assert int(found.name.split("_")[1]) >= int(reported.split("_")[1])
    left = run_ranks(_load_latest, 1, str(tmp_path))[0]
    assert left <= 2


# ---- a file system that refuses --------------------------------------------------------------------------------------
class Full(Files):
    """A disk that is full from its nth write on."""

    def __init__(self, after: int) -> None:
        self.left = after

    def operation(self, name: str, path: Path) -> None:
        if name == "write":
            self.left -= 1
            if self.left < 0:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))


def _save_on_a_full_disk(folder: str, background: bool) -> None:
    trained = Trained("gpt2-tied", [TP2])
    accelerator = trained.accelerator
    accelerator.save_state(folder)
    before = trained.contents()
    trained.step(BATCHES[0])
    session = Session(accelerator._source(), Full(3) if accelerator.state.process_index == 1 else Files())

    def save() -> None:
        session.save(folder, async_save=background)
        session.wait()

    with pytest.raises(CheckpointError, match="No space left") as caught:
        save()
    if accelerator.state.process_index == 1 or not background:
        assert "rank_01" in str(caught.value)  # the file
    accelerator.load_state(folder)
    after = {name: value for name, value in trained.contents().items() if name in before}
    assert_equal(before, after)


@pytest.mark.parametrize("background", [False, True])
def test_a_full_disk_is_an_error_on_every_rank_and_the_old_checkpoint_stays(tmp_path, background):
    run_ranks(_save_on_a_full_disk, 2, str(tmp_path / "c"), background)


def _save_without_permission(folder: str) -> None:
    trained = Trained("gpt2-tied", [TP2])
    accelerator = trained.accelerator
    accelerator.save_state(folder)
    before = trained.contents()
    trained.step(BATCHES[0])
    accelerator.wait_for_everyone()
    if accelerator.is_main_process:
        for path in (Path(folder), *Path(folder).rglob("*")):
            path.chmod(0o555 if path.is_dir() else 0o444)
    accelerator.wait_for_everyone()
    if os.geteuid() == 0:
        os.seteuid(65534)  # root may write anywhere
    for where in (folder, folder + "/new"):
        with pytest.raises(CheckpointError, match="Permission denied") as caught:
            accelerator.save_state(where)
        assert folder in str(caught.value)
    os.seteuid(os.getuid())
    accelerator.load_state(folder)
    after = {name: value for name, value in trained.contents().items() if name in before}
    assert_equal(before, after)


def test_a_read_only_folder_is_an_error_on_every_rank_and_its_checkpoint_loads(tmp_path):
    folders = [tmp_path, *tmp_path.parents]  # pytest's own are for their owner alone: one more with pytest-xdist
    outermost = next((n for n, folder in enumerate(folders) if folder.name.startswith("pytest-of-")), 1)
    for folder in folders[: outermost + 1]:
        folder.chmod(0o755)
    run_ranks(_save_without_permission, 2, str(tmp_path / "c"))


def _save_where_a_file_is(folder: str) -> None:
    trained = Trained("gpt2-tied", [])
    with pytest.raises(CheckpointError, match="could not be made"):
        trained.accelerator.save_state(folder + "/inside")


def test_a_place_that_cannot_be_written_is_named(tmp_path):
    (tmp_path / "file").write_text("")
    run_ranks(_save_where_a_file_is, 2, str(tmp_path / "file"))
