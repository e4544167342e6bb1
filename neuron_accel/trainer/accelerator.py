# SPDX-License-Identifier: Apache-2.0
"""The accelerator of a Trainer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import nn

from neuron_accel.accelerator import NeuronAccelerator  # isort: skip  # first: it chooses the device for Accelerate
from accelerate.utils import recursively_apply, release_memory, send_to_device

from neuron_accel.checkpoint.state.load import load_weights, refresh_masters


class TrainersAccelerator(NeuronAccelerator):
    """A :class:`NeuronAccelerator` for a caller that calls ``free_memory`` and prepares again before each training.

    A model that a plugin has sharded cannot be prepared again, so models and optimizers stay prepared until
    :meth:`start_over`.
    """

    def _keep_batch(self) -> None:
        """The Trainer accumulates by itself; its arguments are changed by :meth:`kept_accumulation`."""
        self._kept_batch.leave_accumulates()

    def kept_accumulation(self, steps: int) -> int:
        """The number of micro-batches that the Trainer accumulates, if it accumulated ``steps`` on all ranks."""
        kept = self._kept_batch
        if kept.is_raised:
            self._say_batch(steps)
        return kept.accumulation(steps)

    @property
    def is_lazy(self) -> bool:
        """Whether the device collects a step in one graph."""
        return self.run.backend.is_lazy

    # ---- values ------------------------------------------------------------------------------------------------------
    def gather_for_metrics(self, input_data: Any, use_gather_object: bool = False) -> Any:
        """As in the base class. On a lazy device the result is moved to the host: the Trainer concatenates results,
        which would be a different graph for every batch."""
        gathered = super().gather_for_metrics(input_data, use_gather_object)
        return send_to_device(gathered, "cpu") if self.is_lazy else gathered

    def pad_across_processes(self, tensor: Any, dim: int = 0, pad_index: int = 0, pad_first: bool = False) -> Any:
        """As in the base class; on a lazy device ranks compare shapes on the host."""
        if not self.is_lazy:
            return super().pad_across_processes(tensor, dim=dim, pad_index=pad_index, pad_first=pad_first)

        def padded(value: torch.Tensor) -> torch.Tensor:
            if not -value.dim() <= dim < value.dim():
                return value
            missing = max(self.run.backend.all_gather_object(value.shape[dim], self.run.world)) - value.shape[dim]
            if not missing:
                return value
            shape = list(value.shape)
            shape[dim] = missing
            filling = value.new_full(shape, pad_index)
            return torch.cat([filling, value] if pad_first else [value, filling], dim)

        return recursively_apply(padded, tensor, error_on_other_type=True)

    # ---- preparing and releasing -------------------------------------------------------------------------------------
    def free_memory(self, *objects: Any) -> Any:
        """Releases loaders, schedulers and registered objects, but not models and optimizers."""
        self.wait_for_checkpoint()
        self._dataloaders.clear()
        self._schedulers.clear()
        self._custom_objects.clear()
        self.step = 0
        return release_memory(*objects)

    def start_over(self) -> None:
        """Releases all prepared objects."""
        super().free_memory()

    def prepare_once(self, model: nn.Module) -> nn.Module:
        """Prepares a model, or returns the result of the first call."""
        record = self.run.prepared(model)
        return self.prepare_model(model) if record is None else record.module

    def wait_for_checkpoint(self) -> None:
        """Waits until an asynchronous save is complete; raises its error on every rank. Collective."""
        self._session.wait()

    def load_stock(self, model: nn.Module, scheduler: Any, folder: Path) -> dict[str, Any] | None:
        """Loads a checkpoint of transformers' ``Trainer`` into a prepared model, its optimizer and ``scheduler``.
        Collective.

        Returns:
            the random state of this rank; None if none was saved.

        Raises:
            CheckpointError: on every rank, before anything is changed.
        """
        from neuron_accel.trainer.stock import restore

        record = self.run.prepared(model)
        if record is None:
            raise ValueError("the model is not prepared")
        self.wait_for_checkpoint()
        return restore(self._session.training(), record, scheduler, folder)

    def load_weights(self, model: nn.Module, folder: Path) -> None:
        """Loads the weights of a checkpoint, or of a folder of transformers, into a prepared model. Collective.

        Raises:
            CheckpointError: on every rank, before anything is changed.
        """
        record = self.run.prepared(model)
        if record is None:
            raise ValueError("the model is not prepared")
        self.wait_for_checkpoint()
        load_weights(record, folder, self.run)
        refresh_masters([getattr(o, "optimizer", o) for o in self._optimizers], self.run)
