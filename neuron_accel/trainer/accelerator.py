# SPDX-License-Identifier: Apache-2.0
"""The accelerator of a Trainer."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn

from neuron_accel.accelerator import NeuronAccelerator  # isort: skip  # first: it chooses the device for Accelerate
from accelerate.utils import recursively_apply, release_memory, send_to_device

from neuron_accel.checkpoint.state.load import load_weights, refresh_masters
from neuron_accel.checkpoint.state.resume import SavedBatch
from neuron_accel.engine.runtime.run import PreparedModel
from neuron_accel.errors import UsageError
from neuron_accel.loop.precompile_mode import PrecompilationPlugin


class TrainersAccelerator(NeuronAccelerator):
    """A :class:`NeuronAccelerator` for a caller that calls ``free_memory`` and prepares again before each training.

    A model that a plugin has sharded cannot be prepared again, so models and optimizers stay prepared until
    :meth:`start_over`.
    """

    def __init__(self, **options: Any) -> None:
        self._own: list[PreparedModel] = []  # what `prepare_once` has prepared
        super().__init__(**options)

    samples_of_step: Callable[[], int] = staticmethod(int)
    """Returns the samples of an optimizer step: the Trainer accumulates by itself. 0: not known."""

    def _samples_of_step(self) -> int:
        return self.samples_of_step()

    def saved_batch(self, folder: Path) -> SavedBatch:
        """What a checkpoint says of the optimizer steps of the run that saved it. Collective."""
        return self._session.saved_batch(folder)

    @property
    def trial_steps(self) -> int | None:
        """Number of steps after which a run that only collects graphs ends; None for any other run."""
        trials = (p.max_steps for p in self.plan.plugins if isinstance(p, PrecompilationPlugin))
        return next(trials, None)

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
        """Releases all objects but models that the Trainer has not prepared itself, such as a reference or a teacher:
        these may have been changed since, and would lose their autocast.

        Raises:
            UsageError: if such a model is a pipeline, or trained and fully sharded.
        """
        unusable = [r for r in self._kept_models() if any(p.holders or p.weights for p in r.parameters)]
        if unusable:
            raise UsageError(
                "This Trainer cannot begin with a new model.",
                where=", ".join(type(record.original).__name__ for record in unusable),
                why="this model was prepared beside the Trainer's, which cannot be released without it, because no "
                "rank has all of its parameters",
                fix="create a new Trainer for each training, or use zero_1 or tensor_parallel_size",
            )
        super().free_memory()

    def has_prepared_another(self, model: nn.Module) -> bool:
        """Whether the Trainer has prepared another model than this one."""
        mine = self.run.prepared(model)
        return any(record is not mine and self.has_own(record) for record in self.run.models)

    def prepare_once(self, model: nn.Module) -> nn.Module:
        """Prepares the Trainer's model, or returns the result of the first call."""
        prepared = self.prepare_model(model) if self.run.prepared(model) is None else None
        record = self.run.prepared(model if prepared is None else prepared)
        if record is None:
            raise ValueError("the model is not prepared")
        if not self.has_own(record):
            self._own.append(record)
        return record.module

    def has_own(self, record: PreparedModel) -> bool:
        """Whether this is a model that the Trainer trains."""
        return any(record is each for each in self._own)

    def _teardown(self) -> None:
        super()._teardown()
        self._own.clear()

    def _kept_models(self) -> list[PreparedModel]:
        return [record for record in self.run.models if not self.has_own(record)]

    def _saved_models(self) -> list[nn.Module]:
        """The Trainer's model and others that are trained; not a reference or a teacher."""
        records = (self.run.prepared(module) for module in self._models)
        return [record.module for record in records if record is not None and record.optimizable]

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
        load_weights(record, folder, self.run, self._session.training().models)
        refresh_masters([getattr(o, "optimizer", o) for o in self._optimizers], self.run)
