"""Checkpoints of other libraries are read by packages, through an entry point."""

from __future__ import annotations

import importlib.metadata
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from neuron_accel.checkpoint.tools import foreign
from neuron_accel.checkpoint.tools.consolidate import consolidate
from neuron_accel.errors import CheckpointError, PluginError

WEIGHTS = {"b.weight": torch.arange(12.0).view(4, 3), "a.bias": torch.tensor(7, dtype=torch.int64)}


class Stored(SimpleNamespace):
    """A tensor of the format of this test."""

    def read(self, out: np.ndarray, start: int) -> None:
        out[:] = self.values.reshape(-1).numpy().view(out.dtype)[start : start + out.size]


def find(folder: Path) -> SimpleNamespace | None:
    """The reader: a folder with the file ``there`` is of its format."""

    def tensors(config: Path | None, *, compare: bool) -> list[Stored]:
        dtypes = {name: str(value.dtype).removeprefix("torch.") for name, value in WEIGHTS.items()}
        return [Stored(name=n, shape=tuple(v.shape), dtype=dtypes[n], values=v) for n, v in WEIGHTS.items()]

    return SimpleNamespace(home=folder, tensors=tensors) if (folder / "there").exists() else None


def find_nothing(folder: Path) -> None:
    """The reader of another format."""


@pytest.fixture
def readers(monkeypatch):
    """Installs readers, of which entry points have these values."""

    def install(*values: str) -> None:
        points = [importlib.metadata.EntryPoint(f"reader{i}", value, "") for i, value in enumerate(values)]
        monkeypatch.setattr(foreign, "entry_points", lambda group: points)

    return install


def test_the_first_reader_that_knows_the_folder_reads_it(readers, tmp_path):
    readers(f"{__name__}:find_nothing", f"{__name__}:find")
    (tmp_path / "there").touch()
    (tmp_path / "tokenizer.json").write_text("{}")
    consolidate(tmp_path, tmp_path / "new")
    found = load_file(tmp_path / "new" / "model.safetensors")
    assert found.keys() == WEIGHTS.keys()
    assert all(torch.equal(found[name], value) for name, value in WEIGHTS.items())
    assert (tmp_path / "new" / "tokenizer.json").read_text() == "{}"
    with pytest.raises(CheckpointError, match="no model 1"):
        consolidate(tmp_path, tmp_path / "other", model=1)


def test_a_reader_that_cannot_be_imported(readers, tmp_path):
    readers("no.such.module:find")
    with pytest.raises(PluginError, match="'reader0' cannot be imported"):
        consolidate(tmp_path, tmp_path / "new")


def test_what_no_reader_knows_says_which_package_may(readers, tmp_path, monkeypatch):
    readers()
    monkeypatch.setattr(foreign, "not_installed", lambda group: ["neuron-accel-migrate"])
    with pytest.raises(CheckpointError, match="has no manifest") as info:
        consolidate(tmp_path, tmp_path / "new")
    assert "install the package neuron-accel-migrate" in info.value.fix
