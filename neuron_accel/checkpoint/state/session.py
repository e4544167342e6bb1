# SPDX-License-Identifier: Apache-2.0
"""``save_state`` and ``load_state``: Accelerate's arguments, names of folders, and which checkpoints are kept."""

from __future__ import annotations

import atexit
import importlib.metadata
import logging
import os
import sys
import tempfile
import threading
import time
import uuid
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from neuron_accel.checkpoint.format.files import Files, failure, read_bytes
from neuron_accel.checkpoint.format.manifest import NAME, Manifest, has_manifest, read_manifest
from neuron_accel.checkpoint.state.fitting import check_counters
from neuron_accel.checkpoint.state.full_state import full_state_dict, save_in_full
from neuron_accel.checkpoint.state.load import load, load_weights
from neuron_accel.checkpoint.state.lock import SaveLock, this_process
from neuron_accel.checkpoint.state.lock import describe as describe_process
from neuron_accel.checkpoint.state.matching import describe_model
from neuron_accel.checkpoint.state.resume import (
    NUMBERED,
    Resumed,
    SavedBatch,
    describe_loaded,
    last_number,
    latest,
    latest_of,
    numbered,
    saves_in,
)
from neuron_accel.checkpoint.state.save import BackgroundSave, Contents, Destination, is_of_a_save, save
from neuron_accel.checkpoint.state.snapshot import check_equal as check_equal_values
from neuron_accel.checkpoint.state.snapshot import folder_of, written_here
from neuron_accel.checkpoint.state.staging import StagingMemory
from neuron_accel.checkpoint.state.training import TrainingObjects, capture, mesh_from, mesh_to
from neuron_accel.checkpoint.tools.consolidate import checkpoint_folder
from neuron_accel.engine.plan.restart import RUN
from neuron_accel.engine.runtime.run import agreed
from neuron_accel.errors import CheckpointError, NeuronAccelError, UsageError
from neuron_accel.storage import Location, RemotePath, location

if TYPE_CHECKING:
    from accelerate.utils import ProjectConfiguration
    from torch import nn

    from neuron_accel.engine.runtime.run import PreparedModel, Run


# ---- ``save_state`` and ``load_state`` with Accelerate's arguments, hooks and folder names ---------------------------
_log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class Source:
    """Gives a :class:`Session` access to the objects of an accelerator.

    Args:
        run: the run.
        project: Accelerate's project configuration: folder and numbers of checkpoints.
        modules: returns the prepared modules.
        training: returns the objects to save or load, with the models of the given modules; the others are None.
        save_hooks, load_hooks: hooks registered with ``register_save_state_pre_hook`` and
            ``register_load_state_pre_hook``.
    """

    run: Run
    project: ProjectConfiguration
    modules: Callable[[], list[nn.Module]]
    training: Callable[[Sequence[nn.Module]], TrainingObjects]
    save_hooks: Mapping[Any, Callable[..., None]]
    load_hooks: Mapping[Any, Callable[..., None]]


class Session:
    """Saves and loads the checkpoints of an accelerator.

    Args:
        source: access to the objects to save and load.
        files: performs the operations on files.
    """

    def __init__(self, source: Source, files: Files | None = None) -> None:
        self._source, self._run, self._project = source, source.run, source.project
        self._checkpoints = Checkpoints(source.run, files)
        self._said_what_is_written = False

    def save(
        self,
        output_dir: str | os.PathLike[str] | None,
        *,
        safe_serialization: bool = True,
        async_save: bool = False,
        tokenizer: Any = None,
        check_equal: bool = True,
    ) -> str:
        """See :meth:`NeuronAccelerator.save_state`."""
        project = self._project
        if not safe_serialization and not self._said_what_is_written:
            self._said_what_is_written = True
            _log.log(
                logging.WARNING if self._is_main else logging.DEBUG,
                "`save_state(safe_serialization=False)` writes safetensors and JSON too, because unpickling a "
                "checkpoint would run code that it contains. `save_model(..., safe_serialization=False)` writes "
                "pytorch_model.bin.",
            )
        if project.save_on_each_node:
            raise UsageError(
                "`save_on_each_node` is not supported: a checkpoint is one folder that all machines share.",
                why="every rank writes its own shards into it",
                fix="save to a file system that all machines share",
            )
        automatic = project.automatic_checkpoint_naming
        folder = self._numbered() if automatic else self._common(_given(output_dir))
        training = self._source.training(self._kept_models(folder))
        self._checkpoints.save(
            training,
            folder,
            auxiliary=lambda: self._auxiliary(training, tokenizer),
            keep=project.total_limit if automatic else None,
            background=async_save,
            check_equal=check_equal,
        )
        if automatic:
            project.iteration += 1
        return str(folder)

    def load(
        self,
        input_dir: str | os.PathLike[str] | None,
        *,
        resume: str | None = None,
        verify: bool = True,
        check: Callable[[SavedBatch], None] | None = None,
    ) -> tuple[Mapping[str, int], Resumed]:
        """See :meth:`NeuronAccelerator.load_state`.

        Args:
            input_dir, resume, verify: as there.
            check: is called before anything is loaded, with what the checkpoint says of its steps.

        Returns:
            The saved counters, empty if the folder contains only weights or there was nothing to load, and a
            description of what was loaded.
        """
        if resume not in (None, LATEST):
            raise UsageError(f"`resume={resume!r}` is not possible here.", fix="use load_state(resume='latest')")
        folder = self._found(input_dir, optional=resume is not None)
        models = list(self._source.modules())
        if folder is None:
            self._say(str(Resumed()))
            return {}, Resumed()
        if check is not None:
            check(self.saved_batch(folder))
        for hook in self._source.load_hooks.values():
            hook(models, str(folder))
        training = self._source.training(models)
        counters = self._checkpoints.load(training, folder, verify=verify)
        if not counters:
            _log.warning(
                "%s contains only weights: optimizers, schedulers and loaders start from the beginning.", folder
            )
        if self._project.automatic_checkpoint_naming:
            self._project.iteration = counters.get("iteration", self._project.iteration - 1) + 1
        resumed = describe_loaded(folder, self._info_of(folder) if counters else {}, training.loaders)
        if resume is not None:
            self._say(str(resumed))
        return counters, resumed

    def saved_batch(self, folder: Location) -> SavedBatch:
        """What a checkpoint says of the optimizer steps of the run that saved it. Collective.

        Raises:
            CheckpointError: on every rank, if it does not say that, as a folder that contains only weights.
        """

        def read() -> SavedBatch | None:
            if not self._is_main:
                return None
            info = read_manifest(folder).info
            try:
                mesh, counters = mesh_from(info["mesh"]), check_counters(info["counters"])
                size = mesh.size(mesh.data_axes)
                return SavedBatch(
                    data_parallel=size,
                    accumulation=max(1, counters.get("accumulation", 1)),
                    samples=counters.get("samples", 0),
                    steps_at_once=max(1, counters.get("steps_at_once", size)),
                )
            except (KeyError, TypeError, ValueError, AttributeError) as error:
                raise CheckpointError(f"The manifest cannot be read: {error!r}.", where=str(folder / NAME)) from error

        return self._run.backend.broadcast_object(agreed(self._run, read), self._run.world)

    def _info_of(self, folder: Location) -> dict[str, Any]:
        """When and by how many ranks a checkpoint was saved. Collective."""
        run, told = self._run, ("saved", "world_size")
        info = agreed(run, lambda: read_manifest(folder).info if self._is_main else {})
        return run.backend.broadcast_object({name: info[name] for name in told if name in info}, run.world)

    def _say(self, text: str) -> None:
        if self._is_main:
            print(f"neuron_accel: {text}", file=sys.stderr, flush=True)

    def adopt(self, record: PreparedModel) -> None:
        """Loads the weights that a plugin names into a sharded model, and makes its ``save_pretrained`` write the full
        model. Collective.

        Raises:
            CheckpointError: if the weights do not fit the model.
        """
        run = self._run
        named = (folder for plugin in run.plan.plugins if (folder := plugin.initial_weights()) is not None)
        folder = next(named, None)  # the planner allows one at most
        if folder is not None and len(run.models) == 1:
            load_weights(record, agreed(run, lambda: checkpoint_folder(location(folder))), run)
        save_in_full(record, run)

    def wait(self) -> None:
        """Waits for a save in the background, and raises its error on every rank. Collective."""
        self._checkpoints.wait()

    # ---- folders -----------------------------------------------------------------------------------------------------
    def _common(self, folder: Location) -> Location:
        """Returns the folder that the main process was given; other ranks may have been given a temporary folder of
        their own."""
        run = self._run
        return location(run.backend.broadcast_object(str(folder), run.world))

    def _project_dir(self) -> Location:
        if self._project.project_dir is None:
            raise UsageError(
                "No project folder is configured for checkpoints.",
                fix="NeuronAccelerator(project_config=ProjectConfiguration(project_dir, "
                "automatic_checkpoint_naming=True)), or load_state(folder, resume='latest')",
            )
        return _absolute(self._project.project_dir)

    def _root(self) -> Location:
        return self._project_dir() / NUMBERED

    def _numbered(self) -> Location:
        folder, run = self._root() / f"checkpoint_{self._project.iteration}", self._run
        exists = agreed(run, lambda: self._is_main and has_manifest(folder))
        if run.backend.broadcast_object(exists, run.world):
            raise UsageError(
                f"{folder} exists already.",
                why="a new training run would overwrite the checkpoints of another",
                fix="load it first (`load_state()` continues its numbering), or set "
                "`accelerator.project_configuration.iteration`",
            )
        return folder

    def _found(self, input_dir: str | os.PathLike[str] | None, *, optional: bool) -> Location | None:
        """The folder to load; None if there is none and it is ``optional``."""
        automatic = self._project.automatic_checkpoint_naming
        if optional and (input_dir is not None or not automatic):
            folder = self._common(self._project_dir() if input_dir is None else _given(input_dir))
            return self._checkpoints.latest(folder, latest_of)
        if input_dir is not None:
            return self._common(_given(input_dir))
        if not automatic:
            raise UsageError("No input_dir provided and automatic checkpoint naming is disabled.")
        root = self._root()
        found = self._checkpoints.latest(root)
        if found is None and not optional:
            raise CheckpointError(f"There is no complete checkpoint in {str(root)!r}.", where=str(root))
        return found

    # ---- contents ----------------------------------------------------------------------------------------------------
    def _kept_models(self, folder: Location) -> list[nn.Module]:
        """Calls the hooks and returns the models that are still to be saved; a hook that saves a model itself removes
        its weights from the list."""
        hooks, modules, run = list(self._source.save_hooks.values()), self._source.modules(), self._run
        if not hooks:
            return modules
        if self._is_main and isinstance(folder, Path):
            folder.mkdir(parents=True, exist_ok=True)
        run.backend.barrier()
        records = [run.prepared(module) for module in modules]
        weights = [
            m.state_dict() if r is None else full_state_dict(r, run) for m, r in zip(modules, records, strict=True)
        ]
        all_weights = list(weights)
        for hook in hooks:
            hook(modules, weights, str(folder))
        return [m for m, given in zip(modules, all_weights, strict=True) if any(given is left for left in weights)]

    def training(self) -> TrainingObjects:
        """Returns all objects that a checkpoint contains."""
        return self._source.training(self._source.modules())

    @property
    def _is_main(self) -> bool:
        return self._run.backend.rank == 0

    def _auxiliary(self, training: TrainingObjects, tokenizer: Any) -> dict[str, bytes]:
        main = training.main_model() or next(iter(self._run.models), None)  # None: a hook has saved the models
        with tempfile.TemporaryDirectory() as staging:
            return auxiliary_files(None if main is None else main.original, tokenizer, Path(staging))


def _given(folder: str | os.PathLike[str] | None) -> Location:
    if folder is None:
        raise UsageError("`save_state` needs a folder.", fix="give `output_dir`, or use automatic checkpoint naming")
    return _absolute(folder)


def _absolute(folder: str | os.PathLike[str]) -> Location:
    path = location(folder)
    return Path(os.path.abspath(os.path.expanduser(path))) if isinstance(path, Path) else path


# ---- The checkpoints of one run --------------------------------------------------------------------------------------
LATEST = "latest"
_LIBRARIES = ("neuron-accel", "torch", "accelerate", "transformers", "safetensors", "torch-xla", "torch-neuronx")


class Checkpoints:
    """Saves and loads checkpoints, one save at a time.

    Args:
        run: the run.
        files: performs the operations on files.
    """

    def __init__(self, run: Run, files: Files | None = None) -> None:
        self._run, self._files = run, files or Files()
        self._pending: BackgroundSave | None = None
        self._lock: SaveLock | None = None
        self._saved: dict[Location, str] = {}  # tokens of the last saves of this run, by folder
        self._saves, self._counted = 0, set[Location]()  # saves so far, beginning with those found in these folders
        self._memory = StagingMemory()
        self._waits_for_requests = False

    def save(
        self,
        training: TrainingObjects,
        folder: Location,
        *,
        auxiliary: Callable[[], Mapping[str, bytes]] = dict,
        keep: int | None = None,
        background: bool = False,
        check_equal: bool = True,
    ) -> None:
        """Saves into ``folder``. Collective.

        Args:
            training: the objects to save.
            folder: the folder, created if needed. A checkpoint in it stays valid until the new one is complete.
            auxiliary: returns further files by name; called on the main process.
            keep: number of newest complete checkpoints ``checkpoint_N`` to keep, including this one; None for all.
            background: whether to return as soon as all tensors are copied to host memory.
            check_equal: whether to check that values that only one rank writes are equal on all ranks that hold them.

        Raises:
            CheckpointError: on every rank, if the checkpoint cannot be written, or another run saves into the folder.
                The failure of an earlier save in the background is only logged: this one may succeed.
        """
        run, files = self._run, self._files
        try:
            self.wait()
        except CheckpointError as error:
            level = logging.DEBUG if run.backend.rank else logging.WARNING
            _log.log(level, "The checkpoint before this one was not saved: %s", error)
        for before_save in run.hooks["before_save"]:
            before_save(run)
        captured = capture(training)
        if check_equal:
            check_equal_values(captured.items, run)
        contents = Contents(
            items=written_here(captured.items, run), state=captured.state, state_tensors=captured.tensors
        )
        lock, is_new = SaveLock(folder, files), isinstance(folder, Path) and not folder.exists()
        generation = agreed(run, lambda: self._open(folder, contents, training, auxiliary, lock, is_new))
        generation, token = run.backend.broadcast_object((generation, uuid.uuid4().hex), run.world)
        destination = Destination(
            folder=folder, generation=generation, token=token, is_new=is_new, confirm=lock.confirm
        )

        def finished() -> None:
            if keep is not None:
                prune(folder.parent, keep, files)
            self._saved[folder] = token
            lock.release()

        self._lock = lock
        try:
            if not background:
                save(contents, destination, run, files, finished)
                return
            self._pending = agreed(
                run, lambda: BackgroundSave(contents, destination, run, files, finished, self._memory)
            )
        except BaseException:
            self._close(destination)
            raise
        atexit.register(self._at_exit)
        if isinstance(folder, RemotePath) and not self._waits_for_requests:
            self._waits_for_requests = True
            _before_executors_end(weakref.WeakMethod(self._join_pending))

    def _join_pending(self) -> None:
        if self._pending is not None:
            self._pending.join()

    def _close(self, destination: Destination) -> None:
        """Releases the lock of a save that has failed and whose files were removed, and removes empty folders."""
        if self._lock is not None:
            self._lock.release()
        if self._run.backend.rank == 0:
            destination.remove_empty_folders()

    def _open(
        self,
        folder: Location,
        contents: Contents,
        training: TrainingObjects,
        auxiliary: Callable[[], Mapping[str, bytes]],
        lock: SaveLock,
        is_new: bool,
    ) -> int:
        """Prepares a save on the main process: creates folders, acquires the lock and completes ``contents``. Returns
        the generation."""
        if self._run.backend.rank:
            return 0
        try:
            self._files.make_folder(folder)
            lock.acquire()
            return self._prepare(folder, contents, training, auxiliary)
        except BaseException:
            lock.release()
            Destination(folder=folder, generation=0, token="", is_new=is_new).remove_empty_folders()
            raise

    def _prepare(
        self,
        folder: Location,
        contents: Contents,
        training: TrainingObjects,
        auxiliary: Callable[[], Mapping[str, bytes]],
    ) -> int:
        kinds = ("model", "optimizer", *(("plugin",) if contents.state.get("plugin_forms") else ()))
        for kind in kinds:
            self._files.make_folder(folder / folder_of(kind))
        if folder.parent not in self._counted:
            self._counted.add(folder.parent)
            self._saves = max(self._saves, last_number(folder.parent))
        self._saves += 1
        contents.info = {**describe(training), "saves": self._saves}
        contents.auxiliary = dict(auxiliary())
        if not has_manifest(folder):
            return 0
        try:
            stored = read_bytes(folder / NAME)  # if this fails, it may be valid
        except OSError as error:
            raise failure("read", folder / NAME, error) from error
        try:
            manifest = Manifest.from_bytes(stored, str(folder / NAME))
        except CheckpointError:  # the manifest is damaged, so the checkpoint cannot be loaded and need not be kept
            self._files.remove(folder / NAME)
            return 0
        other = manifest.info.get("saved_by")
        other = other if isinstance(other, dict) else {}
        if folder in self._saved and manifest.info.get("save") != self._saved[folder]:
            raise CheckpointError(
                f"Another run, {describe_process(other)}, has saved into this folder since this run did.",
                where=str(folder),
                why="the two runs would overwrite each other's checkpoints",
                fix="give each run a folder of its own",
            )
        return manifest.generation + 1

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

        pending.join_files()
        try:
            agreed(self._run, report)
        except NeuronAccelError:
            pending.abandon()
            pending.join()
            self._discard(pending)
            raise
        pending.join()
        try:
            agreed(self._run, report)
        except NeuronAccelError:
            self._discard(pending)
            raise

    def _discard(self, pending: BackgroundSave) -> None:
        """Removes what a failed save in the background has written. Collective."""
        stays = pending.destination.is_current() if self._run.backend.rank == 0 else None
        pending.discard(stays=self._run.backend.broadcast_object(stays, self._run.world))
        self._run.backend.barrier()
        self._close(pending.destination)

    def _at_exit(self) -> None:
        """Waits for a save when the interpreter exits, and reports its failure."""
        pending, self._pending = self._pending, None
        if pending is None:
            return
        pending.join()
        if pending.error is not None:
            pending.discard(stays=pending.destination.is_current())
            self._close(pending.destination)
            print(f"neuron_accel: the last checkpoint was not saved: {pending.error}", file=sys.stderr, flush=True)
            sys.stdout.flush()
            os._exit(1)  # the only way to change the exit code in an exit handler

    def load(self, training: TrainingObjects, folder: Location, *, verify: bool = True) -> dict[str, int]:
        """Loads a checkpoint, see :func:`neuron_accel.checkpoint.state.load.load`. Collective."""
        self.wait()
        counters = load(training, folder, verify=verify)
        if counters and self._run.backend.rank == 0:
            self._saves = max(self._saves, saves_in(read_manifest(folder).info))
        for after_load in self._run.hooks["after_load"]:
            after_load(self._run)
        return counters

    def latest(self, folder: Location, find: Callable[[Location], Location | None] = latest) -> Location | None:
        """Returns the checkpoint that ``find`` finds in ``folder``, the same on every rank, or None. Collective."""
        self.wait()
        run = self._run
        found = agreed(run, lambda: find(folder) if run.backend.rank == 0 else None)
        text = run.backend.broadcast_object(None if found is None else str(found), run.world)
        return None if text is None else location(text)


def _before_executors_end(method: weakref.WeakMethod[Callable[[], None]]) -> None:
    """Calls a method when the interpreter exits, before thread pools refuse work. Requests to a store need one (to look
    up a host), and exit handlers run too late for that."""
    register = getattr(threading, "_register_atexit", None)  # what concurrent.futures itself uses
    if register is not None:
        register(lambda: (call := method()) and call())


def describe(training: TrainingObjects) -> dict[str, Any]:
    """Returns ``info`` of the manifest: a description of the run that saves a checkpoint."""
    run = training.run
    plan = run.plan.to_dict()
    return {
        "saved": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "saved_by": this_process(),
        "run": os.environ.get(RUN),
        "world_size": run.mesh.world_size,
        "mesh": mesh_to(run.mesh),
        "plan": plan,
        "fingerprint": run.plan.fingerprint(),
        "plugins": dict(run.plan.provenance),
        "libraries": _versions(),
        "models": [None if m is None else describe_model(m) for m in training.models],
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


def auxiliary_files(model: torch.nn.Module | None, tokenizer: Any, staging: Path) -> dict[str, bytes]:
    """Returns the files of a model's configuration and of a tokenizer, by name.

    Args:
        model: the model that the user built, or None.
        tokenizer: an object with ``save_pretrained``, or None.
        staging: an empty folder into which they are written first.
    """
    parts: list[Any] = [getattr(model, "config", None), getattr(model, "generation_config", None), tokenizer]
    for part in parts:
        if hasattr(part, "save_pretrained"):
            part.save_pretrained(staging)
    return {
        path.relative_to(staging).as_posix(): path.read_bytes() for path in sorted(staging.rglob("*")) if path.is_file()
    }


# ---- Numbered checkpoints in one folder ------------------------------------------------------------------------------
def prune(folder: Location, keep: int, files: Files) -> list[Location]:
    """Removes all but the newest ``keep`` complete checkpoints, and incomplete ones that are older than the newest, but
    not one that another process is saving.

    Must be called when the newest is durable. The manifest of a checkpoint is removed first, so that an interruption
    does not leave a folder that looks complete.

    Returns:
        The removed folders.
    """
    complete = [(number, path) for number, path in numbered(folder).items() if has_manifest(path)]
    if not complete:
        return []
    number, newest = complete[-1]
    old = [path for _, path in complete[:-keep]]
    incomplete = [path for other, path in numbered(folder).items() if other < number and not has_manifest(path)]
    old += [path for path in incomplete if not SaveLock(path, files).is_held(newest / NAME)]
    for path in old:
        files.remove(path / NAME)
        files.sync_folder(path)
        files.remove(path, is_folder=True)
        if isinstance(path, RemotePath):
            path.abort_uploads(is_of_a_save)
    return old
