"""The folder in memory of a launcher."""

from __future__ import annotations

import os

from neuron_accel.checkpoint.state.memory import SNAPSHOTS
from neuron_accel.cli.snapshots import snapshot_folder


def test_a_folder_lives_as_long_as_its_launcher(tmp_path):
    with snapshot_folder(2, tmp_path) as folder:
        assert os.environ[SNAPSHOTS] == str(folder)
        (folder / "snapshot_0").mkdir()
        with snapshot_folder(1, tmp_path) as other:  # does not remove that of one that runs
            assert folder.is_dir()
            assert other != folder
        assert os.environ[SNAPSHOTS] == str(folder)
    assert SNAPSHOTS not in os.environ
    assert list(tmp_path.iterdir()) == []


def test_what_a_killed_launcher_has_left_is_removed(tmp_path):
    left = tmp_path / "neuron_accel_snapshots_x"
    left.mkdir()
    (left / "owner.lock").touch()
    with snapshot_folder(0, tmp_path) as folder:
        assert folder is None
        assert SNAPSHOTS not in os.environ
    assert list(tmp_path.iterdir()) == []


def test_what_is_not_a_launchers_stays(tmp_path):
    (tmp_path / "neuron_accel_snapshots_y").mkdir()
    (tmp_path / "other").mkdir()
    with snapshot_folder(0, tmp_path):
        pass
    assert len(list(tmp_path.iterdir())) == 2
