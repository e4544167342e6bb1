"""A Trainer on a device that collects a step in one graph.

There transformers' own loop reads values and executes graphs of its own: the loss and the number of tokens at every
log, the shapes and results of every batch in evaluation. Each splits a step's graph in two, or makes another one that
is compiled, for minutes on real devices. Here values are read when the step that computes them is complete, and what
ranks tell each other for a log goes beside the device.
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


MOST_LOSSES = 100
"""So many steps' losses stay on the device where nothing is logged."""


class OneGraph:
    """The methods of the Trainer for graphs. On other devices everything is left to transformers."""

    accelerator: TrainersAccelerator
    args: Any
    state: Any
    control: Any
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
        """As in transformers; an epoch that was interrupted goes on by our own way to skip batches: Accelerate's would
        put torch_xla's loader around ours, which executes what has collected at every batch."""
        if hasattr(options["train_dataloader"], "set_epoch"):
            options["train_dataloader"].set_epoch(options["epoch"])  # of what skips batches it does not reach the order
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
        """The batches of a step, and how many labels count in them, on all ranks.

        Batches have one shape, the last one of an epoch, too. What it was filled up with is masked, or, where the loss
        is a mean, weighted; see :mod:`neuron_accel.data.fixed_rows`.
        """
        if not self._lazy:
            return super().get_batch_samples(epoch_iterator, num_batches, device)  # type: ignore[misc]
        batches = []
        self._shares = deque()
        for batch in itertools.islice(epoch_iterator, num_batches):
            batch, share = self._real_rows(batch)
            batches.append(batch)
            self._shares.append(share)
        if self._random_state_of is not None:  # the order of samples may have drawn random numbers
            self._load_rng_state(self._random_state_of)  # type: ignore[attr-defined]
            self._random_state_of = None
        return batches, self._get_num_items_in_batch(batches, device)  # type: ignore[attr-defined]

    def _real_rows(self, batch: Any) -> tuple[Any, torch.Tensor | None]:
        """``batch``, and what its loss is multiplied by. Where the loss is divided by the number of labels of all ranks
        the labels of a rank without real rows are masked, and nothing is multiplied."""
        share = getattr(self._loader, "row_share", None)
        sharded = self.model_accepts_loss_kwargs or self.compute_loss_func is not None  # type: ignore[attr-defined]
        if share is None or not sharded or not self.args.average_tokens_across_devices or "labels" not in batch:
            return batch, share
        if share is not self._share:  # all full batches have the same one
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
            self._loader.row_share = share  # the loader has gone on to the last batch of the step
        loss = super().training_step(model, inputs, num_items_in_batch)  # type: ignore[misc]
        return loss if share is None else loss * share.reshape(())

    def compute_loss(self, model: nn.Module, inputs: Any, *args: Any, **more: Any) -> Any:
        """As in transformers, whose models read positions to find packed documents unless there is a cache. The Trainer
        switches it off; but where no positions are given there are none to find."""
        given = ("position_ids", "attention_mask", "use_cache")
        config = getattr(self.model, "config", None)  # type: ignore[attr-defined]
        if self._lazy and hasattr(config, "use_cache") and not any(name in inputs for name in given):
            inputs = {**inputs, "use_cache": True}
        return super().compute_loss(model, inputs, *args, **more)  # type: ignore[misc]

    def _track_num_input_tokens(self, inputs: Any) -> None:
        """Counts on the device what has to be counted there."""
        how = self.args.include_num_input_tokens_seen
        tokens = inputs.get(getattr(self.model, "main_input_name", "input_ids"))  # type: ignore[attr-defined]
        if not self._lazy or how == "no" or tokens is None:
            super()._track_num_input_tokens(inputs)  # type: ignore[misc]
            return
        padding = getattr(getattr(self, "processing_class", None), "pad_token_id", None)
        counted = inputs.get("attention_mask", tokens != padding if padding is not None else None)
        if how == "non_padding" and counted is not None:
            self._tokens = (self._zero(torch.int64) if self._tokens is None else self._tokens) + counted.sum()
        else:  # every rank has as many
            self.state.num_input_tokens_seen += tokens.numel() * self.accelerator.data_parallel_size

    def _maybe_log_save_evaluate(
        self, tr_loss: torch.Tensor, grad_norm: Any, model: nn.Module, trial: Any, epoch: float, *args: Any, **more: Any
    ) -> None:
        if self._lazy:
            # A total that is set back from time to time would be another graph each time.
            self._losses, self._tr_loss = [*(self._losses or ()), tr_loss], self._zero()
            if len(self._losses) == MOST_LOSSES:
                self._read_losses()
            skipped, steps = self._steps_skipped
            if skipped and self.state.global_step != self._step_placed:  # at the end of an epoch it is called again
                done = round((self.state.epoch - epoch) * (steps - skipped))
                self.state.epoch = epoch + (skipped + done) / steps
                self._step_placed = self.state.global_step
            if self.control.should_log or self.control.should_evaluate or self.control.should_save:
                self._settle_tokens()
            if self.control.should_log and self.state.global_step > self._globalstep_last_logged:
                start_time = args[1] if len(args) > 1 else more.get("start_time")
                self._log_step(grad_norm, start_time, more.get("learning_rate"))
        super()._maybe_log_save_evaluate(tr_loss, grad_norm, model, trial, epoch, *args, **more)  # type: ignore[misc]

    def _log_step(self, grad_norm: torch.Tensor | float | None, start_time: Any, learning_rate: float | None) -> None:
        """Logs what transformers would, which then has nothing to log: the mean loss of the steps since the last log,
        over all ranks, the last norm and rate."""
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
        """Their sum on this rank since the last call."""
        self._read_losses()
        total, self._unlogged = self._unlogged, 0.0
        return total

    def _finalize_training(self, *args: Any) -> Any:
        self._total_loss_scalar += self._take_losses()
        return super()._finalize_training(*args)  # type: ignore[misc]

    def _settle_tokens(self) -> None:
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
        """[1]: of no dims, torch_xla would make a constant of the graph of it, and another graph thereby."""
        return torch.zeros(1, dtype=dtype).to(self.args.device)

    # ---- evaluation --------------------------------------------------------------------------------------------------
    def prediction_step(
        self, model: nn.Module, inputs: Any, prediction_loss_only: bool, ignore_keys: list[str] | None = None
    ) -> tuple[Any, Any, Any]:
        """As in transformers; the loss is the mean over all ranks, of real samples alone."""
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
