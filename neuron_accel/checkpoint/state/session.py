# SPDX-License-Identifier: Apache-2.0
"""``save_state`` and ``load_state``: Accelerate's arguments, hooks and names of folders."""

from __future__ import annotations

import atexit
import logging
import os
import sys
import tempfile
import threading
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from neuron_accel.checkpoint.format.files import Files
from neuron_accel.checkpoint.format.manifest import (
    NAME,
    NUMBERED,
    has_manifest,
    last_number,
    latest,
    latest_of,
    read_manifest,
    saves_in,
)
from neuron_accel.checkpoint.state.fitting import check_counters
from neuron_accel.checkpoint.state.full_state import full_state_dict, save_configuration, save_in_full
from neuron_accel.checkpoint.state.load import load, load_weights
from neuron_accel.checkpoint.state.resume import Resumed, SavedBatch, describe_loaded
from neuron_accel.checkpoint.state.save import BackgroundSave, SaveAttempt, StagingMemory, prune
from neuron_accel.checkpoint.state.snapshot import check_equal as check_equal_values
from neuron_accel.checkpoint.state.snapshot import written_here
from neuron_accel.checkpoint.state.training import TrainingObjects, capture, describe, mesh_from
from neuron_accel.checkpoint.tools.consolidate import checkpoint_folder
from neuron_accel.engine.runtime.run import agreed
from neuron_accel.errors import CheckpointError, CommunicationError, NeuronAccelError, UsageError
from neuron_accel.storage import Location, RemotePath, location

if TYPE_CHECKING:
    from accelerate.utils import ProjectConfiguration
    from torch import nn

    from neuron_accel.engine.runtime.run import PreparedModel, Run

_log = logging.getLogger(__name__)
LATEST = "latest"


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
    """Saves and loads the checkpoints of an accelerator, one at a time.

    Args:
        source: access to the objects to save and load.
        files: performs the operations on files.
    """

    def __init__(self, source: Source, files: Files | None = None) -> None:
        self._source, self._run, self._project = source, source.run, source.project
        self._files, self._memory = files or Files(), StagingMemory()
        self._pending: BackgroundSave | None = None
        self._tokens: dict[Location, str] = {}  # of this run's last saves, by folder
        self._saves, self._counted = 0, set[Location]()  # saves so far, beginning with those found in these folders
        self._said_what_is_written = self._waits_for_requests = False

    # ---- saving ------------------------------------------------------------------------------------------------------
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
        project, run = self._project, self._run
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
        folder = self._next_numbered() if automatic else self._common(_given(output_dir))
        training = self._source.training(self._after_hooks(folder))
        try:
            self.wait()
        except CheckpointError as error:  # this save may succeed
            level = logging.WARNING if self._is_main else logging.DEBUG
            _log.log(level, "The checkpoint before this one was not saved: %s", error)
        contents = capture(training)
        if check_equal:
            check_equal_values(contents.items, run)
        contents.items = written_here(contents.items, run)

        def complete() -> None:
            contents.info = {**describe(training), "saves": self._number_of(folder)}
            contents.auxiliary = self._auxiliary(training, tokenizer)

        def finished() -> None:
            if automatic and project.total_limit is not None:
                prune(folder.parent, project.total_limit, self._files)
            self._tokens[folder] = attempt.token

        attempt = SaveAttempt(contents, folder, run, self._files, finished)
        attempt.enter(complete, self._tokens.get(folder))
        if async_save:
            self._go_on_in_background(attempt)
        else:
            attempt.finish()
        if automatic:
            project.iteration += 1
        return str(folder)

    def _number_of(self, folder: Location) -> int:
        """The number of saves up to that into ``folder``, on the main process: it only grows, as clocks may not."""
        if folder.parent not in self._counted:
            self._counted.add(folder.parent)
            self._saves = max(self._saves, last_number(folder.parent))
        self._saves += 1
        return self._saves

    def _auxiliary(self, training: TrainingObjects, tokenizer: Any) -> dict[str, bytes]:
        """The files of the main model's configuration and of the tokenizer, by name."""
        main = training.main_model() or next(iter(self._run.models), None)  # a hook may have saved the models
        model = None if main is None else main.original
        with tempfile.TemporaryDirectory() as staging:
            save_configuration(model, staging)
            if hasattr(tokenizer, "save_pretrained"):
                tokenizer.save_pretrained(Path(staging))
            paths = [path for path in sorted(Path(staging).rglob("*")) if path.is_file()]
            return {path.relative_to(staging).as_posix(): path.read_bytes() for path in paths}

    def _after_hooks(self, folder: Location) -> list[nn.Module]:
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

    # ---- saving in the background ------------------------------------------------------------------------------------
    def _go_on_in_background(self, attempt: SaveAttempt) -> None:
        try:
            agreed(self._run, lambda: attempt.detach(self._memory))
        except Exception:
            attempt.abandon()
            raise
        self._pending = BackgroundSave(attempt)
        atexit.register(self._at_exit)
        if isinstance(attempt.folder, RemotePath) and not self._waits_for_requests:
            self._waits_for_requests = True
            _before_executors_end(weakref.WeakMethod(self._join_pending))

    def wait(self) -> None:
        """Waits for a save in the background. Collective.

        Raises:
            CheckpointError: on every rank, if it failed on any.
        """
        run, pending, self._pending = self._run, self._pending, None
        if pending is None:
            return
        atexit.unregister(self._at_exit)
        pending.join_writing()
        errors = run.backend.gather_object(pending.error, run.world) or ()
        failed = run.backend.broadcast_object(next((e for e in errors if e is not None), None), run.world)
        if failed is not None:
            pending.give_up(failed)
        pending.join()
        try:
            agreed(run, pending.report)
        except NeuronAccelError as error:
            pending.attempt.abandon(alone=isinstance(error, CommunicationError))
            raise

    def _join_pending(self) -> None:
        if self._pending is not None:
            self._pending.join()

    def _at_exit(self) -> None:
        """Waits for a save when the interpreter exits, and reports its failure."""
        pending, self._pending = self._pending, None
        if pending is None:
            return
        pending.join()
        if pending.error is not None:
            pending.attempt.abandon(alone=True)
            print(f"neuron_accel: the last checkpoint was not saved: {pending.error}", file=sys.stderr, flush=True)
            sys.stdout.flush()
            os._exit(1)  # the only way to change the exit code in an exit handler

    # ---- loading -----------------------------------------------------------------------------------------------------
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
        self.wait()
        counters, info = load(training, folder, verify=verify)
        self._saves = max(self._saves, saves_in(info))
        if not counters:
            _log.warning(
                "%s contains only weights: optimizers, schedulers and loaders start from the beginning.", folder
            )
        if self._project.automatic_checkpoint_naming:
            self._project.iteration = counters.get("iteration", self._project.iteration - 1) + 1
        resumed = describe_loaded(folder, info, training.loaders)
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

    def adopt(self, record: PreparedModel) -> None:
        """Loads the weights that a plugin names into a sharded model, and makes its ``save_pretrained`` write the full
        model. Collective.

        Raises:
            CheckpointError: if the weights do not fit the model.
        """
        run = self._run
        named = record.initial_weights if len(run.models) == 1 else {}
        if len(named) > 1:
            raise UsageError(
                f"Plugins {' and '.join(map(repr, named))} name initial weights.",
                where="; ".join(f"{name}: {str(folder)!r}" for name, folder in named.items()),
                why="a model loads its weights from one folder; those of one plugin would replace the other's",
                fix="give a folder to one of them",
            )
        for folder in named.values():
            load_weights(record, agreed(run, partial(checkpoint_folder, location(folder))), run)
        save_in_full(record, run)

    def training(self) -> TrainingObjects:
        """Returns all objects that a checkpoint contains."""
        return self._source.training(self._source.modules())

    @property
    def _is_main(self) -> bool:
        return self._run.backend.rank == 0

    def _say(self, text: str) -> None:
        if self._is_main:
            print(f"neuron_accel: {text}", file=sys.stderr, flush=True)

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

    def _next_numbered(self) -> Location:
        folder, run = self._project_dir() / NUMBERED / f"checkpoint_{self._project.iteration}", self._run
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
            return self._latest(folder, latest_of)
        if input_dir is not None:
            return self._common(_given(input_dir))
        if not automatic:
            raise UsageError("No input_dir provided and automatic checkpoint naming is disabled.")
        root = self._project_dir() / NUMBERED
        found = self._latest(root, latest)
        if found is None and not optional:
            raise CheckpointError(f"There is no complete checkpoint in {str(root)!r}.", where=str(root))
        return found

    def _latest(self, folder: Location, find: Callable[[Location], Location | None]) -> Location | None:
        """Returns the checkpoint that ``find`` finds in ``folder``, the same on every rank, or None."""
        self.wait()
        run = self._run
        found = agreed(run, lambda: find(folder) if self._is_main else None)
        text = run.backend.broadcast_object(None if found is None else str(found), run.world)
        return None if text is None else location(text)


def _given(folder: str | os.PathLike[str] | None) -> Location:
    if folder is None:
        raise UsageError("`save_state` needs a folder.", fix="give `output_dir`, or use automatic checkpoint naming")
    return _absolute(folder)


def _absolute(folder: str | os.PathLike[str]) -> Location:
    path = location(folder)
    return Path(os.path.abspath(os.path.expanduser(path))) if isinstance(path, Path) else path


def _before_executors_end(method: weakref.WeakMethod[Callable[[], None]]) -> None:
    """Calls a method when the interpreter exits, before thread pools refuse work. Requests to a store need one (to look
    up a host), and exit handlers run too late for that."""
    register = getattr(threading, "_register_atexit", None)  # what concurrent.futures itself uses
    if register is not None:
        register(lambda: (call := method()) and call())
