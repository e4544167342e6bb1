"""The checkpoints of one run: what ``save_state`` and ``load_state`` of the accelerator do."""

from __future__ import annotations

import atexit
import importlib.metadata
import os
import sys
import time
import uuid
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from neuron_accel.checkpoint.agreement import agreed
from neuron_accel.checkpoint.files import Files
from neuron_accel.checkpoint.host_memory import HostMemory
from neuron_accel.checkpoint.load import load
from neuron_accel.checkpoint.manifest import MODEL_FOLDER, NAME, has_manifest, read_manifest
from neuron_accel.checkpoint.retention import latest, prune
from neuron_accel.checkpoint.save import BackgroundSave, Contents, Target, save
from neuron_accel.checkpoint.snapshot import written_here
from neuron_accel.checkpoint.training import Training, capture, mesh_to
from neuron_accel.engine.errors import CheckpointError

if TYPE_CHECKING:
    from neuron_accel.engine.run import Run

LATEST = "latest"
_LIBRARIES = ("neuron-accel", "torch", "accelerate", "transformers", "safetensors", "torch-xla", "torch-neuronx")


class Checkpoints:
    """Saves and loads, one save at a time.

    Args:
        run: the run.
        files: how files are written.
    """

    def __init__(self, run: Run, files: Files | None = None) -> None:
        self._run, self._files = run, files or Files()
        self._pending: BackgroundSave | None = None
        self._memory = HostMemory()

    def save(
        self,
        training: Training,
        folder: Path,
        *,
        auxiliary: Callable[[], Mapping[str, bytes]] = dict,
        keep: int | None = None,
        background: bool = False,
    ) -> None:
        """Saves into ``folder``. Collective.

        Args:
            training: what to save.
            folder: is made; a checkpoint that it holds stays valid until the new one is complete.
            auxiliary: gives further files by name; called on the main process.
            keep: number of complete checkpoints ``checkpoint_N`` to keep beside this one, it included; None: all.
            background: return as soon as everything is copied to host memory.

        Raises:
            CheckpointError: on every rank; also if the background save before failed.
        """
        self.wait()
        run, files = self._run, self._files
        captured = capture(training)
        contents = Contents(
            items=written_here(captured.items, run), state=captured.state, state_tensors=captured.tensors
        )
        generation = agreed(run, lambda: self._open(folder, contents, training, auxiliary))
        generation, token = run.backend.broadcast_object((generation, uuid.uuid4().hex), run.world)
        target = Target(folder=folder, generation=generation, token=token)

        def finished() -> None:
            if keep is not None:
                prune(folder.parent, keep, files)

        if not background:
            save(contents, target, run, files, finished)
            return
        self._pending = agreed(run, lambda: BackgroundSave(contents, target, run, files, finished, self._memory))
        atexit.register(self._at_exit)

    def _open(
        self, folder: Path, contents: Contents, training: Training, auxiliary: Callable[[], Mapping[str, bytes]]
    ) -> int:
        """The main process's preparations; returns the generation."""
        if self._run.backend.rank:
            return 0
        for path in (folder, folder / MODEL_FOLDER, folder / "optimizer"):
            self._files.make_folder(path)
        contents.info = describe(training)
        contents.auxiliary = dict(auxiliary())
        if not has_manifest(folder):
            return 0
        try:
            return read_manifest(folder).generation + 1
        except CheckpointError:  # damaged: nothing in there can be loaded, so nothing has to be kept
            self._files.remove(folder / NAME)
            return 0

    def wait(self) -> None:
        """Waits for a save in the background. Collective.

        Raises:
            CheckpointError: on every rank, if it failed on any.
        """
        pending, self._pending = self._pending, None
        if pending is None:
            return
        atexit.unregister(self._at_exit)

        def report() -> None:
            if pending.error is not None:
                raise pending.error

        pending.join_share()
        try:
            agreed(self._run, report)
        except CheckpointError:
            pending.abandon()
            pending.join()
            raise
        pending.join()
        agreed(self._run, report)

    def _at_exit(self) -> None:
        """The interpreter ends with a save under way: a failure must not go unnoticed."""
        pending, self._pending = self._pending, None
        if pending is None:
            return
        pending.join()
        if pending.error is not None:
            print(f"neuron_accel: the last checkpoint was not saved: {pending.error}", file=sys.stderr, flush=True)
            sys.stdout.flush()
            os._exit(1)  # an exit handler has no other way to change the exit code

    def load(self, training: Training, folder: Path, *, verify: bool = True) -> dict[str, int]:
        """See :func:`neuron_accel.checkpoint.load.load`. Collective."""
        self.wait()
        return load(training, folder, verify=verify)

    def latest(self, folder: Path) -> Path | None:
        """The newest complete checkpoint ``checkpoint_N`` in ``folder``, the same on every rank. Collective."""
        self.wait()
        run = self._run
        found = agreed(run, lambda: latest(folder) if run.backend.rank == 0 else None)
        return run.backend.broadcast_object(found, run.world)


def describe(training: Training) -> dict[str, Any]:
    """What the manifest says about where a checkpoint comes from."""
    run = training.run
    plan = run.plan.to_dict()
    return {
        "saved": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "world_size": run.mesh.world_size,
        "mesh": mesh_to(run.mesh),
        "plan": plan,
        "fingerprint": run.plan.fingerprint(),
        "plugins": dict(run.plan.provenance),
        "libraries": _versions(),
        "models": [None if m is None else {"class": type(m.original).__name__} for m in training.models],
        "optimizers": [type(getattr(o, "optimizer", o)).__name__ for o in training.optimizers],
        "counters": dict(training.counters),
    }


def _versions() -> dict[str, str]:
    result = {}
    for name in _LIBRARIES:
        try:
            result[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return result


def auxiliary_files(model: torch.nn.Module, tokenizer: Any, staging: Path) -> dict[str, bytes]:
    """A model's configuration and a tokenizer's files, by name.

    Args:
        model: as the user built it.
        tokenizer: anything with ``save_pretrained``, or None.
        staging: an empty folder for it to write into.
    """
    for part in (getattr(model, "config", None), getattr(model, "generation_config", None), tokenizer):
        if hasattr(part, "save_pretrained"):
            part.save_pretrained(staging)
    return {
        path.relative_to(staging).as_posix(): path.read_bytes() for path in sorted(staging.rglob("*")) if path.is_file()
    }
