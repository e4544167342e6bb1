"""The accelerator that a Trainer drives."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from torch import nn

from neuron_accel.accelerator import NeuronAccelerator  # isort: skip  # first: it settles which device Accelerate uses
from accelerate.utils import release_memory

from neuron_accel.checkpoint.load import load_weights, refresh_masters


class TrainersAccelerator(NeuronAccelerator):
    """A :class:`NeuronAccelerator` for a caller that lets go of everything before each training and prepares again.

    What a plugin has cut cannot be prepared twice, so models and optimizers stay prepared until :meth:`start_over`.
    """

    def free_memory(self, *objects: Any) -> Any:
        """Lets go of loaders, schedulers and registered objects."""
        self.wait_for_checkpoint()
        self._dataloaders.clear()
        self._schedulers.clear()
        self._custom_objects.clear()
        self.step = 0
        return release_memory(*objects)

    def start_over(self) -> None:
        """Lets go of everything prepared."""
        super().free_memory()

    def prepare_once(self, model: nn.Module) -> nn.Module:
        """Prepares a model unless it is prepared; then what that gave."""
        record = self.run.prepared(model)
        return self.prepare_model(model) if record is None else record.module

    def wait_for_checkpoint(self) -> None:
        """Waits for a checkpoint that is written in the background; raises its error on every rank. Collective."""
        self._session.wait()

    def load_weights(self, model: nn.Module, folder: Path) -> None:
        """Gives a prepared model the weights of a checkpoint, or of a folder of transformers. Collective.

        Raises:
            CheckpointError: on every rank, before anything is changed.
        """
        record = self.run.prepared(model)
        if record is None:
            raise ValueError("the model is not prepared")
        self.wait_for_checkpoint()
        load_weights(record, folder, self.run)
        refresh_masters([getattr(o, "optimizer", o) for o in self._optimizers], self.run)
