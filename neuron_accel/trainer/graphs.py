# SPDX-License-Identifier: Apache-2.0
"""A Trainer on a lazy device, which collects a step in one graph.

transformers' loop reads values during a step (the loss and the number of tokens at every log, shapes and results of
every batch in evaluation), which splits the graph of the step or adds further graphs; each is compiled, which takes
minutes on real devices. The methods of this class read values after the step that computes them, and ranks exchange
logged values on the host.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch

from neuron_accel.data.fixed_rows import IGNORED_LABEL

if TYPE_CHECKING:
    from torch import nn

    from neuron_accel.trainer.accelerator import TrainersAccelerator


MAX_LOSSES = 100
"""Largest number of steps whose losses stay on the device if nothing is logged."""


class OneGraph:
    """The methods of the Trainer that differ on lazy devices. On other devices they call those of transformers."""

    accelerator: TrainersAccelerator
    args: Any
    state: Any
    control: Any
    gather_function: Any
    _tr_loss: torch.Tensor
    _total_loss_scalar: float
    _globalstep_last_logged: int
    _losses: list[torch.Tensor] | None = None
    _unlogged: float = 0.0
    _shares: deque[torch.Tensor | None] | None = None
    _share: torch.Tensor | None = None
    _is_empty: bool = False
    _tokens: torch.Tensor | None = None
    _steps_skipped: tuple[int, int] = (0, 1)
    _step_placed: int | None = None
    _random_state_of: str | None = None

    @property
    def _lazy(self) -> bool:
        return self.accelerator.is_lazy

    # ---- an epoch ----------------------------------------------------------------------------------------------------
    def _run_epoch(self, **options: Any) -> None:
        """As in transformers. When resuming within an epoch, batches are skipped by the accelerator of this library:
        Accelerate would wrap the loader in torch_xla's, which executes the recorded operations at every batch."""
        if hasattr(options["train_dataloader"], "set_epoch"):
            options["train_dataloader"].set_epoch(options["epoch"])  # a loader that skips batches would not pass it on
        if not self._lazy:
            super()._run_epoch(**options)  # type: ignore[misc]
            return
        if self._globalstep_last_logged == self.state.global_step:  # type: ignore[has-type]
            self._tr_loss, self._losses, self._unlogged, self._tokens = self._zero(), [], 0.0, None
        steps, skipped = options["steps_in_epoch"], options["steps_trained_in_current_epoch"]
        goes_on = options["resume_from_checkpoint"] is not None and options["epoch"] == options["epochs_trained"]
        if goes_on and skipped and not self.args.ignore_data_skip:
            options["train_dataloader"] = self.accelerator.skip_first_batches(options["train_dataloader"], skipped)
            options["num_update_steps_per_epoch"] -= skipped // self.args.gradient_accumulation_steps
            options["steps_in_epoch"] -= skipped
            self._steps_skipped, self._step_placed = (skipped, steps), None
            self._random_state_of = options["resume_from_checkpoint"]
            options["resume_from_checkpoint"] = None
        try:
            super()._run_epoch(**options)  # type: ignore[misc]
        finally:
            self._steps_skipped = (0, 1)

    def get_batch_samples(self, epoch_iterator: Any, num_batches: int, device: torch.device) -> tuple[list[Any], Any]:
        """Returns the batches of a step, and the number of their labels that are not ignored, over all ranks.

        All batches have one shape, including the last one of an epoch. Samples that were repeated to fill it are
        masked, or, if the loss is a mean, the loss is weighted; see :mod:`neuron_accel.data.fixed_rows`.
        """
        if not self._lazy:
            return super().get_batch_samples(epoch_iterator, num_batches, device)  # type: ignore[misc]
        batches = []
        self._shares = deque()
        for batch in itertools.islice(epoch_iterator, num_batches):
            batch, share = self._real_rows(batch)
            batches.append(batch)
            self._shares.append(share)
        if self._random_state_of is not None:  # shuffling may have drawn random numbers
            self._load_rng_state(self._random_state_of)  # type: ignore[attr-defined]
            self._random_state_of = None
        return batches, self._get_num_items_in_batch(batches, device)  # type: ignore[attr-defined]

    def _real_rows(self, batch: Any) -> tuple[Any, torch.Tensor | None]:
        """Returns the batch and the factor of its loss, or None. If the loss is divided by the number of labels of all
        ranks, the labels of a rank without real rows are masked instead."""
        share = getattr(self._loader, "row_share", None)
        sharded = self.model_accepts_loss_kwargs or self.compute_loss_func is not None  # type: ignore[attr-defined]
        if share is None or not sharded or not self.args.average_tokens_across_devices or "labels" not in batch:
            return batch, share
        if share is not self._share:  # all full batches have the same tensor
            self._share, self._is_empty = share, not float(share.cpu())
        if not self._is_empty:
            return batch, None
        masked = {
            name: torch.full(value.shape, IGNORED_LABEL, dtype=value.dtype).to(value.device)
            for name, value in batch.items()
            if (name == "labels" or name.endswith("_labels")) and not value.is_floating_point()
        }
        return {**batch, **masked}, None

    @property
    def _loader(self) -> Any:
        return self.accelerator.gradient_state.active_dataloader

    # ---- a step ------------------------------------------------------------------------------------------------------
    def training_step(
        self, model: nn.Module, inputs: Any, num_items_in_batch: torch.Tensor | int | None = None
    ) -> torch.Tensor:
        if not self._shares:
            return super().training_step(model, inputs, num_items_in_batch)  # type: ignore[misc]
        share = self._shares.popleft()
        if self._loader is not None:
            self._loader.row_share = share  # the loader has advanced to the last batch of the step
        loss = super().training_step(model, inputs, num_items_in_batch)  # type: ignore[misc]
        return loss if share is None else loss * share.reshape(())

    def compute_loss(self, model: nn.Module, inputs: Any, *args: Any, **more: Any) -> Any:
        """As in transformers, but with ``use_cache`` if no positions are given: without a cache, which the Trainer
        disables, models read positions on the host to detect packed documents."""
        given = ("position_ids", "attention_mask", "use_cache")
        config = getattr(self.model, "config", None)  # type: ignore[attr-defined]
        named = self._lazy and isinstance(inputs, Mapping)
        if named and hasattr(config, "use_cache") and not any(name in inputs for name in given):
            inputs = {**inputs, "use_cache": True}
        return super().compute_loss(model, inputs, *args, **more)  # type: ignore[misc]

    def _track_num_input_tokens(self, inputs: Any) -> None:
        """As in transformers, but counts tokens that are not padding on the device."""
        how = self.args.include_num_input_tokens_seen
        name = getattr(self.model, "main_input_name", "input_ids")  # type: ignore[attr-defined]
        tokens = inputs.get(name) if self._lazy and how != "no" and isinstance(inputs, Mapping) else None
        if tokens is None:
            super()._track_num_input_tokens(inputs)  # type: ignore[misc]
            return
        padding = getattr(getattr(self, "processing_class", None), "pad_token_id", None)
        counted = inputs.get("attention_mask", tokens != padding if padding is not None else None)
        if how == "non_padding" and counted is not None:
            self._tokens = (self._zero(torch.int64) if self._tokens is None else self._tokens) + counted.sum()
        else:  # all ranks have the same number
            self.state.num_input_tokens_seen += tokens.numel() * self.accelerator.data_parallel_size

    def _maybe_log_save_evaluate(
        self, tr_loss: torch.Tensor, grad_norm: Any, model: nn.Module, trial: Any, epoch: float, *args: Any, **more: Any
    ) -> None:
        if self._lazy:
            # Resetting an accumulated loss at each log would be a different graph.
            self._losses, self._tr_loss = [*(self._losses or ()), tr_loss], self._zero()
            if len(self._losses) == MAX_LOSSES:
                self._read_losses()
            skipped, steps = self._steps_skipped
            if skipped and self.state.global_step != self._step_placed:  # this is called again at the end of an epoch
                done = round((self.state.epoch - epoch) * (steps - skipped))
                self.state.epoch = epoch + (skipped + done) / steps
                self._step_placed = self.state.global_step
            if self.control.should_log or self.control.should_evaluate or self.control.should_save:
                self._add_up_tokens()
            if self.control.should_log and self.state.global_step > self._globalstep_last_logged:
                start_time = args[1] if len(args) > 1 else more.get("start_time")
                self._log_step(grad_norm, start_time, more.get("learning_rate"))
        super()._maybe_log_save_evaluate(tr_loss, grad_norm, model, trial, epoch, *args, **more)  # type: ignore[misc]

    def _log_step(self, grad_norm: torch.Tensor | float | None, start_time: Any, learning_rate: float | None) -> None:
        """Logs, instead of transformers, the mean loss over all ranks since the last log, the last norm and learning
        rate."""
        total = self._mean_over_ranks(self._take_losses())
        logs = {"loss": total / (self.state.global_step - self._globalstep_last_logged)}
        if grad_norm is not None:
            logs["grad_norm"] = float(torch.as_tensor(grad_norm).cpu())
        logs["learning_rate"] = self._get_learning_rate() if learning_rate is None else learning_rate  # type: ignore[attr-defined]
        self._total_loss_scalar += total
        self._globalstep_last_logged = self.state.global_step
        self.store_flos()  # type: ignore[attr-defined]
        self.log(logs, start_time)  # type: ignore[attr-defined]

    def _read_losses(self) -> None:
        self._unlogged += sum(float(loss.cpu()) for loss in self._losses or ())
        self._losses = []

    def _take_losses(self) -> float:
        """Returns the sum of the losses of this rank since the last call."""
        self._read_losses()
        total, self._unlogged = self._unlogged, 0.0
        return total

    def _finalize_training(self, *args: Any) -> Any:
        self._total_loss_scalar += self._take_losses()
        return super()._finalize_training(*args)  # type: ignore[misc]

    def _add_up_tokens(self) -> None:
        if self._tokens is not None:
            run = self.accelerator.run
            counts = run.backend.all_gather_object(int(self._tokens.cpu()), run.group(*run.mesh.data_axes))
            self.state.num_input_tokens_seen += sum(counts)
            self._tokens = self._zero(torch.int64)

    def _mean_over_ranks(self, value: float) -> float:
        run = self.accelerator.run
        values = run.backend.all_gather_object(value, run.world)
        return sum(values) / len(values)

    def _zero(self, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """A zero of shape [1]; torch_xla would make a 0-dim one a constant of the graph, which changes the graph."""
        return torch.zeros(1, dtype=dtype).to(self.args.device)

    # ---- evaluation --------------------------------------------------------------------------------------------------
    def evaluation_loop(self, *args: Any, **more: Any) -> Any:
        """As in transformers. ``Seq2SeqTrainer`` gathers with ``gather``, which keeps repeated samples, and leaves the
        results on the device, where concatenating them is another graph for every batch."""
        if self._lazy and self.gather_function == self.accelerator.gather:
            self.gather_function = self.accelerator.gather_for_metrics
        return super().evaluation_loop(*args, **more)  # type: ignore[misc]

    def prediction_step(
        self, model: nn.Module, inputs: Any, prediction_loss_only: bool, ignore_keys: list[str] | None = None
    ) -> tuple[Any, Any, Any]:
        """As in transformers; the loss is the mean over all ranks, without repeated samples."""
        if not self._lazy:
            return super().prediction_step(model, inputs, prediction_loss_only, ignore_keys)  # type: ignore[misc]
        share = None
        if isinstance(inputs, Mapping):
            inputs, share = self._real_rows(inputs)
        loss, logits, labels = super().prediction_step(model, inputs, prediction_loss_only, ignore_keys)  # type: ignore[misc]
        if loss is not None:
            loss = self.accelerator.reduce(loss if share is None else loss * share.reshape(()), "mean")
        self.accelerator.run.backend.step_boundary()
        return loss, logits, labels
