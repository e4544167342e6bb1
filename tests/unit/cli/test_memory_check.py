"""``launch --check-memory`` without the package that counts memory."""

from __future__ import annotations

from neuron_accel.cli import memory_check
from neuron_accel.cli.main import main


def test_it_says_what_to_install(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(memory_check, "entry_points", lambda group: ())
    (tmp_path / "train.py").touch()
    assert main(["launch", "--dry-run", "--check-memory", str(tmp_path / "train.py")]) == 2
    assert "install the package neuron-accel-plan" in capsys.readouterr().err
