"""``save_state`` and ``load_state`` with Accelerate's arguments, hooks and folder names."""

from __future__ import annotations

import logging
import os
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

from neuron_accel.checkpoint.checkpoints import LATEST, Checkpoints, auxiliary_files
from neuron_accel.checkpoint.consolidate import checkpoint_folder
from neuron_accel.checkpoint.files import Files
from neuron_accel.checkpoint.load import load_weights
from neuron_accel.checkpoint.manifest import has_manifest
from neuron_accel.checkpoint.pretrained import save_in_full
from neuron_accel.checkpoint.training import Training
from neuron_accel.engine.errors import CheckpointError, UsageError

if TYPE_CHECKING:
    from neuron_accel.accelerator import NeuronAccelerator
    from neuron_accel.engine.run import PreparedModel

_log = logging.getLogger(__name__)


class Session:
    """The checkpoints of one accelerator.

    Args:
        accelerator: whose objects are saved.
        files: how files are written.
    """

    def __init__(self, accelerator: NeuronAccelerator, files: Files | None = None) -> None:
        self._accelerator = accelerator
        self._checkpoints = Checkpoints(accelerator.run, files)

    def save(
        self,
        output_dir: str | os.PathLike[str] | None,
        *,
        safe_serialization: bool = True,
        async_save: bool = False,
        tokenizer: Any = None,
        **unknown: Any,
    ) -> str:
        """See :meth:`NeuronAccelerator.save_state`."""
        project = self._accelerator.project_configuration
        if not safe_serialization:
            raise UsageError(
                "`safe_serialization=False` is not possible: checkpoints hold safetensors and JSON only.",
                why="unpickling a checkpoint runs whatever code it contains",
            )
        if unknown:
            raise UsageError(f"`save_state` has no option {sorted(unknown)[0]!r}.")
        if project.save_on_each_node:
            raise UsageError(
                "`save_on_each_node` is not possible: a checkpoint is one folder that all machines share.",
                why="every rank writes its own part of it",
                fix="save to a file system that all machines see",
            )
        automatic = project.automatic_checkpoint_naming
        folder = self._numbered() if automatic else self._common(_given(output_dir))
        training = self._training(self._kept_models(folder))
        self._checkpoints.save(
            training,
            folder,
            auxiliary=lambda: self._auxiliary(tokenizer),
            keep=project.total_limit if automatic else None,
            background=async_save,
        )
        if automatic:
            project.iteration += 1
        return str(folder)

    def load(self, input_dir: str | os.PathLike[str] | None, *, resume: str | None = None, verify: bool = True) -> bool:
        """See :meth:`NeuronAccelerator.load_state`."""
        if resume is not None and (input_dir is not None or resume != LATEST):
            raise UsageError(f"`resume={resume!r}` is not possible here.", fix="use load_state(resume='latest')")
        folder = self._found(input_dir, optional=resume is not None)
        if folder is None:
            return False
        accelerator = self._accelerator
        models = list(accelerator._models)
        for hook in accelerator._load_model_state_pre_hook.values():
            hook(models, str(folder))
        left = {id(model) for model in models}
        training = self._training([id(model) in left for model in accelerator._models])
        counters = self._checkpoints.load(training, folder, verify=verify)
        if not counters:
            _log.warning("%s holds weights only: optimizers, schedulers and loaders begin anew.", folder)
        accelerator.step = counters.get("step", accelerator.step)
        if accelerator.project_configuration.automatic_checkpoint_naming:
            accelerator.project_configuration.iteration = counters.get("iteration", accelerator.save_iteration - 1) + 1
        return True

    def adopt(self, record: PreparedModel) -> None:
        """A model has been divided: it takes the weights that a plugin names, and saves itself in full. Collective.

        Raises:
            CheckpointError: if the weights are not those of this model.
        """
        run = self._accelerator.run
        folders = [folder for plugin in run.plan.plugins if (folder := plugin.initial_weights()) is not None]
        if folders and len(run.models) == 1:
            load_weights(record, checkpoint_folder(Path(folders[-1])), run)
        save_in_full(record, run)

    def wait(self) -> None:
        """Waits for a save in the background; raises its error on every rank. Collective."""
        self._checkpoints.wait()

    # ---- folders ---------------------------------------------------------------------------------------------------
    def _common(self, folder: Path) -> Path:
        """The main process's folder: others may have named a temporary one of their own."""
        run = self._accelerator.run
        return Path(run.backend.broadcast_object(str(folder), run.world))

    def _root(self) -> Path:
        if self._accelerator.project_dir is None:
            raise UsageError(
                "There is no project folder to keep checkpoints in.",
                fix="NeuronAccelerator(project_config=ProjectConfiguration(project_dir, "
                "automatic_checkpoint_naming=True))",
            )
        return Path(os.path.abspath(os.path.expanduser(self._accelerator.project_dir)), "checkpoints")

    def _numbered(self) -> Path:
        folder = self._root() / f"checkpoint_{self._accelerator.save_iteration}"
        if self._accelerator.is_main_process and has_manifest(folder):
            message = f"{folder} exists already."
        else:
            message = None
        message = self._accelerator.run.backend.broadcast_object(message, self._accelerator.run.world)
        if message:
            raise UsageError(
                message,
                why="a new training would overwrite the checkpoints of another, one by one",
                fix="load it first (`load_state()` goes on counting), or set "
                "`accelerator.project_configuration.iteration`",
            )
        return folder

    def _found(self, input_dir: str | os.PathLike[str] | None, *, optional: bool) -> Path | None:
        if input_dir is not None:
            return self._common(_given(input_dir))
        if not optional and not self._accelerator.project_configuration.automatic_checkpoint_naming:
            raise UsageError("No input_dir provided and automatic checkpoint naming is disabled.")
        root = self._root()
        found = self._checkpoints.latest(root)
        if found is None and not optional:
            raise CheckpointError(f"There is no complete checkpoint in {str(root)!r}.", where=str(root))
        return found

    # ---- contents --------------------------------------------------------------------------------------------------
    def _kept_models(self, folder: Path) -> list[bool]:
        """Which models are still to be saved after the hooks; a hook that saves one itself takes its weights away."""
        accelerator = self._accelerator
        hooks = list(accelerator._save_model_state_pre_hook.values())
        if not hooks:
            return [True] * len(accelerator._models)
        if accelerator.is_main_process:
            folder.mkdir(parents=True, exist_ok=True)
        accelerator.wait_for_everyone()
        weights = [accelerator.get_state_dict(model, unwrap=False) for model in accelerator._models]
        all_weights = list(weights)
        for hook in hooks:
            hook(accelerator._models, weights, str(folder))
        return [any(given is left for left in weights) for given in all_weights]

    def _training(self, wanted: list[bool]) -> Training:
        accelerator = self._accelerator
        models = [
            accelerator.run.prepared(model) if want else None
            for model, want in zip(accelerator._models, wanted, strict=True)
        ]
        return Training(
            run=accelerator.run,
            models=models,
            optimizers=[getattr(prepared, "optimizer", prepared) for prepared in accelerator._optimizers],
            schedulers=accelerator._schedulers,
            loaders=accelerator._dataloaders,
            custom=accelerator._custom_objects,
            scaler=accelerator.scaler,
            counters={"step": accelerator.step, "iteration": accelerator.save_iteration},
        )

    def _auxiliary(self, tokenizer: Any) -> dict[str, bytes]:
        models = self._accelerator.run.models
        with tempfile.TemporaryDirectory() as staging:
            return auxiliary_files(models[0].original if models else None, tokenizer, Path(staging))


def _given(folder: str | os.PathLike[str] | None) -> Path:
    if folder is None:
        raise UsageError("`save_state` needs a folder.", fix="give `output_dir`, or use automatic checkpoint naming")
    return Path(os.path.abspath(os.path.expanduser(folder)))
